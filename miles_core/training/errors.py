"""What a rank raises. The driver makes these anew from their pickles, so nothing heavy is imported
here: neither torch nor megatron."""

from __future__ import annotations


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message names the file and the reason."""


class CorruptionError(RuntimeError):
    """What the ranks hold is damaged; a new start from the last checkpoint puts it right."""


class NonFiniteError(RuntimeError):
    """More updates had a non-finite loss or gradient than are allowed."""
