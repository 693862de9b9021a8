"""A tokenizer of bytes and a few whole words, written as Hugging Face files.

Every text is encodable and comes back as it was: what is no known word goes byte by byte, so a
made-up name is spelled letter by letter, and the model can learn to copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_core.runs.files import read_json, write_json

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = [PAD, "<|im_start|>", END_OF_TURN]
# Fixed pieces of every conversation: (text, only where it is a whole word)
PIECES = [
    ("<tool_call>", False),
    ("</tool_call>", False),
    ('{"name": "bash", "arguments": {"command": "', False),
    ('"}}', False),
    (".txt", False),
    ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", True),
    ("No such file or directory", True),
    ("system", True),
    ("user", True),
    ("assistant", True),
    ("tool", True),
]


def write_tokenizer(directory: Path, words: Sequence[str], chat_template: str) -> int:
    """Write the tokenizer's files into `directory`; returns the size of its vocabulary.

    `words` become single tokens where they stand as whole words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    known = {text for text, _ in PIECES}
    pieces = PIECES + [(word, True) for word in sorted(set(words) - known)]
    backend.add_tokens(
        [AddedToken(text, single_word=whole, normalized=False) for text, whole in pieces]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    _mark_family(directory)
    return int(backend.get_vocab_size())


def _mark_family(directory: Path) -> None:
    """Name the chat family, so that a session server does not have to guess."""
    path = directory / "tokenizer_config.json"
    write_json(path, {**read_json(path), "miles_chat_family": "terse"})
