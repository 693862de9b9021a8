"""What trainer and engines must agree on to pass weights: digests, shared memory, groups.

Imports torch and nothing of the project, so that both sides may use it.
"""
