"""JSON as it stands in prompts."""

from __future__ import annotations

import json
from typing import Any

from miles_core.sessions.messages import clean_text


def json_text(value: Any) -> str:
    """`value` as JSON with the characters themselves, not their escapes, as far as UTF-8 has them.

    The separators are ", " and ": ", as in every chat template.
    """
    return clean_text(json.dumps(value, ensure_ascii=False))
