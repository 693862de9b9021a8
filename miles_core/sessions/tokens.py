"""The checkpoint's tokenizer, as plain functions between text and ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_core.errors import UserError
from miles_core.sessions.messages import clean_text

# Characters: what is longer is counted piece by piece where its length is limited.
_LONG_TEXT = 256 * 2**10
_PIECE = 64 * 2**10
_PIECE_SLACK = 64


class TooManyTokens(Exception):
    """A text has more ids than allowed: at least `count`."""

    def __init__(self, count: int) -> None:
        super().__init__(f"more than {count} tokens")
        self.count = count


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

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of `text`; special tokens in it become their ids and none is added.

        Halves of surrogate pairs, which no tokenizer knows, become U+FFFD. Raises `TooManyTokens`
        for a long text that has more than `limit` ids, before it has been tokenised whole.
        """
        if limit is not None and len(text) > _LONG_TEXT:
            self._check_length(text, limit)
        # Of the library's functions only those for batches let other threads run meanwhile.
        batch = self._tokenizer.encode_batch_fast([clean_text(text)], add_special_tokens=False)
        return batch[0].ids

    def _check_length(self, text: str, limit: int) -> None:
        count = 0
        for at in range(0, len(text), _PIECE):
            # A token that a cut goes through may become some more.
            count += max(0, len(self.encode(text[at : at + _PIECE])) - _PIECE_SLACK)
            if count > limit:
                raise TooManyTokens(count)

    def encode_after(self, before: str, text: str, limit: int | None = None) -> list[int]:
        """As `encode`, of a `text` that follows `before`.

        Some tokenizers put a space before a text that stands alone, or let a token take the white
        space after it.
        """
        head, ids = self.encode(before), self.encode(before + text, limit)
        return ids[len(head) :] if ids[: len(head)] == head else self.encode(text)

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

    def special_token(self, name: str) -> str | None:
        """The text of e.g. `eos_token`, which a configuration spells as a string or an object."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's own chat templates by name; one without a name is `default`.

        Files take the place of what `tokenizer_config.json` says, as in Hugging Face's libraries.
        """
        more = sorted((self.directory / "additional_chat_templates").glob("*.jinja"))
        files = {"default": self.directory / "chat_template.jinja", **{p.stem: p for p in more}}
        found = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
        if found:
            return found
        value = self.config.get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return {entry["name"]: entry["template"] for entry in value}
        return dict(value) if isinstance(value, dict) else {}
