"""A sandbox for Harbor made of Linux namespaces, an overlay and cgroups; no container engine."""
