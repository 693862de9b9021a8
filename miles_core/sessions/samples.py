"""From the recorded turns of a session to the samples that are trained on."""

from __future__ import annotations

from miles_core.sessions.protocol import Sample, SessionSamples, TurnSpan
from miles_core.sessions.session import Session, Turn


def cut_samples(session: Session) -> SessionSamples:
    """One sample for each branch, each turn trained in the first sample that has it.

    Raises ValueError when a sample would not be exact (the model checks lengths and mask).
    """
    trained: set[Turn] = set()
    samples = [_sample(leaf, trained) for leaf in session.leaves()]
    kept = session.kept_turns()
    if trained != set(kept):
        raise ValueError(f"{len(trained)} of {len(kept)} recorded turns are in the samples")
    return SessionSamples(
        session_id=session.session_id,
        model_calls=len(kept),
        end_reason=session.end_reason,
        samples=samples,
    )


def _sample(leaf: Turn, trained: set[Turn]) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[TurnSpan] = []
    for turn in leaf.path():
        tokens += turn.prompt_ids
        mask += [0] * len(turn.prompt_ids)
        logprobs += [0.0] * len(turn.prompt_ids)
        start, new = len(tokens), turn not in trained
        tokens += turn.output_ids
        mask += [int(new)] * len(turn.output_ids)
        logprobs += turn.logprobs if new else [0.0] * len(turn.output_ids)
        if new:
            trained.add(turn)
            spans.append(
                TurnSpan(
                    rid=turn.rid,
                    start=start,
                    end=len(tokens),
                    weight_version=turn.weight_version,
                    finish_reason=turn.finish_reason,
                )
            )
    return Sample(tokens=tokens, loss_mask=mask, logprobs=logprobs, turns=spans)
