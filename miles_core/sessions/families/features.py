"""What a conversation holds that checkpoints' own templates treat differently from one another.

A notation names in `exceptions` the features in which it departs from the templates of its
checkpoints, and why. Anything else has to be rendered as those templates do.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.sessions.messages import Message
from miles_core.sessions.parsers.reasoning import take_reasoning

FEATURES = {
    "old_reasoning": "an answer with reasoning stands before a later user message",
    "old_answer": "an answer stands before a later user message",
    "reasoning": "an answer has reasoning",
    "no_reasoning": "an answer has no reasoning",
    "several_calls": "an answer has several calls",
    "content_beside_call": "an answer has both content and a call",
    "reasoning_beside_call": "an answer has both reasoning and a call",
    "all_in_one": "an answer has content, reasoning and a call",
    "call": "an answer has a call",
    "no_call": "an answer has no call",
    "empty_answer": "an answer has neither content nor a call",
    "empty_content": "a message that is no answer is empty",
    "tool_result": "there is a tool result",
    "tool_result_last": "the conversation ends with a tool result",
    "no_system": "the conversation does not begin with a system message",
    "late_system": "a system message is not the first message",
    "several_users": "two user messages follow one another",
    "user_after_call": "a user message follows an answer with calls",
    "tools_without_question": "there are tools, and the first message but a system's is no user's",
    "late_tool_result": "a tool result follows neither an answer with calls nor another result",
    "edge_space": "a text begins or ends with white space",
    "tools_ignored": "tools, calls or results where the template knows no tools",
}


def features(messages: Sequence[Message], tools_ignored: bool, has_tools: bool) -> set[str]:
    """The features of a conversation; `tools_ignored`: its template renders no tools."""
    found: set[str] = set()
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    called = False
    for index, message in enumerate(map(take_reasoning, messages)):
        texts = (message.content, message.reasoning_content)
        if any(text != text.strip() for text in texts):
            found.add("edge_space")
        if message.role == "assistant":
            found |= _of_answer(message)
            if index < last_user:
                found |= (
                    {"old_answer", "old_reasoning"} if message.reasoning_content else {"old_answer"}
                )
            called = bool(message.tool_calls)
            continue
        if not message.content:
            found.add("empty_content")
        if message.role == "system" and index:
            found.add("late_system")
        if message.role == "tool":
            found.add("tool_result")
            if not called:
                found.add("late_tool_result")
        else:
            called = False
        if message.role == "user" and index:
            before = messages[index - 1]
            found |= {"several_users"} if before.role == "user" else set()
            found |= {"user_after_call"} if before.tool_calls else set()
    if not messages or messages[0].role != "system":
        found.add("no_system")
    first = 1 if "no_system" not in found else 0
    if has_tools and [m.role for m in messages[first : first + 1]] != ["user"]:
        found.add("tools_without_question")
    if messages and messages[-1].role == "tool":
        found.add("tool_result_last")
    if tools_ignored and (has_tools or found & {"call", "tool_result"}):
        found.add("tools_ignored")
    return found


def _of_answer(message: Message) -> set[str]:
    calls, content, reasoning = message.tool_calls, message.content, message.reasoning_content
    has = {
        "reasoning": bool(reasoning),
        "no_reasoning": not reasoning,
        "call": bool(calls),
        "no_call": not calls,
        "several_calls": len(calls) > 1,
        "content_beside_call": bool(calls and content),
        "reasoning_beside_call": bool(calls and reasoning),
        "all_in_one": bool(calls and content and reasoning),
        "empty_answer": not calls and not content,
    }
    return {name for name, here in has.items() if here}
