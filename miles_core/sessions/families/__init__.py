"""Chat families: how kinds of checkpoints turn messages into ids and ids into messages."""

from miles_core.sessions.families.family import ChatFamily, openai_message
from miles_core.sessions.families.load import load_family
from miles_core.sessions.families.notation import NotAppendOnly
from miles_core.sessions.families.registry import FAMILIES

__all__ = ["FAMILIES", "ChatFamily", "NotAppendOnly", "load_family", "openai_message"]
