"""Checks against the checkpoint itself: its own template, and its stop tokens."""

from __future__ import annotations

from miles_core.sessions.families.detect import knows_tools
from miles_core.sessions.families.family import ChatFamily
from miles_core.sessions.families.features import features
from miles_core.sessions.families.jinja import OwnTemplate
from miles_core.sessions.messages import MessageError
from miles_core.sessions.verify.corpus import Conversation
from miles_core.sessions.verify.report import Check, Where, difference

_NO_TEMPLATE = "the checkpoint has no template of its own"
_REFUSED = "the template refuses the conversation"


class TemplateCheck:
    """The text is that of the checkpoint's own template, but for the notation's exceptions."""

    def __init__(self, family: ChatFamily) -> None:
        self.family = family
        self.check = Check("own template", "the text is that of the checkpoint's own template")
        self.template: OwnTemplate | None = None
        self._tools = False
        if not family.tokenizer.chat_templates():
            self.check.notes.append(_NO_TEMPLATE)
            return
        self.template = OwnTemplate(family.tokenizer)
        self._tools = knows_tools(self.template)

    def add(self, number: int, conversation: Conversation) -> None:
        """Compare a conversation at each point where the model is asked."""
        if self.template is None:
            return
        ends = [*conversation.answers(), len(conversation.messages)]
        for end in ends:
            if conversation.messages[end - 1].role != "assistant":
                self._compare(Where(number, conversation, end - 1), self.template)

    def _compare(self, where: Where, template: OwnTemplate) -> None:
        messages = where.conversation.messages[: where.message + 1]
        tools = where.conversation.tools
        ours = self.family.render_text(messages, tools)
        try:
            theirs = template.render(messages, tools, True)
        except MessageError:
            self.check.excuse(_REFUSED)
            return
        exceptions = self.family.notation.exceptions
        known = features(messages, not self._tools, bool(tools)) & exceptions.keys()
        if ours != theirs and known:
            self.check.excuse(exceptions[min(known)])
            return
        self.check.hold(ours == theirs, where, difference(ours, theirs, "the template"))


def check_stops(family: ChatFamily) -> Check:
    """Each stop token is one id that no other text can merge with."""
    check = Check("stop tokens", "each stop token is a single id of its own")
    nowhere = Where(0, Conversation(()), 0)
    for token_id in family.stop_token_ids:
        token = family.tokenizer.token_of(token_id) or ""
        ids = family.tokenizer.encode(f"a{token}b")
        alone = ids.count(token_id) == 1 and family.tokenizer.is_added(token_id)
        alone = alone and family.tokenizer.encode(token) == [token_id]
        check.hold(alone, nowhere, f"{token!r} is tokenised as {ids}")
    return check
