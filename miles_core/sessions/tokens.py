"""The checkpoint's tokenizer, as plain functions between text and ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_core.errors import UserError
from miles_core.sessions.messages import clean_text


class ChatTokenizer:
    """Encodes and decodes text with its special tokens; safe to use from several threads.

    Reads `tokenizer.json` and `tokenizer_config.json` (and `generation_config.json`, when there)
    of a Hugging Face directory.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"no tokenizer.json in {self.directory}",
                "Give the directory of a Hugging Face checkpoint with a fast tokenizer.",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{path} cannot be read: {error}", "Give a tokenizer.json that is whole."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = self._read("tokenizer_config.json")
        self.generation_config = self._read("generation_config.json")

    def _read(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        except (ValueError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}", "Give the whole file.") from error
        if not isinstance(value, dict):
            raise UserError(f"{path} is no JSON object", "Give the checkpoint's own file.")
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it become their ids and none is added.

        Halves of surrogate pairs, which no tokenizer knows, become U+FFFD.
        """
        # Of the library's functions only those for batches let other threads run meanwhile.
        batch = self._tokenizer.encode_batch_fast([clean_text(text)], add_special_tokens=False)
        return batch[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_of(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    @property
    def size(self) -> int:
        """How many ids there are; the largest is one less where no id is left out."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def is_added(self, token_id: int) -> bool:
        """Whether an id is a token of its own, which no other text can merge with."""
        return token_id in self._tokenizer.get_added_tokens_decoder()

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a token of its own that stands for no text."""
        token = self._tokenizer.get_added_tokens_decoder().get(token_id)
        return token is not None and token.special

    def special_token(self, name: str) -> str | None:
        """The text of e.g. `eos_token`, which a configuration spells as a string or an object."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def chat_template(self) -> str | None:
        """The checkpoint's own chat template."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text("utf-8")
        value = self.config.get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            value = named.get("default")
        return value if isinstance(value, str) else None
