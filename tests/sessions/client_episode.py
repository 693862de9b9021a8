"""An episode of 20 turns with everything that goes wrong with a real client's connection."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from client_engine import Slow, StepEngine
from client_truth import Line, bash_call, system_with_tools, tool_result, user
from session_helpers import until

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "naïve ☃"}},
            "required": ["command"],
        },
    },
}
SYSTEM = "You are at a terminal."
TASK = "Count to twenty."


class Client(Protocol):
    """What the episode needs of a client library; messages are OpenAI's dictionaries."""

    def ask(self, messages: list[Any], tools: list[Any], **more: Any) -> dict[str, Any]:
        """One answer; the library itself tries again where it does."""
        ...

    def ask_impatiently(self, messages: list[Any], tools: list[Any], retry: bool) -> Any:
        """Wait for less than a second; then ask again or, without `retry`, raise."""
        ...

    def stream(self, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        """A streamed answer, put together by the library."""
        ...

    def drop_stream(self, messages: list[Any], tools: list[Any]) -> None:
        """Read the beginning of a streamed answer and close the connection."""
        ...

    TimedOut: tuple[type[Exception], ...]


def step(number: Any) -> str:
    return bash_call(f"step {number}", f"echo {number}")


@dataclass
class Talk:
    """The client's history and the truth of it, side by side."""

    client: Client
    messages: list[Any]
    line: Line

    @classmethod
    def begin(cls, client: Client) -> Talk:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
        return cls(client, messages, Line().prompt(system_with_tools(SYSTEM, [BASH]) + user(TASK)))

    def answered(self, message: dict[str, Any], text: str) -> None:
        self.messages.append(message)
        self.line = self.line.answer(text)

    def observe(self, output: str) -> None:
        call = self.messages[-1]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": output}
        self.messages.append(result)
        self.line = self.line.prompt("\n" + tool_result(output))

    def copy(self) -> Talk:
        return Talk(self.client, list(self.messages), self.line)

    def turn(self, number: Any, ask: Callable[..., Any] | None = None, text: str = "") -> None:
        """One answer and what its call printed."""
        message = (ask or self.client.ask)(self.messages, [BASH])
        assert message["tool_calls"][0]["function"]["name"] == "bash"
        arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"command": f"echo {number}"}
        self.answered(message, text or step(number))
        self.observe(f"{number}\n")


def run_episode(client: Client, engine: StepEngine) -> list[Line]:
    """Twenty turns and a branch of two; the samples that they have to give."""
    thought = "<think>\nhm\n</think>\n\n" + step(11)
    engine.reset([step(1), step(2), 503, step(3), step(4)])
    talk = Talk.begin(client)
    for number in range(1, 5):
        talk.turn(number)

    engine.reset_script([Slow("lost"), step(5)])
    talk.turn(5, lambda *asked: client.ask_impatiently(*asked, retry=True))
    engine.reset_script([step(6)])
    talk.turn(6)
    respelled = {"command": "echo 6"}
    call = talk.messages[-2]["tool_calls"][0]
    call["function"]["arguments"] = json.dumps(respelled, indent=1)

    engine.reset_script([step("unused"), step(7)])
    client.ask(talk.messages, [BASH])  # its answer is not used
    talk.turn(7)

    engine.reset_script([Slow("lost"), step(8)])
    try:
        client.ask_impatiently(talk.messages, [BASH], retry=False)
        raise AssertionError("the answer came in spite of all")
    except client.TimedOut:
        dropped = engine.calls[-1].rid
        talk.turn(8)
    until(lambda: dropped in engine.aborted)

    engine.reset_script([step(9), Slow(step("long") + "x" * 400, 30.0), step(10), thought])
    talk.turn(9, client.stream)
    client.drop_stream(talk.messages, [BASH])
    until(lambda: engine.calls[-1].rid in engine.aborted)
    talk.turn(10, client.stream)
    talk.turn(11, text=thought)
    talk.messages[-2].pop("reasoning_content", None)

    engine.reset_script([step(number) for number in (12, 13)])
    talk.turn(12)
    branch = talk.copy()
    talk.turn(13)
    branch.messages[-1] = {**branch.messages[-1], "content": "edited"}
    kind, last = branch.line.parts[-1]
    branch.line.parts[-1] = (kind, last.replace("12\n", "edited"))
    engine.reset_script([step("13b"), "enough"])
    branch.turn("13b")
    branch.answered(client.ask(branch.messages, [BASH]), "enough")

    engine.reset_script([*(step(number) for number in range(14, 20)), "done"])
    for number in range(14, 20):
        talk.turn(number)
    last_message = client.ask(talk.messages, [BASH])
    assert last_message["content"] == "done" and not last_message.get("tool_calls")
    talk.answered(last_message, "done")
    return [talk.line, branch.line]
