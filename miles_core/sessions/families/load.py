"""From the directory of a tokenizer to its chat family."""

from __future__ import annotations

from pathlib import Path

from miles_core.errors import UserError
from miles_core.sessions.families.detect import detect, proven_template
from miles_core.sessions.families.family import ChatFamily, stop_ids
from miles_core.sessions.families.notation import Notation
from miles_core.sessions.families.registry import TEMPLATE, family_name, notation
from miles_core.sessions.tokens import ChatTokenizer


def load_family(tokenizer_dir: Path | str, name: str = "auto") -> ChatFamily:
    """The family `name`, or the one that fits (`auto`), over the tokenizer of a checkpoint.

    Raises UserError when there is no such family, when the tokenizer lacks its special tokens,
    when none fits, and when a checkpoint's own template is to be used and is not append-only.
    """
    tokenizer = ChatTokenizer(tokenizer_dir)
    marked = tokenizer.config.get("miles_chat_family")
    if name == "auto" and marked is not None:
        name = str(marked)
    if name == "auto":
        return _over(tokenizer, detect(tokenizer))
    name = family_name(name)
    chosen = proven_template(tokenizer) if name == TEMPLATE else notation(name)
    return _over(tokenizer, chosen)


def _over(tokenizer: ChatTokenizer, chosen: Notation) -> ChatFamily:
    needed = dict.fromkeys([*chosen.tokens, chosen.stops[0]])
    missing = [token for token in needed if tokenizer.id_of(token) is None]
    if missing:
        raise UserError(
            f"chat family {chosen.name!r} needs the tokens {' '.join(missing)}, which "
            f"{tokenizer.directory} does not have",
            "Choose another --chat-family, or leave it at auto.",
        )
    return ChatFamily(tokenizer, chosen, stop_ids(tokenizer, chosen))
