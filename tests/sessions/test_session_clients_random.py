"""Random clients over a session server against a simple model of what a session has to record.

The model knows every request and answer as a whole and looks for prefixes among all of them: it
has no tree. Its texts and ids are written out by `client_truth`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from client_engine import Slow, StepEngine
from client_truth import (
    Line,
    bash_call,
    check_samples,
    make_byte_tokenizer,
    system,
    system_with_tools,
    text_of,
    tool_result,
)
from session_helpers import TOKEN, session_server, until

CONTROL = {"Authorization": f"Bearer {TOKEN}"}
TOOLS: list[list[dict[str, Any]]] = [
    [],
    [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}],
]


@dataclass(eq=False)
class Known:
    """A model call that was answered: what was asked and when, and the conversation after it."""

    tools: int
    asked: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    line: Line
    started: int
    ended: int


class Model:
    """All calls of a session, in the order of their answers.

    A client that `drops` reasoning never sends it back: what was sampled keeps it, but it is not
    in an answer that has to be rendered anew.
    """

    def __init__(self, drops: bool) -> None:
        self.calls: list[Known] = []
        self.drops = drops

    def line_of(self, tools: int, messages: list[dict[str, Any]]) -> Line:
        """The prompt of a request: after the longest recorded conversation, or from the start."""
        best = None
        for call in self.calls:
            size = len(call.messages)
            if call.tools == tools and messages[:size] == call.messages:
                best = call if best is None or size >= len(best.messages) else best
        if self.drops:
            sent = [
                {**m, "text": m.get("text", "").rpartition("</think>\n\n")[2]} for m in messages
            ]
            messages = sent
        if best is None:
            return Line().prompt(whole(tools, messages))
        return best.line.prompt("\n" + rendered(messages[len(best.messages) :]))

    def continued(self, known: Known) -> bool:
        size = len(known.messages)
        return any(
            call.tools == known.tools and call.asked[:size] == known.messages for call in self.calls
        )

    def lines(self) -> list[Line]:
        """The samples: of answers that were not asked for again, those that nothing builds on."""
        found = []
        for known in self.calls:
            again = any(
                (call.tools, call.asked) == (known.tools, known.asked)
                and call.started >= known.ended
                for call in self.calls
            )
            if not self.continued(known) and not again:
                found.append(known.line)
        return found


def rendered(messages: list[dict[str, Any]]) -> str:
    """Messages after the first one, in the notation of qwen3."""
    text, results = "", []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results.append(message["content"])
            continue
        text += tool_result(*results) if results else ""
        results = []
        if message is not None:
            text += f"<|im_start|>{message['role']}\n{message['text']}<|im_end|>\n"
    return text


def whole(tools: int, messages: list[dict[str, Any]]) -> str:
    first = messages[0]
    own = first["text"] if first["role"] == "system" else ""
    rest = messages[1:] if own else messages
    head = system_with_tools(own, TOOLS[tools]) if tools else (system(own) if own else "")
    return head + rendered(rest)


class Client:
    """Asks at random; its messages have their text in the notation beside their fields."""

    def __init__(
        self, http: aiohttp.ClientSession, session: str, engine: StepEngine, seed: int
    ) -> None:
        self.http, self.session, self.engine = http, session, engine
        self.random = random.Random(seed)
        self.model = Model(drops=seed % 2 == 1)
        self.events = 0
        self.texts = 0

    def event(self) -> int:
        self.events += 1
        return self.events

    def wire(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as some client or other would spell it."""
        sent = {key: value for key, value in message.items() if key != "text"}
        if isinstance(sent.get("content"), str) and self.random.random() < 0.3:
            sent["content"] = [{"type": "text", "text": sent["content"]}]
        if self.random.random() < 0.3:
            sent = {**sent, "refusal": None, "annotations": [], "function_call": None}
        if self.model.drops:
            sent.pop("reasoning_content", None)
        return sent

    def some_answer(self) -> str:
        self.texts += 1
        number = self.texts
        return self.random.choice(
            [
                f"answer {number} é☃",
                bash_call(f"call {number}", f"echo {number}"),
                bash_call("", f"echo {number} 'ü'"),
                f"<think>\nthought {number}\n</think>\n\nso {number}",
            ]
        )

    async def ask(self, tools: int, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
        """The answer, with the text that the engine sampled, and the moment of it."""
        body = {"messages": [self.wire(m) for m in messages], "tools": TOOLS[tools]}
        url = f"{self.session}/v1/chat/completions"
        async with self.http.post(url, json=body) as response:
            found = await response.json()
        ended = self.event()
        if response.status != 200:
            raise ConnectionError(found["error"]["code"])
        rid = found["id"].removeprefix("chatcmpl-")
        (call,) = [call for call in self.engine.calls if call.rid == rid]
        text = text_of(call.output_ids[:-1])
        return {**found["choices"][0]["message"], "text": text}, ended

    async def record(self, tools: int, asked: list[dict[str, Any]], times: int) -> None:
        """Ask once or several times at once."""
        if times > 1:
            self.engine.reset_script([Slow(self.some_answer(), 0.15) for _ in range(times)])
        line, started = self.model.line_of(tools, asked), self.event()
        answers = await asyncio.gather(*(self.ask(tools, asked) for _ in range(times)))
        for message, ended in answers:
            after = line.answer(message["text"])
            self.model.calls.append(Known(tools, asked, [*asked, message], after, started, ended))

    async def step(self) -> None:
        """One thing that a client does."""
        tools, history = self.some_place()
        kind = self.random.choices(
            ["on", "again", "at once", "drop", "hasty", "fail", "other tools"],
            [8, 3, 2, 1, 2, 1, 1],
        )[0]
        if kind == "again" and self.model.calls:
            known = self.random.choice(self.model.calls)
            tools, asked = known.tools, known.asked
        else:
            asked = [*history, *self.something_new(history)]
        if kind == "other tools":
            tools = 1 - tools
        if kind == "drop":
            self.engine.reset_script([Slow("lost")])
            count = len(self.engine.calls)
            task = asyncio.create_task(self.ask(tools, asked))
            await asyncio.to_thread(until, lambda: len(self.engine.calls) > count)
            task.cancel()
            rid = self.engine.calls[-1].rid
            await asyncio.to_thread(until, lambda: rid in self.engine.aborted)
            return
        if kind == "fail":
            self.engine.reset_script([self.random.choice([503, b"{}", b"no JSON"])])
            with pytest.raises(ConnectionError, match="engine_failed"):
                await self.ask(tools, asked)
            return
        if kind == "hasty":
            task = asyncio.create_task(self.ask(tools, asked))
            await asyncio.sleep(self.random.choice([0.0, 0.001, 0.002, 0.004, 0.008]))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.record(tools, asked, 2 if kind == "at once" else 1)

    def some_place(self) -> tuple[int, list[dict[str, Any]]]:
        """A conversation to go on with, mostly the newest one."""
        if not self.model.calls or self.random.random() < 0.1:
            return self.random.randrange(2), []
        newest = self.random.random() < 0.6
        known = self.model.calls[-1] if newest else self.random.choice(self.model.calls)
        return known.tools, known.messages

    def something_new(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        number = self.random.randrange(6)
        if not history:
            told = {"role": "system", "content": f"s{number % 2}", "text": f"s{number % 2}"}
            begun = {"role": "user", "content": f"task {number % 2}", "text": f"task {number % 2}"}
            return [told, begun] if number > 2 else [begun]
        calls = history[-1].get("tool_calls")
        if calls and number:
            return [
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"saw {number % 3}"}
            ]
        return [{"role": "user", "content": f"next {number % 3}", "text": f"next {number % 3}"}]


@pytest.fixture(scope="module")
def url(steps: StepEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("clients")
    model = make_byte_tokenizer(scratch / "model")
    # Sessions leave memory whenever they pause.
    with session_server(model, steps.url, scratch, "--spill-after", "0.05") as url:
        yield url


@pytest.mark.parametrize("seed", range(6))
async def test_a_random_client(seed: int, url: str, steps: StepEngine) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"max_seq_len": 100_000}
        async with http.post(f"{url}/sessions", json=body, headers=CONTROL) as response:
            session = f"{url}{(await response.json())['path']}"
        client = Client(http, session, steps, seed)
        steps.reset([], lambda prompt: client.some_answer())
        for _ in range(30):
            await client.step()
        async with http.get(f"{session}/samples", headers=CONTROL) as response:
            found = await response.json()
        found["end_reason"] = None  # of a failed call, when it was the last
        check_samples(found, client.model.lines(), steps)
