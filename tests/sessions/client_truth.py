"""What a session must have recorded, written out by hand: no code of the product is used here.

The tokenizer has one id for each byte and three special tokens, so the ids of a text can be
spelled out: `ids`. Conversations are in the notation of the family qwen3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
GENERATION_PROMPT = "<|im_start|>assistant\n"


def make_byte_tokenizer(directory: Path) -> Path:
    """A checkpoint directory whose tokenizer gives byte b the id 3 + b."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {shown: 3 + byte for byte, shown in enumerate(_shown_bytes())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for index, token in enumerate(SPECIAL)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"eos_token": "<|im_end|>", "miles_chat_family": "qwen3"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _shown_bytes() -> list[str]:
    """The character by which a byte-level tokenizer shows each byte (as GPT-2 does)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in plain)
    moved = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def ids(text: str) -> list[int]:
    """The ids of a text, special tokens included."""
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        found += [SPECIAL.index(part)] if part in SPECIAL else [3 + b for b in part.encode()]
    return found


def text_of(tokens: Sequence[int]) -> str:
    """The text of some ids: the opposite of `ids`."""
    parts = [SPECIAL[t].encode() if t < 3 else bytes([t - 3]) for t in tokens]
    return b"".join(parts).decode("utf-8", "replace")


def system(content: str) -> str:
    return f"<|im_start|>system\n{content}<|im_end|>\n"


def system_with_tools(content: str, tools: Sequence[dict[str, Any]]) -> str:
    """A system message and the description of tools, as Qwen's models have been taught it."""
    before = f"{content}\n\n" if content else ""
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return system(
        f"{before}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def user(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n"


def tool_result(*contents: str) -> str:
    """Results of the calls of one answer."""
    inner = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"<|im_start|>user{inner}<|im_end|>\n"


def bash_call(content: str, command: str) -> str:
    """The text of an answer that calls `bash`, without its end."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
    before = f"{content}\n" if content else ""
    return f"{before}<tool_call>\n{call}\n</tool_call>"


@dataclass
class Line:
    """One expected sample: prompts and answers in turn, from the first token to the last.

    A prompt that follows an answer begins with the line feed after the answer's end.
    """

    parts: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, text: str) -> Line:
        """More prompt; the generation prompt is added by `answer`."""
        return Line([*self.parts, ("prompt", text)])

    def answer(self, text: str) -> Line:
        """An answer that ended by itself, after the generation prompt."""
        return Line([*self.parts, ("prompt", GENERATION_PROMPT), ("answer", text)])

    def turns(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each answer as (all ids before it, its ids)."""
        tokens: list[int] = []
        found = []
        for kind, text in self.parts:
            new = ids(text) + ([END] if kind == "answer" else [])
            if kind == "answer":
                found.append((tuple(tokens), tuple(new)))
            tokens += new
        return found

    def tokens(self) -> tuple[int, ...]:
        before, answer = self.turns()[-1]
        return before + answer


def check_samples(found: dict[str, Any], lines: Sequence[Line], engine: Any) -> None:
    """The samples are exactly `lines`, in any order; each answer is trained in the first with it.

    `engine.calls` are the engine's own records: what a sample says of a `rid` must be what the
    engine was asked and sampled under it.
    """
    expected = {line.tokens(): line for line in lines}
    assert len(expected) == len(lines), "two expected samples are the same"
    got = [tuple(sample["tokens"]) for sample in found["samples"]]
    unexpected = [text_of(tokens) for tokens in got if tokens not in expected]
    missing = [text_of(tokens) for tokens in expected if tokens not in got]
    assert sorted(got) == sorted(expected), f"{len(got)}: {unexpected=} {missing=}"
    records = {call.rid: call for call in engine.calls}
    seen = set()
    for sample in found["samples"]:
        turns = [t for t in expected[tuple(sample["tokens"])].turns() if t not in seen]
        seen.update(turns)
        mask, logprobs = [0] * len(sample["tokens"]), [0.0] * len(sample["tokens"])
        for turn, (before, answer) in zip(sample["turns"], turns, strict=True):
            record = records.pop(turn["rid"])
            assert (tuple(record.input_ids), tuple(record.output_ids)) == (before, answer)
            span = slice(len(before), len(before) + len(answer))
            assert (turn["start"], turn["end"]) == (span.start, span.stop)
            assert turn["weight_version"] == record.version
            assert turn["finish_reason"] == "stop"
            mask[span] = [1] * len(answer)
            logprobs[span] = record.logprobs
        assert sample["loss_mask"] == mask
        assert sample["logprobs"] == logprobs
    assert found["model_calls"] == len(seen)
    assert found["end_reason"] is None
