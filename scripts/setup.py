"""Make the two Python environments and check the system packages.

Standard library only, for any Python >= 3.8: it runs before there is an environment.

    python3 scripts/setup.py          make or update .venv and .venv-agent
    python3 scripts/setup.py lock     write locks/*.txt from the environments as they are
"""

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINER_VERSIONS = ((3, 11), (3, 12), (3, 13))
AGENT_VERSIONS = ((3, 12), (3, 13), (3, 14))
ENVIRONMENTS = (
    (".venv", "locks/trainer.txt", TRAINER_VERSIONS),
    (".venv-agent", "locks/agent.txt", AGENT_VERSIONS),
)
# command -> package that has it, for apt-get and dnf alike
SYSTEM_COMMANDS = {
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "prlimit": "util-linux",
}
AGENT_COMMANDS = {"tmux": "tmux"}  # the agent terminus-2 types into it; nothing else needs it
PROBE = "import sys, venv, ensurepip, ssl, sqlite3, ctypes; print(*sys.version_info[:2])"


class SetupError(Exception):
    """Something that the person who runs setup has to do."""


def probe(python):
    """(major, minor) of an interpreter that runs and can make environments, else None."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.decode().split()
    if done.returncode != 0 or len(words) != 2:
        return None
    return int(words[0]), int(words[1])


def candidates(version):
    """Paths at which an interpreter of a version may be, the likeliest first."""
    name = "python{}.{}".format(*version)
    found = [sys.executable]
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found += [os.path.join(folder, name), os.path.join(folder, "python3")]
    roots = [os.environ.get("PYENV_ROOT"), os.path.expanduser("~/.pyenv"), "/opt/pyenv"]
    for root in filter(None, roots):
        found += sorted(glob.glob("{}/versions/{}.{}.*/bin/{}".format(root, *version, name)))
    found += ["/usr/bin/" + name, "/usr/local/bin/" + name]
    if shutil.which("uv"):
        done = subprocess.run(
            ["uv", "python", "find", "--no-project", "{}.{}".format(*version)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        found += done.stdout.decode().split()
    return [path for path in dict.fromkeys(found) if os.access(path, os.X_OK)]


def find_python(versions, needed_for):
    """The first interpreter that really runs, by order of `versions`."""
    for version in versions:
        for path in candidates(version):
            if probe(path) == version:
                return path
    names = ", ".join("{}.{}".format(*version) for version in versions)
    first = "{}.{}".format(*versions[0])
    raise SetupError(
        f"no working Python for {needed_for}: one of {names} is needed, with its venv module.\n"
        f"Install one, for instance `apt-get install python{first}-venv` or "
        f"`uv python install {first}`, and run `make setup` again."
    )


def run(command, **kwargs):
    """Run a command; its failure ends the setup with the command in the message."""
    done = subprocess.run(command, **kwargs)
    if done.returncode != 0:
        raise SetupError(f"failed with exit status {done.returncode}: " + " ".join(command))


def stamp_of(lock):
    """What an environment was made from: its lock, the package's metadata, its place."""
    digest = hashlib.sha256()
    digest.update((ROOT / lock).read_bytes())
    project = (ROOT / "pyproject.toml").read_text().split("[tool.ruff]")[0]
    digest.update(project.encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def make_environment(name, lock, versions):
    """Make or update one environment; nothing to do when its stamp fits."""
    env = ROOT / name
    python = str(env / "bin" / "python")
    stamp, wanted = env / ".miles-setup", stamp_of(lock)
    usable = probe(python) in versions
    if usable and stamp.is_file() and stamp.read_text() == wanted:
        print(f"{name} is up to date")
        return
    if not usable:
        base = find_python(versions, name)
        print(f"making {name} with {base}", flush=True)
        run([base, "-m", "venv", "--clear", str(env)])
    if stamp.is_file():
        stamp.unlink()
    print(f"installing {lock} into {name}", flush=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(pip + ["-r", str(ROOT / lock)])
    run(pip + ["--no-deps", "-e", str(ROOT)])
    run([python, "-m", "pip", "--disable-pip-version-check", "check"])
    stamp.write_text(wanted)


def install_command(packages):
    """The command of this system that installs packages, or None."""
    if shutil.which("apt-get"):
        return ["apt-get", "install", "-y", "--no-install-recommends"] + packages
    if shutil.which("dnf"):
        return ["dnf", "install", "-y"] + packages
    return None


def as_root():
    """Prefix with which a command runs as root without asking, or None."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo"):
        quiet = subprocess.DEVNULL
        if subprocess.run(["sudo", "-n", "true"], stdout=quiet, stderr=quiet).returncode == 0:
            return ["sudo", "-n"]
    return None


def missing_packages(commands=SYSTEM_COMMANDS):
    absent = [command for command in commands if shutil.which(command) is None]
    return sorted({commands[command] for command in absent})


def install(packages):
    """Install system packages, or say how to in a SetupError."""
    command, prefix = install_command(packages), as_root()
    if command is None:
        raise SetupError("install these with your system's package manager: " + " ".join(packages))
    if prefix is None:
        raise SetupError("run this, then `make setup` again:\n  sudo " + " ".join(command))
    print("installing system packages: " + " ".join(packages), flush=True)
    if command[0] == "apt-get":
        run(prefix + ["apt-get", "update", "-q"])
    run(prefix + command)


def system_packages():
    """Install what the sandbox needs, or say how to; then what only some agents need."""
    packages = missing_packages()
    if packages:
        install(packages)
        if missing_packages():
            raise SetupError("still missing after installing: " + " ".join(missing_packages()))
    packages = missing_packages(AGENT_COMMANDS)
    if packages:
        try:
            install(packages)
        except SetupError as error:
            print(f"setup goes on without tmux: the agent terminus-2 cannot run ({error})")


def write_locks():
    """Pin what the environments hold; local builds lose their local version label."""
    for name, lock, _ in ENVIRONMENTS:
        python = str(ROOT / name / "bin" / "python")
        frozen = subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"],
            stdout=subprocess.PIPE,
            check=True,
        )
        pins = []
        for line in frozen.stdout.decode().splitlines():
            if not re.match(r"^[A-Za-z0-9._-]+==\S+$", line):
                raise SetupError(f"{name} has a package without a plain version: {line}")
            pins.append(re.sub(r"\+[A-Za-z0-9.]+$", "", line))
        head = "# Written by `make lock`. Do not edit.\n"
        (ROOT / lock).parent.mkdir(exist_ok=True)
        (ROOT / lock).write_text(head + "\n".join(sorted(pins, key=str.lower)) + "\n")
        print(f"{lock}: {len(pins)} packages")


def main(argv):
    try:
        if argv == ["lock"]:
            write_locks()
        elif argv:
            raise SetupError(f"unknown argument {argv[0]}; known: lock")
        else:
            system_packages()
            for environment in ENVIRONMENTS:
                make_environment(*environment)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
