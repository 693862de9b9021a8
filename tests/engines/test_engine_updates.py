"""Updates in parts: what is refused changes nothing, and who speaks plain SGLang is served."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from miles_core.weights.digest import state_digest, tensor_digest
from miles_core.weights.shared import PayloadError, SharedBuffer, payload, read_payload

PROMPT = list(range(20, 40))
GREEDY = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    return start_server("--load-format", "dummy")


class Pusher:
    """A client that puts tensors into its own shared memory."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self.http, self.url = http, url
        self.buffers: list[SharedBuffer] = []

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/{route}", json=body)

    def send(self, tensors: Tensors, **body: Any) -> httpx.Response:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        self.buffers.append(SharedBuffer(size))
        views, start = [], 0
        for name, tensor in tensors.items():
            place = self.buffers[-1].bytes[start : start + tensor.numel() * tensor.element_size()]
            view = place.view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            views.append((name, view))
            start += len(place)
        body["serialized_named_tensors"] = [payload(views)]
        return self.post("update_weights_from_tensor", **body)

    def end(self, tensors: Tensors, **changes: Any) -> httpx.Response:
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        body = {"digest": state_digest(digests), "tensors": len(tensors), "bytes": size}
        return self.post("end_weight_update", **{**body, **changes})

    def push(self, tensors: Tensors, version: int) -> None:
        assert self.post("begin_weight_update", weight_version=str(version)).status_code == 200
        assert self.send(tensors).status_code == 200
        assert self.end(tensors).status_code == 200

    def generate(self) -> tuple[list[int], str]:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY}
        answer = self.post("generate", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["output_ids"], answer.json()["meta_info"]["weight_version"]


@pytest.fixture
def pusher(http: httpx.Client, server: Any) -> Iterator[Pusher]:
    pusher = Pusher(http, server.url)
    yield pusher
    for buffer in pusher.buffers:
        buffer.close()


@pytest.fixture(scope="module")
def old(models: dict[str, Path]) -> Tensors:
    return load_file(models["qwen3"] / "model.safetensors")


@pytest.fixture(scope="module")
def new(models: dict[str, Path]) -> Tensors:
    return load_file(models["newer"] / "model.safetensors")


def test_an_engine_without_weights_refuses_until_it_has_some(
    pusher: Pusher, start_server: Callable[..., Any], shared_server: Any, old: Tensors
) -> None:
    refused = pusher.post("generate", input_ids=PROMPT, sampling_params=GREEDY)
    assert refused.status_code == 503 and "no weights yet" in refused.text
    assert pusher.http.get(f"{pusher.url}/weights_digest").status_code == 400
    pusher.push(old, 4)
    loaded = Pusher(pusher.http, shared_server.url)
    assert pusher.generate() == (loaded.generate()[0], "4")
    served = pusher.http.get(f"{pusher.url}/weights_digest").json()
    digest = state_digest({name: tensor_digest(tensor) for name, tensor in old.items()})
    assert served == {"weight_version": "4", "digest": digest, "tensors": len(old)}
    # The same of weights that were loaded from a file, of which nothing was announced.
    assert pusher.http.get(f"{loaded.url}/weights_digest").json()["digest"] == digest


def broken(new: Tensors, fault: str) -> Tensors:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = dict(new)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["model.layers.7.mlp.down_proj.weight"] = tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name].t().contiguous()
    elif fault == "nan":
        tensors[name] = tensors[name].clone()
        tensors[name][3, 3] = float("nan")
    return tensors


@pytest.mark.parametrize(
    "fault", ["missing", "unknown", "shape", "nan", "twice", "digest", "bytes"]
)
def test_an_update_that_is_not_whole_changes_nothing(
    pusher: Pusher, old: Tensors, new: Tensors, fault: str
) -> None:
    pusher.push(old, 5)
    before = pusher.generate()
    assert pusher.post("begin_weight_update", weight_version="6").status_code == 200
    tensors = broken(new, fault)
    answer = pusher.send(tensors)
    if fault == "twice":
        answer = pusher.send({"model.norm.weight": new["model.norm.weight"]})
    refused_early = fault in ("unknown", "shape", "nan", "twice")
    assert answer.status_code == (400 if refused_early else 200), answer.text
    if refused_early:  # nor does what follows make it good
        assert pusher.send(new).status_code == 400
    changes = {fault: 5} if fault in ("digest", "bytes") else {}
    ended = pusher.end(tensors, **changes)
    assert ended.status_code == 400 and ended.json()["success"] is False
    assert pusher.generate() == before
    pusher.push(new, 6)
    assert pusher.generate()[0] != before[0]


def test_a_part_needs_the_base_that_it_was_made_for(
    pusher: Pusher, old: Tensors, new: Tensors
) -> None:
    pusher.push(old, 7)
    part = {n: t for n, t in new.items() if "layers.1" in n and ("q_proj" in n or "norm" in n)}
    base = state_digest({name: tensor_digest(tensor) for name, tensor in old.items()})
    other = state_digest({name: tensor_digest(tensor) for name, tensor in new.items()})
    refused = pusher.post("begin_weight_update", weight_version="8", base=other)
    assert refused.status_code == 400 and "not the base" in refused.text
    assert pusher.post("begin_weight_update", weight_version="8", base=base).status_code == 200
    assert pusher.send(part).status_code == 200
    assert pusher.end(part).status_code == 200
    served = pusher.http.get(f"{pusher.url}/weights_digest").json()["digest"]
    both = {name: tensor_digest(tensor) for name, tensor in {**old, **part}.items()}
    assert served == state_digest(both)
    part_alone, _ = pusher.generate()
    pusher.push({**old, **part}, 9)
    assert pusher.generate() == (part_alone, "9")


def test_a_pusher_of_plain_sglang_is_served(pusher: Pusher, old: Tensors, new: Tensors) -> None:
    pusher.push(old, 10)
    assert pusher.send(new).status_code == 400  # outside of a window
    names = sorted(new)
    assert pusher.post("begin_weight_update", selector="all").status_code == 200
    for part in (names[::2], names[1::2]):
        tensors = {name: new[name] for name in part}
        assert pusher.send(tensors, weight_version="11", flush_cache=False).status_code == 200
    assert pusher.post("end_weight_update").status_code == 200
    output, version = pusher.generate()
    pusher.push(new, 12)
    assert pusher.generate()[0] == output and version == "11"
    # One that leaves halfway, and the next one, which closes what it left.
    assert pusher.post("begin_weight_update").status_code == 200
    assert pusher.send({name: old[name] for name in names[::2]}).status_code == 200
    closed = pusher.post("end_weight_update")
    assert closed.status_code == 400 and "is missing" in closed.text
    assert pusher.generate() == (output, "12")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/evil",)


@pytest.mark.parametrize("content", [Evil(), [("a", Evil())], {"a": 1}, [("a", 3)], [1], print])
def test_a_payload_that_is_no_tensor_is_not_run(pusher: Pusher, content: Any) -> None:
    text = base64.b64encode(pickle.dumps(content)).decode()
    with pytest.raises(PayloadError):
        read_payload(text)
    assert pusher.post("begin_weight_update").status_code == 200
    sent = pusher.post("update_weights_from_tensor", serialized_named_tensors=[text])
    assert sent.status_code == 400
    assert pusher.post("end_weight_update").status_code == 400


def test_a_group_that_nobody_hosts_is_refused(pusher: Pusher) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    refused = pusher.post("init_weights_update_group", **body, backend="nccl")
    assert refused.status_code == 400 and "gloo" in refused.text
    refused = pusher.post("init_weights_update_group", **body, backend="gloo", timeout_s=0.2)
    assert refused.status_code == 400 and "was not built" in refused.text
    assert pusher.post("destroy_weights_update_group").status_code == 400
