"""What a Dockerfile installs with apt, and what of it the host has."""

from pathlib import Path

import pytest

from miles_core.agent_server.sandbox import packages

pytestmark = pytest.mark.agent_env

STATUS = """Package: git
Status: install ok installed
Version: 1:2.39.5-0+deb12u2
Description: fast
 Status: not one

Package: gone
Status: deinstall ok config-files
Version: 1
"""


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("apt-get install -y git", ["git"]),
        ("apt update && apt install -y a b=7 && rm -rf /var/lib/apt/lists/*", ["a", "b=7"]),
        (
            "apt-get update && apt-get install -y --no-install-recommends \\\n  git \\\n tmux",
            ["git", "tmux"],
        ),
        ("DEBIAN_FRONTEND=noninteractive apt-get -qq -o a=b install git; echo done", ["git"]),
        ("sudo apt-get update", []),
        ("apt-get install -y $PACKAGES", None),
        ("apt-get install -y $(cat list)", None),
        ("apt-get remove -y git", None),
        ("apt-get install -y 'git", None),
        ("echo apt-get", None),
        ("pip install git", None),
    ],
)
def test_packages_are_read_where_they_are_plain(script: str, wanted: object) -> None:
    assert packages.asked(script) == wanted


def test_only_what_is_installed_in_the_version_asked_for_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text(STATUS)
    here = packages.installed(status)
    assert here == {"git": "1:2.39.5-0+deb12u2"}
    assert packages.installed(tmp_path / "absent") == {}
    monkeypatch.setattr(packages, "installed", lambda: here)
    asked = ["git", "git=1:2.39.5-0+deb12u2", "git=2", "gone", "zsh"]
    assert packages.missing(asked) == ["git=2", "gone", "zsh"]
