"""A step that would be wrong is refused by all ranks alike; damage is an error that names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_helpers import fork_ranks
from trainer_helpers import make_rollout, single

from miles_core.modeling.replicas import bit_sum
from miles_core.training.batch import load_rollout
from miles_core.training.errors import CorruptionError

TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP, EP = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}


def run_cases(
    directory: Path, world: int, rollout: Path, cases: dict[str, tuple[Path, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What went wrong and what came of it, for each rank."""
    request = {
        "rollout": str(rollout),
        "cases": {
            name: {"hf": str(hf), "changes": changes} for name, (hf, changes) in cases.items()
        },
    }
    return fork_ranks("guard_process", world, directory / "run", request)


def check(name: str, answers: list[dict[str, Any]]) -> None:
    """All ranks refuse, say the same, and are as they were; the next step is applied."""
    last = answers[-1]
    for answer in answers:
        assert answer["first"] == answer["after"] == 1, name
        for kind in ("gradient", "loss"):
            assert answer[kind]["unchanged"] and answer[kind]["steps"] == 0, (name, kind)
            assert answer[kind]["problems"] == last[kind]["problems"], (name, kind)
        assert any(last["name"] in problem for problem in answer["gradient"]["problems"]), name
        assert answer["loss"]["problems"][0].startswith("loss, from trial g"), name
        assert answer["inf"].startswith("CorruptionError: weights are not finite: 1 "), name
        assert last["name"] in answer["inf"], name


@pytest.mark.parametrize(
    "layouts",
    [
        {"dp": {}, "tp": TP, "pp": PP},
        pytest.param({"cp": CP, "tp_sp": TP | SP}, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_refuse_what_one_rank_sees(
    hf_model: Path, rollout: Path, tmp_path: Path, layouts: dict[str, dict[str, Any]]
) -> None:
    answers = run_cases(tmp_path, 2, rollout, {n: (hf_model, c) for n, c in layouts.items()})
    for name in layouts:
        check(name, [answer[name] for answer in answers])
        if name != "pp":  # there no two ranks hold the same norm
            assert all(a[name]["name"] in a[name]["0.01"] for a in answers), name


@pytest.mark.slow
def test_all_ranks_refuse_with_experts_and_on_four_ranks(
    hf_model: Path, rollout: Path, tmp_path: Path
) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "modeling"))
    from family_models import make_moe

    moe = make_moe(tmp_path / "moe", "qwen3_moe")
    answers = run_cases(tmp_path, 2, rollout, {"ep": (moe, EP)})
    check("ep", [answer["ep"] for answer in answers])
    cases = {"tp_dp": (hf_model, TP), "tp_pp": (hf_model, TP | PP), "pp_cp": (hf_model, PP | CP)}
    answers = run_cases(tmp_path, 4, rollout, cases)
    for name in cases:
        check(name, [answer[name] for answer in answers])


def changed(path: Path, source: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = torch.load(source, weights_only=True)
    change(data)
    torch.save(data, path)
    return path


def sample_of(data: dict[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = data["groups"][1]["trajectories"][2]["samples"][0]
    return sample


def test_every_bit_of_a_weight_counts_wherever_it_lies() -> None:
    values = torch.randn(9)
    for part in (values[:8], values[1:], values[:3], values.bfloat16()[1:6]):
        before = bit_sum(part)
        part[2] = torch.nextafter(part[2], part[2] + 1)
        assert bit_sum(part) != before


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no tokens": (
        lambda d: sample_of(d).pop("tokens"),
        r"groups\[1\].trajectories\[2\].samples\[0\].tokens is missing",
    ),
    "no reward": (
        lambda d: d["groups"][0]["trajectories"][1].pop("reward"),
        r"groups\[0\].trajectories\[1\].reward is missing",
    ),
    "no step": (lambda d: d.pop("step"), "step is missing"),
    "lengths": (
        lambda d: sample_of(d).update(loss_mask=torch.zeros(3)),
        r"sample 0 of g1-m2: the shapes of tokens, mask and logprobs",
    ),
    "mask": (
        lambda d: sample_of(d)["loss_mask"].__setitem__(1, 7),
        r"sample 0 of g1-m2: the mask has other values",
    ),
    "kinds": (
        lambda d: sample_of(d).update(tokens=sample_of(d)["tokens"].float()),
        r"sample 0 of g1-m2: tokens are torch.float32",
    ),
    "reward": (
        lambda d: d["groups"][1]["trajectories"][2].update(reward=float("nan")),
        "the reward of g1-m2 is nan",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_rollout_is_an_error_that_names_the_field(
    rollout: Path, tmp_path: Path, fault: str
) -> None:
    change, message = FAULTS[fault]
    bad = changed(tmp_path / "bad.pt", rollout, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_rollout(bad)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_rollout_file_is_an_error_that_names_it(
    rollout: Path, tmp_path: Path, damage: str
) -> None:
    content = bytearray(rollout.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        for place in range(len(content) // 3, len(content) // 3 + 400):
            content[place] ^= 255
    else:
        content = bytearray(b"" if damage == "empty" else b"not a rollout")
    bad = tmp_path / "bad.pt"
    bad.write_bytes(content)
    with pytest.raises(ValueError, match="bad.pt.* remove the file"):
        load_rollout(bad)


def test_a_token_of_another_vocabulary_is_refused(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    bad = changed(tmp_path / "0.pt", rollout, lambda d: sample_of(d)["tokens"].fill_(96))
    with single(base, base) as worker:
        with pytest.raises(ValueError, match=r"sample 0 of g1-m2 has the token 96.* 0 to 95"):
            worker.train(0, str(bad))
        with pytest.raises(ValueError, match="the token -1"):
            worker.sft([[{"tokens": [1, -1], "loss_mask": [0, 1]}]])


def test_weights_that_an_update_made_infinite_end_the_step(base: Path, rollout: Path) -> None:
    with single(base, base, lr=1e36) as worker, pytest.raises(CorruptionError, match="not finite"):
        worker.train(0, str(rollout))


def test_metrics_of_a_step_are_of_the_updates_that_were_applied(base: Path, tmp_path: Path) -> None:
    rollout = make_rollout(tmp_path / "0.pt", groups=4)
    bad = changed(
        tmp_path / "bad.pt", rollout, lambda d: sample_of(d)["logprobs"].fill_(float("nan"))
    )
    options = {"use_tis": True, "global_batch_size": 4}
    with single(base, base, **options) as worker:
        metrics = worker.train(0, str(bad))
    assert metrics["nonfinite_steps"] == 1 and metrics["optimizer_steps"] == 3
    assert metrics["grad_norm"] > 0 and metrics["loss"] == metrics["loss"]
