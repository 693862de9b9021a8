"""What can go wrong with a sandbox and its image."""

from __future__ import annotations


class SandboxError(RuntimeError):
    """The sandbox could not be made, or broke; the message says where."""


class SandboxGone(SandboxError):
    """The sandbox has ended while it was needed."""


class OutOfMemory(SandboxError):
    """A command of a Dockerfile was ended for a lack of memory; the message names its line."""


class SandboxUnsupported(RuntimeError):
    """The task asks for something that this sandbox cannot give; the message names it."""


class DockerfileInvalid(RuntimeError):
    """No builder would take the task's Dockerfile; the message names the line."""


class NoProcess(SandboxError):
    """The sandbox has no process left, or no memory for one."""
