"""Which ids a user of a sandbox has, by the accounts of the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.agent_server.sandbox.errors import SandboxError

READ = ["sh", "-c", "cat /etc/passwd; echo; cat /etc/group"]
"""The command whose output `find` reads."""


@dataclass(frozen=True)
class Account:
    """A user to run commands as; `groups` are the further ones of a user of /etc/passwd."""

    uid: int
    gid: int
    home: str
    groups: tuple[int, ...] = ()


ROOT = Account(0, 0, "/root")


def is_root(user: str | int | None) -> bool:
    """Whether a user of a task.toml or a Dockerfile is root."""
    return user is None or str(user).partition(":")[0] in ("", "root", "0")


def find(user: str | int, listed: str) -> Account:
    """The account of `name`, `name:group`, `uid` or `uid:gid`, as containers understand them.

    `listed` is the output of `READ`. A number needs no account. Raises SandboxError for a name
    that the sandbox does not have.
    """
    name, _, group = str(user).partition(":")
    passwd, _, groups = listed.partition("\n\n")
    account = None
    for fields in _fields(passwd, 6):
        if name in (fields[0], fields[2]) and fields[2].isdigit() and fields[3].isdigit():
            of_user = tuple(_groups_of(fields[0], groups))
            account = Account(int(fields[2]), int(fields[3]), fields[5] or "/", of_user)
            break
    if account is None:
        if not name.isdigit():
            raise SandboxError(f"user {name!r} does not exist in the sandbox")
        account = Account(int(name), 0, "/")
    if not group:
        return account
    return Account(account.uid, _group(group, groups), account.home)


def _groups_of(user: str, groups: str) -> list[int]:
    rows = [fields for fields in _fields(groups, 4) if user in fields[3].split(",")]
    return [int(fields[2]) for fields in rows if fields[2].isdigit()]


def _group(group: str, groups: str) -> int:
    for fields in _fields(groups, 3):
        if group in (fields[0], fields[2]) and fields[2].isdigit():
            return int(fields[2])
    if not group.isdigit():
        raise SandboxError(f"group {group!r} does not exist in the sandbox")
    return int(group)


def _fields(text: str, least: int) -> list[list[str]]:
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= least]
