"""Models with experts: log-probabilities and experts are transformers', and the trainer's."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import Server, make_model
from test_engine_parity import TOLERANCE, generate, make_engine, prompt, worst

from miles_core.engines.request import Request

LAYERS, EXPERTS, TOP, DENSE = 3, 6, 2, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", seed=3)


class Reference:
    """Transformers' model, and the experts that it sends tokens to."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocab]."""
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def experts(self, ids: list[int]) -> np.ndarray:
        """Sorted experts [tokens, layers, k]; 0 in the dense layer."""
        chosen: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
            for layer in self.model.model.layers
            if hasattr(layer.mlp, "gate")
        ]
        self(ids)
        for hook in hooks:
            hook.remove()
        chosen.insert(DENSE, torch.zeros_like(chosen[0]))
        return torch.stack(chosen, 1).sort(-1).values.numpy()


def told(request: Request) -> np.ndarray:
    rows = np.frombuffer(request.experts, np.int32).reshape(-1, LAYERS, TOP)
    return np.sort(rows, -1)


def check(requests: list[Request], reference: Reference, start: int = 0) -> None:
    for request in requests:
        assert worst(request, reference) <= TOLERANCE
        ids = request.input_ids + request.output_ids
        assert np.array_equal(told(request), reference.experts(ids)[start:-1])


@pytest.mark.parametrize("normalize", [True, False])
def test_batched_ragged_prompts_match(tmp_path: Path, normalize: bool) -> None:
    directory = make_model(tmp_path / "model", "qwen3_moe", 4, norm_topk_prob=normalize)
    requests = generate(
        make_engine(directory), [prompt(n, n) for n in (1, 2, 40, 7, 120)], 8, experts_start=0
    )
    check(requests, Reference(directory))


def test_shared_prefixes_and_chunks_keep_their_experts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.engines.scheduler.STEP_TOKENS", 17)
    engine, reference = make_engine(model), Reference(model)
    (first,) = generate(engine, [prompt(50, 1)])
    assert first.experts == b""
    ids = first.input_ids + first.output_ids + prompt(9, 2)
    (second,) = generate(engine, [ids], experts_start=30)
    assert second.cached > 50
    check([second], reference, 30)
    branch, again = generate(engine, [ids[:30] + prompt(10, 3), ids], experts_start=0)
    assert branch.cached == 30 and again.cached == len(ids) - 1
    check([branch, again], reference)


def test_trainer_and_engine_agree(model: Path, tmp_path: Path) -> None:
    """What the engine sampled, replayed: the trainer's routers choose the same experts."""
    from miles_core.training.config import TrainerConfig
    from miles_core.training.worker import TrainerWorker

    requests = generate(make_engine(model), [prompt(20, n) for n in range(4)], 12, experts_start=0)
    trajectories = []
    for number, request in enumerate(requests):
        ids, sampled = request.input_ids + request.output_ids, len(request.output_ids)
        rows = np.frombuffer(request.experts, np.int32).reshape(len(ids) - 1, -1)
        zeros = torch.zeros(len(request.input_ids))
        sample = {
            "tokens": torch.tensor(ids),
            "loss_mask": torch.cat([zeros, torch.ones(sampled)]).to(torch.uint8),
            "logprobs": torch.cat([zeros, torch.tensor(request.output_logprobs)]),
            "routed_experts": torch.from_numpy(rows.copy()).short(),
            "turns": [],
        }
        trajectories.append(
            {"trial_id": f"t{number}", "reward": float(number), "samples": [sample]}
        )
    group = {"group_id": "g", "instance_id": "i", "trajectories": trajectories}
    torch.save({"step": 0, "weight_version": 1, "groups": [group]}, tmp_path / "0.pt")
    config = replace(TrainerConfig(), global_batch_size=4, kl_loss_coef=0.0)
    worker = TrainerWorker(replace(config, use_rollout_routing_replay=True))
    try:
        worker.init_from_hf(str(model))
        metrics = worker.train(0, str(tmp_path / "0.pt"))
    finally:
        worker.close()
    assert metrics["rollout_routing_differs"] == 0.0
    assert metrics["routing_replayed"] == pytest.approx(31 / 32)
    assert metrics["train_rollout_logprob_abs_diff_max"] <= 1e-4


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("server"), model)
    yield server
    assert server.stop() == 0


def test_over_http_and_after_new_weights(
    server: Server, model: Path, tmp_path: Path, http: httpx.Client
) -> None:
    ids = prompt(12, 5)
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": True,
        "routed_experts_start_len": 3,
    }
    newer = make_model(tmp_path / "newer", "qwen3_moe", 9)
    for directory in (model, newer):
        update = {"model_path": str(directory)}
        http.post(f"{server.url}/update_weights_from_disk", json=update).raise_for_status()
        answer = http.post(f"{server.url}/generate", json=body).raise_for_status().json()
        data = base64.b64decode(answer["meta_info"]["routed_experts"])
        rows = np.sort(np.frombuffer(data, np.int32).reshape(-1, LAYERS, TOP), -1)
        assert np.array_equal(rows, Reference(directory).experts(ids + answer["output_ids"])[3:-1])
    wrong = http.post(f"{server.url}/generate", json=body | {"routed_experts_start_len": 12})
    assert wrong.status_code == 400 and "routed_experts_start_len" in wrong.text


def test_a_dense_model_has_none_to_tell(shared_server: Server, http: httpx.Client) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {}, "return_routed_experts": True}
    answer = http.post(f"{shared_server.url}/generate", json=body)
    assert answer.status_code == 400 and "no experts" in answer.text
