"""A model call inside a session, from the agent's request to the recorded turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.sessions.calls import Call
from miles_core.sessions.chat_answer import completion
from miles_core.sessions.chat_request import ChatRequest, engine_sampling
from miles_core.sessions.engine_call import EngineCaller, EngineRequest
from miles_core.sessions.errors import ApiError, session_gone, session_lost
from miles_core.sessions.families import ChatFamily
from miles_core.sessions.generation import (
    ContextRefused,
    EngineFailure,
    Generation,
    WantedExperts,
)
from miles_core.sessions.messages import Message, MessageError
from miles_core.sessions.pace import Pace
from miles_core.sessions.session import Match, Place, Session
from miles_core.sessions.store import SessionStore, disk_failed
from miles_core.sessions.tokens import TooManyTokens
from miles_core.sessions.tree import Turn

log = logging.getLogger("miles.sessions")

# Longer new text (characters) is rendered, and longer answers (tokens) are read, in a thread:
# other sessions go on meanwhile.
_SHORT = 16 * 2**10
_LONG_ANSWER = 4 * 2**10


@dataclass(frozen=True)
class ChatService:
    """Answers chat requests of all sessions. `parse` reads answers of the family."""

    family: ChatFamily
    parse: Callable[[str, Sequence[dict[str, Any]]], Message]
    engine: EngineCaller
    store: SessionStore
    pace: Pace = field(default_factory=Pace)

    async def answer(self, session: Session, request: ChatRequest, call: Call) -> dict[str, Any]:
        """One model call; raises `ApiError`. Calls of one session run beside each other.

        Cancelling it aborts the generation at the engine, and nothing is recorded. After a fault of
        the server's own the session says so, too.
        """
        try:
            return await self._answer(session, request, call)
        except ApiError:
            raise
        except Exception:
            self.store.end(session, "session_failed")
            raise

    async def _answer(self, session: Session, request: ChatRequest, call: Call) -> dict[str, Any]:
        started = session.next_event()
        if session.lost:
            self.store.end(session, "session_failed")
            raise session_lost()
        session.note_ignored(request.ignored)
        place = await self._place(session, request)
        self._check_turns(session, place)
        generation = await self._generate(session, request, place, call)
        if len(generation.output_ids) > _LONG_ANSWER:
            message = await asyncio.to_thread(self._message, request, generation, call.rid)
        async with self.pace.piece():
            if len(generation.output_ids) <= _LONG_ANSWER:
                message = self._message(request, generation, call.rid)
            if session.closed:
                raise session_gone()
            self._record(session, place, generation, message, call.rid, started)
            usage = (place.length, len(generation.output_ids))
            listed = self._logprobs(generation) if request.logprobs else None
            return completion(request, call.rid, message, generation.finish_reason, usage, listed)

    def _check_turns(self, session: Session, place: Place) -> None:
        """Refuse a call beyond the limit, of which a retry of an answered call uses nothing."""
        limit = session.request.max_turns
        if limit is None:
            return
        tree, question = session.tree, place.question()
        used = sum(turn.question() != question or tree.continued(turn) for turn in tree.kept())
        # This call runs too.
        if used + len(session.calls.running) > limit:
            self.store.end(session, "turn_limit")
            raise ApiError(400, "turn_limit", f"this session's {limit} model calls are used up")

    async def _place(self, session: Session, request: ChatRequest) -> Place:
        """Where the request belongs, and the ids that are new."""
        limit = session.request.max_seq_len
        try:
            async with self.pace.piece():
                match = session.match(request.messages, request.tools)
                if _length(match, request) <= _SHORT:
                    return match.render(self.family, limit)
            return await asyncio.to_thread(match.render, self.family, limit)
        except TooManyTokens as error:
            taken = 0 if match.parent is None else match.parent.length
            raise self._context_full(session, f"more than {taken + error.count}") from error
        except (MessageError, RecursionError) as error:
            text = str(error) if isinstance(error, MessageError) else "nested too deep"
            raise ApiError(400, "invalid_value", text, "messages") from error

    async def _generate(
        self, session: Session, request: ChatRequest, place: Place, call: Call
    ) -> Generation:
        wanted = session.request
        remaining = wanted.max_seq_len - place.length
        if remaining < 1:
            raise self._context_full(session, str(place.length))
        stops = self.family.stop_token_ids
        params = engine_sampling(request, wanted.sampling_params, remaining, stops)
        experts = None
        if wanted.routed_experts:
            first = 0 if place.parent is None else place.parent.length - 1
            experts = WantedExperts(first, session.expert_bytes or 0)
        asked = EngineRequest(session.key, call.rid, place.input_ids(), params, experts)

        def show(ids: list[int]) -> None:
            text = self.family.text_of(ids)
            call.settle(*self._settled(text.rstrip("\ufffd"), request.stop))

        try:
            return await self.engine.generate(asked, show if call.wants_progress else None)
        except ContextRefused as error:
            raise self._context_full(session, str(place.length)) from error
        except EngineFailure as error:
            self.store.end(session, "engine_failed")
            log.warning("session %s: %s", session.name, error)
            raise ApiError(error.status, "engine_failed", str(error)) from error

    def _settled(self, text: str, stops: tuple[str, ...]) -> tuple[str, str]:
        """What of a text so far is certain; a client's stop may still cut it."""
        if stops:
            text = _cut(text, stops)
            longest = max(len(stop) for stop in stops)
            text = text[: max(0, len(text) - longest)]
        return self.family.notation.settled(text)

    def _message(self, request: ChatRequest, generation: Generation, rid: str) -> Message:
        text = _cut(self.family.text_of(generation.output_ids.tolist()), request.stop)
        return self.parse(text, request.tools).with_call_ids(f"call_{rid}")

    def _record(
        self,
        session: Session,
        place: Place,
        generation: Generation,
        message: Message,
        rid: str,
        started: int,
    ) -> None:
        """Append the turn to the tree and to the disk; raises `ApiError` when that is full."""
        journal = self.store.journal(session)
        turn = Turn(
            index=len(session.tree.turns),
            parent=place.parent,
            tools_key=place.tools_key,
            new=place.new,
            answer=message,
            prompt_ids=place.prompt_ids,
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            length=place.length + len(generation.output_ids),
            rid=rid,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            started=started,
            ended=session.next_event(),
        )
        try:
            turn.experts = journal.append(turn, generation.experts)
        except OSError as error:
            self.store.end(session, "session_failed")
            raise disk_failed(error) from error
        session.expert_bytes = generation.experts_row or session.expert_bytes
        session.tree.add(turn)
        self.store.end(session, None)

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """OpenAI's list of tokens with their log-probabilities."""
        out = []
        for token, logprob in zip(
            generation.output_ids.tolist(), generation.logprobs.tolist(), strict=True
        ):
            text = self.family.tokenizer.decode([token])
            entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            out.append({**entry, "top_logprobs": []})
        return out

    def _context_full(self, session: Session, prompt_tokens: str) -> ApiError:
        self.store.end(session, "token_budget")
        limit = session.request.max_seq_len
        return ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens, which leaves no room for an answer.",
            "messages",
        )


def _length(match: Match, request: ChatRequest) -> int:
    """About how much text there is to render, in characters; too many messages count as text."""
    if match.parent is None:
        return request.size
    calls = sum(len(message.tool_calls) for message in match.new)
    if calls:
        return request.size
    return sum(len(m.content) + len(m.reasoning_content) + 64 for m in match.new)


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the first of a client's own stops."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text
