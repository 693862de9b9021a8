"""Text of token ids, for models whose directory holds a `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.engines.sampling import RequestError, SamplingParams
from miles_core.engines.shape import ModelDirectoryError


class TextCodec:
    """Encodes prompts and decodes outputs; without a tokenizer, only ids can be served."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        self.tokenizer: Any = None
        if path.exists():
            from tokenizers import Tokenizer

            try:
                self.tokenizer = Tokenizer.from_file(str(path))
            # The library raises bare Exception for a broken file.
            except Exception as error:
                raise ModelDirectoryError(f"{path} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer.json in the model directory; send input_ids")
        return list(self.tokenizer.encode(text).ids)

    def check(self, params: SamplingParams) -> None:
        """Refuse stop strings when there is no tokenizer to see them with."""
        if params.stop and self.tokenizer is None:
            raise RequestError("sampling_params.stop needs a tokenizer.json in the model directory")

    def matched_stop(self, output_ids: list[int], params: SamplingParams) -> str | None:
        """The stop string that the newest token completed, if any.

        A token stands for at least one byte, so a string that ends in the newest token lies in as
        many tokens as it has bytes.
        """
        window = max(len(stop.encode()) for stop in params.stop) + 1
        tail = self.tokenizer.decode(output_ids[-window:], skip_special_tokens=False)
        return next((stop for stop in params.stop if stop in tail), None)

    def text(
        self, output_ids: list[int], params: SamplingParams, finish: dict[str, Any] | None
    ) -> str:
        """Decoded output; what ended it is cut off unless `no_stop_trim`."""
        if self.tokenizer is None:
            return ""
        matched = finish.get("matched") if finish else None
        ids = output_ids
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        skip = params.skip_special_tokens
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip)
        if isinstance(matched, str) and not params.no_stop_trim:
            text = text[: text.rfind(matched)] if matched in text else text
        return text
