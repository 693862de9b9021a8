"""From the body of `/generate` to requests, and from finished requests to its answers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from miles_core.engines.engine import Engine
from miles_core.engines.request import Request
from miles_core.engines.sampling import RequestError, parse_sampling

# Fields of SGLang that are accepted because at these values they ask for nothing.
IDLE_FIELDS: dict[str, tuple[Any, ...]] = {
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": (False, None),
    "return_prompt_token_ids": (False, None),
    "return_entropy": (False, None),
    "return_hidden_states": (False, None),
    "lora_path": (None, ""),
    "priority": (None, 0),
    "session_params": (None, {}),
}
HINT_FIELDS = {"extra_key", "cache_salt", "session_id", "routing_key", "model"}
FIELDS = {
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "return_routed_experts",
    "routed_experts_start_len",
    "rid",
    "stream",
}


class Waiter:
    """The requests of one HTTP call, and the bridge from the engine's thread to its event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.requests: list[Request] = []
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.left = 0

    def submit(self) -> None:
        """Hand all requests to the engine."""
        self.left = len(self.requests)
        for request in self.requests:
            self.engine.submit(request)

    def notify(self, request: Request) -> None:
        """Called in the engine's thread: a request ended, or has a new token to stream."""
        if request.stream:
            event = request.answer(self.engine.codec, self.engine.version)
            if len(self.requests) > 1:
                event["index"] = self.requests.index(request)
            self._post(self.events.put_nowait, event)
        if request.finish is not None:
            self.left -= 1
            if self.left == 0:
                self._post(self._finish)

    def _post(self, function: Any, *args: Any) -> None:
        # The loop is closed only when the process is going down.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def _finish(self) -> None:
        self.events.put_nowait(None)
        if not self.done.done():
            self.done.set_result(None)

    def answers(self) -> list[dict[str, Any]]:
        """All answers, in order."""
        return [r.answer(self.engine.codec, self.engine.version) for r in self.requests]

    def cancel_unfinished(self) -> None:
        """Abort what still runs, when the client has gone."""
        for request in self.requests:
            if request.finish is None:
                self.engine.abort(request.rid, "the client went away")


def _prompts(body: dict[str, Any], engine: Engine) -> tuple[bool, list[list[int]]]:
    """Whether the call is a batch, and the ids of each prompt."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise RequestError("text must be a string or a list of strings")
        return isinstance(text, list), [engine.codec.encode(item) for item in texts]
    if not isinstance(ids, list) or not ids:
        raise RequestError("input_ids must be a list of integers or a list of such lists")
    batched = isinstance(ids[0], list)
    return batched, ids if batched else [ids]


def _check_ids(ids: Any, engine: Engine) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise RequestError("input_ids must be a list of integers, at least one")
    if min(ids) < 0 or max(ids) >= engine.shape.vocab:
        raise RequestError(f"input_ids must be from 0 to {engine.shape.vocab - 1}")
    if len(ids) >= engine.context_length:
        raise RequestError(
            f"the input has {len(ids)} tokens, which is longer than the context of "
            f"{engine.context_length} tokens allows"
        )
    return ids


def _each(body: dict[str, Any], name: str, count: int, default: Any) -> list[Any]:
    """A field that a batch may give once for all or as a list."""
    value = body.get(name, default)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _rids(body: dict[str, Any], count: int, batched: bool) -> list[str]:
    rid = body.get("rid")
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [f"{rid}_{index}" for index in range(count)] if batched else [rid]
    if not isinstance(rid, list) or not all(isinstance(item, str) and item for item in rid):
        raise RequestError("rid must be a string, or a list of strings for a batch")
    if len(rid) != count:
        raise RequestError(f"rid has {len(rid)} entries for {count} prompts")
    return rid


def _experts_start(asked: Any, start: Any, ids: list[int], engine: Engine) -> int | None:
    """From which token on experts are to be told; None when they were not asked for."""
    if asked is not True:
        return None
    if engine.shape.experts is None:
        raise RequestError("return_routed_experts: this model has no experts")
    start = 0 if start is None else start
    if type(start) is not int or not 0 <= start < len(ids):
        raise RequestError("routed_experts_start_len must be a position of the input")
    return start


def parse_generate(body: dict[str, Any], waiter: Waiter) -> tuple[bool, bool]:
    """Fill `waiter.requests` from a body; answers whether it is a batch, and streamed.

    Raises:
        RequestError: a field is unknown, wrong or unsupported, or an input is too long.
    """
    engine = waiter.engine
    for name, value in body.items():
        if name in IDLE_FIELDS:
            if value not in IDLE_FIELDS[name]:
                raise RequestError(f"{name} is not supported by this engine")
        elif name not in FIELDS and name not in HINT_FIELDS:
            raise RequestError(f"field {name} is unknown")
    batched, prompts = _prompts(body, engine)
    count = len(prompts)
    sampling = _each(body, "sampling_params", count, None)
    logprob = _each(body, "return_logprob", count, False)
    starts = _each(body, "logprob_start_len", count, -1)
    experts = _each(body, "return_routed_experts", count, False)
    expert_starts = _each(body, "routed_experts_start_len", count, 0)
    stream = body.get("stream", False) is True
    rids = _rids(body, count, batched)
    for index, ids in enumerate(prompts):
        ids = _check_ids(ids, engine)
        params = parse_sampling(sampling[index])
        engine.codec.check(params)
        start = -1 if starts[index] is None else starts[index]
        if type(start) is not int or start < -1 or start >= len(ids):
            raise RequestError("logprob_start_len must be -1 or a position of the input")
        waiter.requests.append(
            Request(
                rid=rids[index],
                input_ids=ids,
                params=params,
                notify=waiter.notify,
                return_logprob=logprob[index] is True,
                logprob_start=start if logprob[index] is True else -1,
                stream=stream,
                experts_start=_experts_start(experts[index], expert_starts[index], ids, engine),
                limit=min(params.max_new_tokens, engine.context_length - len(ids)),
            )
        )
    return batched, stream
