"""Answers in harmony, the notation of gpt-oss, well formed and malformed."""

from __future__ import annotations

import json

from parser_corpus import ARGUMENTS, BASH, NESTED, UNKNOWN, Case


def harmony_corpus() -> list[Case]:
    """The cases of gpt-oss."""
    head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    analysis, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    comment, start = "<|channel|>commentary<|message|>", "<|start|>assistant"
    more = "<|end|>" + start
    written = " to=functions.bash<|channel|>commentary json<|message|>"
    untyped = "<|channel|>commentary to=functions.bash<|message|>"
    cases = []
    for name, arguments in {**ARGUMENTS, "nested": NESTED, "none": {}}.items():
        tool = "ersetze_datei" if name == "nested" else "bash"
        text = head.format(tool) + json.dumps(arguments, ensure_ascii=False)
        cases.append(Case(f"arguments: {name}", text, "", ((tool, arguments),)))
    body = json.dumps(BASH)
    call, calls = head.format("bash") + body, (("bash", BASH),)
    shown = head.format("bash")
    commented = f"{analysis}R{more}{comment}C{more}{call}"
    parallel = f"{call}<|call|>{start}{head.format('now')}{{}}"
    two = f"{call}{more}{shown}x"
    cases += [
        Case("final", f"{final}Hello\n", "Hello\n"),
        Case("thinks, answers", f"{analysis}R{more}{final}C", "C", (), "R"),
        Case("thinks, calls", f"{analysis}R{more}{call}", "", calls, "R"),
        Case("thinks, comments, calls", commented, "C", calls, "R"),
        Case("thinks twice", f"{analysis}a{more}{analysis}b{more}{final}C", "C", (), "a\nb"),
        Case("thinks, cut off", f"{analysis}I thi", "", (), "I thi"),
        Case(
            "as the template writes",
            written + body,
            "",
            calls,
        ),
        Case("without type", untyped + body, "", calls),
        Case("without namespace", call.replace("functions.", ""), "", calls),
        Case("call in analysis", call.replace("commentary", "analysis"), "", calls),
        Case("no arguments", head.format("now"), "", (("now", {}),)),
        Case("unknown tool", head.format(UNKNOWN) + "{}", "", ((UNKNOWN, {}),)),
        Case("name with a dot", head.format("fs.read") + "{}", "", (("fs.read", {}),)),
        Case("no tools", call, "", calls, tools=()),
        Case("parallel", parallel, "", (*calls, ("now", {}))),
        Case("cut after a message", f"{analysis}R<|end|>", "", (), "R"),
        Case("plain text", "Hello", "Hello"),
        Case("empty", ""),
        Case(
            "thinks, bad call",
            f"{analysis}R{more}{shown}{{a",
            f"<|start|>assistant{shown}{{a",
            (),
            "R",
        ),
        Case("final, bad call", f"{final}C{more}{shown}[1]", f"C\n{start}{shown}[1]"),
        Case("mark in a body", f"{final}a<|channel|>b", "a\n<|channel|>b"),
        Case("mark in a call", f"{call}<|start|>", f"{call}<|start|>", malformed=True),
        Case("good call, bad call", two, two, malformed=True),
    ]
    texts = {f"cut at {size}": call[:size] for size in range(12, len(call) - 1, 9)}
    texts |= {
        "unknown channel": "<|channel|>thoughts<|message|>x",
        "no channel": "<|message|>x",
        "no message": "<|channel|>final",
        "code": "<|channel|>analysis to=python code<|message|>print(1)",
        "no recipient": call.replace("functions.bash", ""),
        "not a number": head.format("bash") + '{"a": NaN}',
    }
    return [
        *cases,
        *(Case(f"malformed: {n}", text, text, malformed=True) for n, text in texts.items()),
    ]
