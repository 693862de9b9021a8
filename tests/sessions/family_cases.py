"""Each chat family with a real tokenizer and a real template of its kind, and random talk."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from real_tokenizers import template_text, tokenizer_dir

from miles_core.sessions.families import ChatFamily, load_family
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.verify.corpus import TEXTS, Conversation

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """`tokenizer` and `template` as in `tokenizer_dir`; `family` is what has to be found."""

    family: str
    tokenizer: str
    template: str | None
    chosen: str = "auto"

    def load(self) -> ChatFamily:
        return _load(self)

    def __str__(self) -> str:
        name = self.template or ("none" if self.template == "" else "own")
        return f"{self.family}-{self.tokenizer}-{'text' if '{' in name else name.split('/')[-1]}"


@functools.cache
def _load(case: Case) -> ChatFamily:
    template = case.template
    if template == "thinking":  # Qwen3-*-Thinking-2507 differs from Qwen3 in its last lines
        kept = template_text("trl/qwen3").rpartition("{%- if add_generation_prompt %}")[0]
        prompt = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
        template = kept + "{%- if add_generation_prompt %}" + prompt + "{%- endif %}"
    return load_family(tokenizer_dir(case.tokenizer, template), case.chosen)


CASES = [
    Case("qwen3", "qwen3", None),
    Case("qwen3-thinking", "qwen3", "thinking"),
    Case("qwen3-instruct", "qwen3", "trl/qwen3_instruct_2507"),
    Case("qwen2.5", "qwen3", "trl/qwen2_5"),
    Case("qwen3.5", "qwen3", "trl/qwen3_5_think"),
    Case("qwen3.5-nothink", "qwen3", "trl/qwen3_5_nothink"),
    Case("glm45", "glm", "trl/glm4moe"),
    Case("llama3", "llama3_1", "trl/llama3_1"),
    Case("llama3.0", "llama3", None),
    Case("deepseek-v3", "deepseek_v3", None),
    Case("gpt-oss", "gptoss", "trl/gptoss"),
    Case("chatml", "qwen3", CHATML),
    Case("smollm2", "qwen3", SMOLLM2),
    Case("template", "qwen3", "trl/qwen2_5", "template"),
    Case("template", "llama3", None, "template"),
    Case("qwen3.6", "qwen3", "trl/qwen3_6"),
    Case("template", "qwen3", "trl/qwen3_8"),
]
SLOW_CASES = [  # most templates are in a package of 76 MB, a tokenizer is in one of 93 MB
    Case("qwen3", "qwen3", "trl/qwen3"),
    Case("llama3.2", "llama3_1", "trl/llama3_2"),
    Case("template", "qwen3", "trl/qwen3_6", "template"),
    Case("glm47", "glm", "llama.cpp/GLM-4.7-Flash"),
    Case("glm45", "glm", "llama.cpp/GLM-4.6"),
    Case("qwen3", "qwen3", "llama.cpp/Qwen-Qwen3-0.6B"),
    Case("qwen3.5", "qwen3", "llama.cpp/Qwen3.5-4B"),
    Case("qwen2.5", "qwen3", "llama.cpp/Qwen-Qwen2.5-7B-Instruct"),
    Case("llama3", "llama3_1", "llama.cpp/meta-llama-Llama-3.1-8B-Instruct"),
    Case("llama3", "llama3_1", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct"),
    Case("llama3.2", "llama3_1", "llama.cpp/meta-llama-Llama-3.2-3B-Instruct"),
    Case("gpt-oss", "gptoss", "llama.cpp/openai-gpt-oss-120b"),
    Case("template", "qwen3", "llama.cpp/Qwen3-Coder"),
    Case("smollm2", "smollm2", None),
]

# Anything but NUL and halves of surrogate pairs; and texts that notations are written in.
_LETTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
_MARKS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>", "<|eot_id|>", "[gMASK]",
    "<|user|>", "<|end|>", "<|call|>", "{", '"', "\\u0041", "\n\n", "  ",
)  # fmt: skip
WILD = st.lists(st.one_of(st.text(_LETTERS, max_size=12), st.sampled_from([*TEXTS, *_MARKS])),
                max_size=3).map("".join)  # fmt: skip
TAME = st.lists(
    st.one_of(
        st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="<>{}[]|;`"),
                max_size=10),
        st.sampled_from([t for t in TEXTS if "<" not in t and "{" not in t]),
    ),
    max_size=3,
).map(" ".join).map(str.strip)  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | TAME,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TAME, inner, max_size=2),
    max_leaves=4,
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "options": {"type": "object"}},
                "required": ["command"],
            },
        },
    },
)


@st.composite
def calls(draw: st.DrawFn, most: int) -> tuple[ToolCall, ...]:
    number = draw(st.integers(0, most))
    made = []
    for _ in range(number):
        arguments: dict[str, Any] = {"command": draw(TAME)}
        if draw(st.booleans()):
            arguments["options"] = draw(st.dictionaries(TAME, _JSON, max_size=2))
        made.append(ToolCall("bash", arguments, f"call{draw(st.integers(0, 99999)):05}"))
    return tuple(made)


@st.composite
def conversations(draw: st.DrawFn, reasoning: bool) -> Conversation:
    """A conversation of any shape that begins with a user's message, perhaps after a system's."""
    messages = [Message("system", draw(WILD))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(WILD)))
    offered = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        made = draw(calls(2)) if offered else ()
        thought = draw(TAME) if reasoning and draw(st.booleans()) else ""
        content = draw(TAME) if not made or draw(st.booleans()) else ""
        messages.append(Message("assistant", content, made, thought))
        messages += [Message("tool", draw(WILD), (), "", call.id, call.name) for call in made]
        least = 0 if made else 1
        roles = st.lists(st.sampled_from(["user", "user", "system"]), min_size=least, max_size=2)
        messages += [Message(role, draw(WILD)) for role in draw(roles)]
    return Conversation(tuple(messages), TOOLS if offered else ())
