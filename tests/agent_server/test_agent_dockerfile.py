"""Reading Dockerfiles, their words, and build contexts with .dockerignore."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_core.agent_server.sandbox import dockerfile, words
from miles_core.agent_server.sandbox.context import Context
from miles_core.agent_server.sandbox.errors import DockerfileInvalid

VARIABLES = {"a": "1", "path": "/x y", "empty": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", ["one", "two"]),
        ("'one two' \"three four\"", ["one two", "three four"]),
        ("$a${a}b $missing", ["11b", ""]),
        ("$path", ["/x y"]),
        ("'$a' \"$a\" \\$a", ["$a", "1", "$a"]),
        ("${empty:-word} ${empty-word} ${missing-word}", ["word", "", "word"]),
        ("${a:+set} ${empty:+set} ${empty+set}", ["set", "", "set"]),
        ("${missing:-${a}}", ["1"]),
        ("a\\ b c\\\\d", ["a b", "c\\d"]),
        ('"quoted \\" mark"', ['quoted " mark']),
        ("cost$ 5$", ["cost$", "5$"]),
        ('""', [""]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words.split(text, VARIABLES) == expected


@pytest.mark.parametrize("text", ["'open", '"open', "${open", "${a:%x}"])
def test_unfinished_words(text: str) -> None:
    with pytest.raises(words.WordError):
        words.split(text, VARIABLES)


def read(text: str) -> dockerfile.Dockerfile:
    return dockerfile.read(text.encode(), {"TARGETARCH": "amd64"})


def only(text: str) -> list[dockerfile.Instruction]:
    return read(f"FROM debian\n{text}").stages[0].instructions


def test_lines_continue_and_comments_between_them_do_not_count() -> None:
    (run,) = only("RUN echo a\\\n# a comment\n\n  b \\  \n  && echo c # kept\n")
    assert run.text == "echo a  b   && echo c # kept"
    assert run.line == 2


def test_line_ends_of_other_systems_and_the_escape_directive() -> None:
    made = read("# escape=`\r\nFROM debian\r\nRUN dir c:\\`\r\n  && echo x\r\n")
    assert made.stages[0].instructions[0].text == "dir c:\\  && echo x"


def test_directives_are_only_at_the_top() -> None:
    made = read("# a comment\n# escape=`\nFROM debian\nRUN echo \\\n  x\n")
    assert made.stages[0].instructions[0].text == "echo   x"


def test_heredocs() -> None:
    first, second, third = only(
        "RUN <<EOF\nline 1\n  line $2 \\\nEOF\n"
        "COPY <<-'A' <<B /dir/\n\ttabs\n\tA\nname: $b\nB\n"
        'RUN echo "no <<EOF here" && test $((1 << 2)) = 4 && cat <<< word\n'
    )
    assert [h.text for h in first.heredocs] == ["line 1\n  line $2 \\\n"]
    assert first.raw_heredocs == "line 1\n  line $2 \\\nEOF\n"
    assert [(h.name, h.text, h.expanded) for h in second.heredocs] == [
        ("A", "tabs\n", False),
        ("B", "name: $b\n", True),
    ]
    assert third.heredocs == ()


def test_stages_and_arguments_before_the_first() -> None:
    made = read(
        "ARG TAG=12\nARG IMAGE=debian:${TAG}\nFROM --platform=linux/amd64 ${IMAGE} AS Base\n"
        "FROM base AS work\nFROM scratch\nFROM work\n"
    )
    assert [stage.image for stage in made.stages] == ["debian:12", "base", "scratch", "work"]
    assert made.chain(3) == [0, 1, 3]
    assert made.root_image(3)[0] == "debian:12"
    assert (made.find("base", 3), made.find("2", 3), made.find("2", 2)) == (0, 2, None)
    assert made.arguments["IMAGE"] == "debian:12"


def test_assignments() -> None:
    variables = {"x": "1"}
    one, old, quoted = only("ENV A=$x B=\"two words\" C='$x'\nENV D some  words $x\nENV E=a\\ b\n")
    assert dockerfile.key_values(one, variables) == {"A": "1", "B": "two words", "C": "$x"}
    assert dockerfile.key_values(old, variables) == {"D": "some  words 1"}
    assert dockerfile.key_values(quoted, variables) == {"E": "a b"}
    (declared,) = only("ARG A=1 B C=")
    assert dockerfile.arguments(declared, {}) == [("A", "1"), ("B", None), ("C", "")]


def test_json_form_and_flags() -> None:
    copy, test, mount = only(
        'COPY --chown=1:2 --link ["a b", "/c"]\nRUN [ -f /x ] && echo\nRUN --mount=type=cache x\n'
    )
    assert copy.json_form() == ["a b", "/c"]
    assert copy.flags()[0] == [("chown", "1:2"), ("link", "")]
    assert test.json_form() is None
    assert mount.flags() == ([("mount", "type=cache")], "x")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "no FROM"),
        ("# nothing\n\n", 1, "no FROM"),
        ("ARG A=1\n", 1, "no FROM"),
        ("\nRUN true\nFROM debian\n", 2, "before the first FROM"),
        ("FROM\n", 1, "names no image"),
        ("FROM debian as\n", 1, "AS name"),
        ("FROM debian\nRUM true\n", 2, "no such instruction"),
        ("FROM debian\nRUN <<EOF\ntrue\n", 2, "has no end"),
        ("FROM 'debian\n", 1, "has no end"),
    ],
)
def test_what_no_builder_would_take(text: str, line: int, reason: str) -> None:
    with pytest.raises(DockerfileInvalid, match=reason) as caught:
        read(text)
    assert f"Dockerfile line {line}:" in str(caught.value)


@pytest.mark.parametrize(
    ("image", "host", "with_builder"),
    [
        ("debian:12-slim", True, True),
        ("docker.io/library/ubuntu@sha256:00", True, True),
        ("localhost/made:1", True, False),
        ("scratch", True, False),
        ("alpine:3", False, False),
        ("somebody/python:3", False, False),
    ],
)
def test_images_that_the_host_stands_in_for(image: str, host: bool, with_builder: bool) -> None:
    assert dockerfile.stands_in(image, builder=False) is host
    assert dockerfile.stands_in(image, builder=True) is with_builder


def make_context(root: Path, files: dict[str, str]) -> Context:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Context(root)


def test_dockerignore(tmp_path: Path) -> None:
    ignore = "# comment\n*.log\n**/cache\n/build/\nsecret?.txt\n!build/kept.txt\n[xy].c\n"
    names = ["a.log", "sub/a.log", "sub/cache/x", "cache/y", "build/z", "build/kept.txt"]
    names += ["secret1.txt", "secret12.txt", "x.c", "z.c"]
    context = make_context(tmp_path, {".dockerignore": ignore, **dict.fromkeys(names, "")})
    files = {path for path in context.entries if not context.is_directory(path)}
    assert files == {".dockerignore", "sub/a.log", "build/kept.txt", "secret12.txt", "z.c"}


def test_digest_is_of_what_can_be_copied(tmp_path: Path) -> None:
    files = {".dockerignore": "notes\n", "a": "1", "notes": "x", "d/b": "2"}
    first = make_context(tmp_path, files).digest()
    os.utime(tmp_path / "a", (1, 1))
    (tmp_path / "notes").write_text("other")
    assert Context(tmp_path).digest() == first
    (tmp_path / "d/b").chmod(0o755)
    changed = Context(tmp_path).digest()
    assert changed != first
    (tmp_path / "a").write_text("2")
    assert Context(tmp_path).digest() not in (first, changed)


def test_sources(tmp_path: Path) -> None:
    context = make_context(tmp_path, {"a.txt": "", "b.txt": "", "d/c.txt": "", "[x].txt": ""})
    os.symlink("a.txt", tmp_path / "link")
    os.symlink("/etc/passwd", tmp_path / "out")
    (tmp_path / "d" / os.fsdecode(b"odd \xff\n'name")).touch()
    assert context.find("*.txt") == [(n, n) for n in ("[x].txt", "a.txt", "b.txt")]
    assert context.find("d/../a.txt") == [("a.txt", "a.txt")]
    assert context.find("[[]x].txt") == [("[x].txt", "[x].txt")]
    assert context.find("./") == [("", "")]
    assert context.find("link") == [("a.txt", "link")]
    assert context.find("missing") == context.find("d*/missing") == []
    assert os.fsdecode(b"d/odd \xff\n'name") in context.entries
    for outside in ("../x", "d/../../x", "out"):
        with pytest.raises(ValueError, match=r"build context"):
            context.find(outside)
