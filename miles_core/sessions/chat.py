"""A model call inside a session, from the agent's request to the recorded turn."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from miles_core.sessions.engine_call import ContextRefused, EngineCaller, EngineFailure
from miles_core.sessions.families.family import ChatFamily
from miles_core.sessions.messages import MessageError
from miles_core.sessions.openai_api import ApiError, ChatRequest, completion, engine_sampling
from miles_core.sessions.session import Place, Session, Turn

log = logging.getLogger("miles.sessions")


@dataclass(frozen=True)
class ChatService:
    """Answers chat requests. Rendering and tokenising run in threads, off the event loop."""

    family: ChatFamily
    engine: EngineCaller

    async def answer(self, session: Session, request: ChatRequest) -> dict[str, Any]:
        """One model call; raises `ApiError`. Calls of one session wait for each other.

        Cancelling it aborts the generation at the engine, and nothing is recorded.
        """
        async with session.lock:
            if session.closed:
                raise session_gone()
            self._check_turns(session)
            try:
                place = await asyncio.to_thread(
                    session.place, self.family, request.messages, request.tools
                )
            except MessageError as error:
                raise ApiError(400, "invalid_value", str(error), "messages") from error
            return await self._generate(session, request, place)

    def _check_turns(self, session: Session) -> None:
        limit = session.request.max_turns
        if limit is not None and len(session.kept_turns()) >= limit:
            session.end_reason = "turn_limit"
            raise ApiError(400, "turn_limit", f"this session's {limit} model calls are used up")

    async def _generate(
        self, session: Session, request: ChatRequest, place: Place
    ) -> dict[str, Any]:
        input_ids = place.input_ids()
        remaining = session.request.max_seq_len - len(input_ids)
        if remaining < 1:
            raise self._context_full(session, len(input_ids))
        params = engine_sampling(
            request, session.request.sampling_params, remaining, self.family.stop_token_ids
        )
        rid = uuid.uuid4().hex
        try:
            generation = await self.engine.generate(session.session_id, rid, input_ids, params)
        except ContextRefused as error:
            raise self._context_full(session, len(input_ids)) from error
        except EngineFailure as error:
            session.end_reason = "engine_failed"
            log.warning("session %s: %s", session.name, error)
            raise ApiError(error.status, "engine_failed", str(error)) from error
        except asyncio.CancelledError:
            await asyncio.shield(self.engine.abort(session.session_id, rid))
            raise
        message = await asyncio.to_thread(self.family.parse_message, generation.output_ids)
        if session.closed:
            raise session_gone()
        session.turns.append(
            Turn(
                parent=place.parent,
                tools_key=place.tools_key,
                new_messages=place.new_messages,
                answer=message,
                prompt_ids=place.prompt_ids,
                output_ids=generation.output_ids,
                logprobs=generation.logprobs,
                rid=rid,
                weight_version=generation.weight_version,
                finish_reason=generation.finish_reason,
            )
        )
        session.end_reason = None
        usage = (len(input_ids), len(generation.output_ids))
        return completion(request, rid, message, generation.finish_reason, usage)

    @staticmethod
    def _context_full(session: Session, prompt_tokens: int) -> ApiError:
        session.end_reason = "token_budget"
        limit = session.request.max_seq_len
        return ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens, which leaves no room for an answer.",
            "messages",
        )


def session_gone() -> ApiError:
    return ApiError(404, "session_not_found", "there is no such session")
