"""Errors that a person can act on."""

from __future__ import annotations


class UserError(Exception):
    """Something that the person who started a command can put right.

    `message` says what is wrong and where, `fix` what to do next. The command line prints both,
    without a traceback, and ends with exit status 2.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message
