"""Proves over generated conversations that a family is append-only and token-exact."""

from __future__ import annotations

import time
from collections.abc import Sequence

from miles_core.sessions.families.family import ChatFamily
from miles_core.sessions.families.jinja import literals
from miles_core.sessions.families.notation import NotAppendOnly
from miles_core.sessions.messages import MessageError
from miles_core.sessions.parsers.sglang import Parse
from miles_core.sessions.verify.against import TemplateCheck, check_stops
from miles_core.sessions.verify.corpus import Conversation, Writer, about
from miles_core.sessions.verify.episode import SampledCheck
from miles_core.sessions.verify.pieces import PieceChecks
from miles_core.sessions.verify.report import Check, Report, Where

DEFAULT_SEED = 0
DEFAULT_CONVERSATIONS = 200


def verify(
    family: ChatFamily,
    seed: int = DEFAULT_SEED,
    number: int = DEFAULT_CONVERSATIONS,
    conversations: Sequence[Conversation] | None = None,
    theirs: Parse | None = None,
) -> Report:
    """Check a family over `number` conversations drawn by `seed`, or over those given.

    To those drawn come short ones about the words that the checkpoint's own template looks for.

    `theirs` is another parser of the family's answers, which has to read the same.
    """
    began = time.monotonic()
    own = TemplateCheck(family)
    if conversations is None:
        conversations = Writer(seed, family.notation.reasoning).conversations(number)
        conversations += about(literals(own.template) if own.template else ())
    pieces, sampled = PieceChecks(family, seed, theirs), SampledCheck(family, seed)
    accepted = Check("accepted", "the family has a form for the conversation")
    for index, conversation in enumerate(conversations):
        try:
            pieces.add(index, conversation)
            sampled.add(index, conversation)
            own.add(index, conversation)
        except MessageError as error:
            accepted.excuse(str(error))
        except NotAppendOnly as error:
            last = len(conversation.messages) - 1
            accepted.hold(False, Where(index, conversation, last), str(error))
        else:
            accepted.passed += 1
    if not accepted.passed:
        accepted.failed += 1
    stops = [family.tokenizer.token_of(i) or str(i) for i in family.stop_token_ids]
    return Report(
        tokenizer=str(family.tokenizer.directory),
        family=family.name,
        seed=seed,
        conversations=len(conversations),
        stop_tokens=stops,
        local=family.notation.local,
        checks=[accepted, *pieces.checks(), sampled.check, own.check, check_stops(family)],
        seconds=time.monotonic() - began,
    )
