"""How often a model does what it is asked: plain sampling of both turns, without a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miles_core.modelinit.demos import SUBMIT, Prompts, called_command
from miles_core.sessions.families import ChatFamily

if TYPE_CHECKING:
    import torch

MAX_ANSWER_TOKENS = 48


def sample(
    model: Any, prompts: Sequence[Sequence[int]], stop_id: int, generator: torch.Generator
) -> list[list[int]]:
    """One answer at temperature 1 for each prompt, at most 48 ids, `stop_id` included.

    `model` is a transformers causal language model on the CPU.
    """
    import torch

    rows, longest = len(prompts), max(map(len, prompts))
    ids = torch.full((rows, longest), stop_id)
    mask = torch.zeros((rows, longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    answers: list[list[int]] = [[] for _ in prompts]
    going = set(range(rows))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past = None
    with torch.no_grad():
        for _ in range(MAX_ANSWER_TOKENS):
            out = model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            past = out.past_key_values
            chances = torch.softmax(out.logits[:, -1].float(), -1)
            ids = torch.multinomial(chances, 1, generator=generator)
            for row in sorted(going):
                answers[row].append(int(ids[row, 0]))
                if answers[row][-1] == stop_id:
                    going.remove(row)
            if not going:
                break
            mask = torch.cat([mask, torch.ones((rows, 1), dtype=torch.long)], 1)
            positions = mask.sum(1, keepdim=True) - 1
    return answers


def success_rate(
    model: Any,
    family: ChatFamily,
    prompts: Prompts,
    goals: Sequence[tuple[str, str]],
    generator: torch.Generator,
) -> float:
    """The share of goals whose command is sampled exactly and then submitted.

    `goals` are instructions with their commands; a command counts as one that prints nothing.
    """
    openings = [prompts.opening(instruction) for instruction, _ in goals]
    stop = family.end_of_turn_id
    first = sample(model, [family.render_prompt(o) for o in openings], stop, generator)
    second = []
    for opening, ids, (_, command) in zip(openings, first, goals, strict=True):
        answer = family.parse_output(ids)
        if ids[-1] == stop and called_command(answer) == command:
            start = [*family.render_prompt(opening), *ids]
            seen = prompts.observed(0, "")
            second.append(start + family.continue_turn([*opening, answer], ids, [seen]))
    if not second:
        return 0.0
    ends = sample(model, second, stop, generator)
    done = [called_command(family.parse_output(ids)) == SUBMIT for ids in ends]
    return sum(done) / len(goals)
