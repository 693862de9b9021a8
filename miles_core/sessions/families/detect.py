"""Which chat family a checkpoint belongs to, from how its template behaves and from its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import UserError
from miles_core.sessions.families.features import features
from miles_core.sessions.families.jinja import OwnTemplate, literals
from miles_core.sessions.families.notation import Notation
from miles_core.sessions.families.own_template import (
    TemplateNotation,
    end_tokens,
    template_notation,
)
from miles_core.sessions.families.proof import Break, prove
from miles_core.sessions.families.registry import FAMILIES, detectable, notation
from miles_core.sessions.messages import Message, MessageError, ToolCall
from miles_core.sessions.tokens import ChatTokenizer
from miles_core.sessions.verify.corpus import Conversation, Writer, about, thinking_aloud

# Without a template: tokens that only one kind of checkpoint has, and its family.
TOKEN_HINTS = (
    (("<|channel|>", "<|start|>", "<|message|>"), "gpt-oss"),
    (("<|start_header_id|>", "<|eom_id|>"), "llama3"),
    (("<|start_header_id|>",), "llama3.0"),
    (("[gMASK]", "<sop>", "<|observation|>"), "glm45"),
    (("<｜User｜>", "<｜Assistant｜>"), "deepseek-v3"),
    (("<|im_start|>", "<|im_end|>"), "chatml"),
)
# What templates call the switch that keeps the reasoning of old answers.
_KEEPING: tuple[dict[str, Any], ...] = ({"preserve_thinking": True}, {"clear_thinking": False})
_PROOF_SEED, _PROOF_CONVERSATIONS, _DETECTION = 7, 30, 20

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}
_SYSTEM, _USER = Message("system", "Be brief."), Message("user", "List the files.")


def _answer(content: str, called: bool, reasoning: str) -> Message:
    call = ToolCall("bash", {"command": 'ls "a b"', "count": 2, "force": True}, "call00000")
    return Message("assistant", content, (call,) if called else (), reasoning)


_RESULT = Message("tool", "one\ntwo", (), "", "call00000", "bash")
_SYSTEM_USER = (_SYSTEM, _USER)
_MORE = Message("user", "And now?")
_THOUGHT = "The user wants files."
PROBES = {
    "a question": Conversation((_USER,)),
    "a system message": Conversation(_SYSTEM_USER),
    "tools": Conversation((_USER,), (_TOOL,)),
    "a system message and tools": Conversation(_SYSTEM_USER, (_TOOL,)),
    "a follow-up": Conversation((*_SYSTEM_USER, _answer("Two files.", False, ""), _MORE)),
    "a follow-up to reasoning": Conversation(
        (*_SYSTEM_USER, _answer("Two files.", False, _THOUGHT), _MORE)
    ),
    "a call": Conversation((*_SYSTEM_USER, _answer("", True, ""), _RESULT), (_TOOL,)),
    "a call after reasoning": Conversation(
        (*_SYSTEM_USER, _answer("", True, _THOUGHT), _RESULT), (_TOOL,)
    ),
    "a call beside words": Conversation(
        (*_SYSTEM_USER, _answer("I look.", True, _THOUGHT), _RESULT), (_TOOL,)
    ),
    "a call and a follow-up": Conversation(
        (*_SYSTEM_USER, _answer("", True, ""), _RESULT, _answer("Two.", False, ""), _MORE),
        (_TOOL,),
    ),
}


@dataclass(frozen=True)
class Misfit:
    """The first probe that a notation renders differently from a template, and where."""

    family: str
    probe: str
    equal: int
    ours: str
    theirs: str

    def __str__(self) -> str:
        at = max(self.equal - 20, 0)
        return (
            f"{self.family} differs in {self.probe}, after {self.ours[at : self.equal]!r}: it "
            f"writes {self.ours[self.equal : self.equal + 40]!r}, the template "
            f"{self.theirs[self.equal : self.equal + 40]!r}"
        )


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def knows_tools(template: OwnTemplate) -> bool:
    """Whether a template shows tools to the model, or refuses them: it does not ignore them."""
    try:
        return template.render([_USER], [_TOOL], True) != template.render([_USER], (), True)
    except MessageError:
        return True


def compare(
    candidate: Notation,
    template: OwnTemplate,
    with_tools: bool,
    probes: Mapping[str, Conversation] = PROBES,
) -> int | Misfit:
    """How many probes a notation renders as a template does, or the first one that differs.

    Those that the template refuses, and the known exceptions of the notation, are left out.
    """
    equal = 0
    for name, probe in probes.items():
        found = features(probe.messages, not with_tools, bool(probe.tools))
        if found & candidate.exceptions.keys():
            continue
        try:
            theirs = template.render(probe.messages, probe.tools, True)
        except MessageError:
            continue
        ours = candidate.prompt(probe.messages, probe.tools)
        if ours != theirs:
            return Misfit(candidate.name, name, common_prefix(ours, theirs), ours, theirs)
        equal += 1
    return equal


def fitting(tokenizer: ChatTokenizer) -> list[Notation]:
    """The notations whose special tokens a tokenizer has."""
    return [
        candidate
        for candidate in detectable()
        if all(tokenizer.id_of(token) is not None for token in candidate.tokens)
    ]


def drawn_probes(template: OwnTemplate) -> dict[str, Conversation]:
    """Generated conversations, up to each point at which the model is asked.

    The last ones are about the texts that the template looks for.
    """
    drawn = Writer(_PROOF_SEED).conversations(_DETECTION) + about(literals(template))
    return {
        f"generated conversation {number}, up to message {end - 1}": Conversation(
            conversation.messages[:end], conversation.tools
        )
        for number, conversation in enumerate(drawn)
        for end in (*conversation.answers(), len(conversation.messages))
        if conversation.messages[end - 1].role != "assistant"
    }


def detect(tokenizer: ChatTokenizer) -> Notation:
    """The notation of a checkpoint; raises UserError that says what was tried."""
    if not tokenizer.chat_templates():
        return _by_tokens(tokenizer)
    template = OwnTemplate(tokenizer)
    with_tools = knows_tools(template)
    candidates = fitting(tokenizer)
    results = [(candidate, compare(candidate, template, with_tools)) for candidate in candidates]
    misfits = [result for _, result in results if isinstance(result, Misfit)]
    matches = [(equal, c) for c, equal in results if isinstance(equal, int) and equal]
    drawn = drawn_probes(template) if matches else {}
    for _, candidate in sorted(matches, key=lambda match: match[0], reverse=True):
        result = compare(candidate, template, with_tools, drawn)
        if isinstance(result, int):
            return candidate
        misfits.append(result)
    try:
        return proven_template(tokenizer, template)
    except UserError as error:
        raise _nothing_fits(tokenizer, misfits, error) from error


def _by_tokens(tokenizer: ChatTokenizer) -> Notation:
    for tokens, family in TOKEN_HINTS:
        if family in FAMILIES and all(tokenizer.id_of(token) is not None for token in tokens):
            return notation(family)
    raise UserError(
        f"{tokenizer.directory} has no chat template and no special tokens of a known chat family",
        f"Name its family with --chat-family ({', '.join(FAMILIES)}).",
    )


def _nothing_fits(tokenizer: ChatTokenizer, misfits: Sequence[Misfit], own: UserError) -> UserError:
    tried = ", ".join(misfit.family for misfit in misfits) or "none has its special tokens"
    nearest = max(misfits, key=lambda misfit: misfit.equal, default=None)
    said = f"\n  nearest: {nearest}" if nearest else ""
    return UserError(
        f"no chat family fits {tokenizer.directory}\n  tried: {tried}{said}\n"
        f"  own template: {own.message}",
        "If it is one of these families all the same, name it with --chat-family; else give the "
        "checkpoint a template that only appends.",
    )


def proven_template(
    tokenizer: ChatTokenizer, template: OwnTemplate | None = None
) -> TemplateNotation:
    """The notation of a checkpoint's own template; raises UserError if it is not append-only.

    A template that has a switch for keeping old reasoning is proven with it, too.
    """
    template = template or OwnTemplate(tokenizer)
    found, broken = _prove(tokenizer, template)
    for variables in _KEEPING if broken else ():
        switched, still = _prove(tokenizer, OwnTemplate(tokenizer, variables))
        if still is None:
            found, broken = switched, None
            break
    if broken is not None:
        raise UserError(
            f"the chat template of {tokenizer.directory} is not append-only: {broken}",
            "Choose the checkpoint's own --chat-family, which keeps what was sampled, or give it a "
            "template that only appends.",
        )
    return found


def _prove(
    tokenizer: ChatTokenizer, template: OwnTemplate
) -> tuple[TemplateNotation, Break | None]:
    """The notation of a template, and where it is not append-only."""
    found = template_notation(tokenizer, template, fitting(tokenizer))
    corpus = Writer(_PROOF_SEED).conversations(_PROOF_CONVERSATIONS) + about(literals(template))
    if not found.reasoning:
        corpus = [thinking_aloud(conversation) for conversation in corpus]
    broken, local, accepted = prove(found, corpus, end_tokens(tokenizer, found))
    if broken is None and not accepted:
        raise UserError(
            f"the chat template of {tokenizer.directory} refuses every conversation that was tried",
            "Choose another --chat-family.",
        )
    return TemplateNotation(template, found.stops, found.reader, local), broken
