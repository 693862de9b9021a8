"""The tokenizer: every text comes back, fixed pieces are one token, names go letter by letter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from miles_core.modelinit.tokenizer import PIECES, SPECIAL


@given(st.text())
def test_any_text_round_trips(family, text):
    assert family.tokenizer.decode(family.tokenizer.encode(text)) == text


def test_every_byte_has_a_token(family):
    every = "".join(map(chr, range(0x110000 - 1, 0, -997))) + "".join(map(chr, range(0x800)))
    every = "".join(c for c in every if not 0xD800 <= ord(c) < 0xE000)
    assert family.tokenizer.decode(family.tokenizer.encode(every)) == every
    alone = {family.tokenizer.decode([i]) for i in range(256)}
    assert {chr(i) for i in range(128)} <= alone


@pytest.mark.parametrize("piece", [*SPECIAL, *(text for text, _ in PIECES), "Write", "mkdir"])
def test_fixed_pieces_are_one_token(family, piece):
    assert len(family.tokenizer.encode(piece)) == 1


@pytest.mark.parametrize("name", ["mofe", "tool", "toko", "intoa", "echoo"])
def test_names_go_letter_by_letter(family, name):
    spelled = [family.tokenizer.decode([i]) for i in family.tokenizer.encode(f"x{name}.txt")]
    assert spelled == ["x", *name, ".txt"]


def test_transformers_reads_the_same_tokenizer(tokenizer_dir, family):
    other = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = '<|im_start|>user\nWrite mofe to kiba.txt  é<|im_end|>\n<tool_call>\n{"a": 1}'
    assert other.encode(text, add_special_tokens=False) == family.tokenizer.encode(text)
    assert other.decode(other.encode(text)) == text
    assert other.eos_token == "<|im_end|>"
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    assert config["miles_chat_family"] == "terse" and family.name == "terse"
    messages = [{"role": "user", "content": "Remove mofe.txt"}]
    with_template = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert with_template == family.render_text(messages)
