"""SGLang's routes, against the embedded engine or the server in ENGINE_URL_TO_TEST."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("ENGINE_URL_TO_TEST")
    return given.rstrip("/") if given else request.getfixturevalue("shared_server").url


def generate(http: httpx.Client, url: str, sampling: dict[str, Any], **fields: Any) -> Any:
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling} | fields
    response = http.post(f"{url}/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("route", ["/health", "/ready", "/model_info", "/get_model_info"])
def test_information_routes(http: httpx.Client, url: str, route: str) -> None:
    response = http.get(url + route)
    assert response.status_code == 200
    if "info" in route:
        assert isinstance(response.json()["weight_version"], str)


def test_models_and_server_info(http: httpx.Client, url: str) -> None:
    assert http.get(f"{url}/v1/models").json()["data"][0]["object"] == "model"
    assert http.get(f"{url}/server_info").status_code == 200


def test_answer_has_the_shape(http: httpx.Client, url: str) -> None:
    answer = generate(http, url, {"max_new_tokens": 5, "ignore_eos": True}, rid="shape-1")
    meta = answer["meta_info"]
    assert meta["id"] == "shape-1"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 5)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 5}]
    assert meta["input_token_logprobs"] == []


def test_input_logprobs(http: httpx.Client, url: str) -> None:
    answer = generate(http, url, {"max_new_tokens": 1}, logprob_start_len=0)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT
    assert entries[0][0] is None and all(entry[0] < 0 for entry in entries[1:])


def test_greedy_repeats_and_seed_repeats(http: httpx.Client, url: str) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "sampling_seed": 5}):
        sampling = {**sampling, "max_new_tokens": 8, "ignore_eos": True}
        first = generate(http, url, sampling)
        batch = generate(http, url, sampling, input_ids=[PROMPT, PROMPT[:3]])
        assert batch[0]["output_ids"] == first["output_ids"]


def test_top_k_one_is_greedy(http: httpx.Client, url: str) -> None:
    common = {"max_new_tokens": 6, "ignore_eos": True}
    greedy = generate(http, url, {**common, "temperature": 0})["output_ids"]
    for restriction in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert generate(http, url, {**common, **restriction})["output_ids"] == greedy


def test_logprob_is_of_the_tempered_distribution(http: httpx.Client, url: str) -> None:
    common = {"max_new_tokens": 1, "ignore_eos": True, "top_k": 1}
    cold = generate(http, url, {**common, "temperature": 0.5})["meta_info"]
    plain = generate(http, url, {**common, "temperature": 1.0})["meta_info"]
    # The likeliest token gains weight when the distribution is sharpened.
    assert cold["output_token_logprobs"][0][1] == plain["output_token_logprobs"][0][1]
    assert cold["output_token_logprobs"][0][0] > plain["output_token_logprobs"][0][0]


def test_stop_token(http: httpx.Client, url: str) -> None:
    common = {"temperature": 0, "ignore_eos": True}
    ids = generate(http, url, {**common, "max_new_tokens": 8})["output_ids"]
    stop = ids[3]
    answer = generate(http, url, {**common, "max_new_tokens": 8, "stop_token_ids": [stop]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == ids[: ids.index(stop) + 1]


def test_stop_string(http: httpx.Client, url: str) -> None:
    common = {"sampling_seed": 11, "ignore_eos": True, "max_new_tokens": 60}
    whole = generate(http, url, common)
    text = whole["text"]
    start = next(i for i in range(2, len(text) - 2) if text[i : i + 2].isascii())
    stop = text[start : start + 2]
    answer = generate(http, url, {**common, "stop": [stop]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    assert whole["output_ids"][: len(answer["output_ids"])] == answer["output_ids"]
    kept = generate(http, url, {**common, "stop": [stop], "no_stop_trim": True})
    assert kept["text"].endswith(stop)


@pytest.mark.parametrize(
    ("interval", "seen"), [(None, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4, 5])]
)
def test_stream(http: httpx.Client, url: str, interval: int | None, seen: list[int]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    sampling |= {} if interval is None else {"stream_interval": interval}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    with http.stream("POST", f"{url}/generate", json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert last["output_ids"] == generate(http, url, sampling)["output_ids"]
    assert [len(json.loads(line)["output_ids"]) for line in lines[:-1]] == seen


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling_params": {"temprature": 1}}, "temprature"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stream_interval": 0}}, "stream_interval"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"input_ids": [1] * 100_000}, "context"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"inputs": [1]}, "inputs"),
        ({"text": "both"}, "text"),
    ],
)
def test_bad_requests_name_what_is_wrong(
    http: httpx.Client, url: str, change: dict[str, Any], named: str
) -> None:
    response = http.post(f"{url}/generate", json={"input_ids": PROMPT} | change)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_unknown_route_and_method(http: httpx.Client, url: str) -> None:
    assert http.get(f"{url}/nothing").status_code == 404
    assert http.get(f"{url}/generate").status_code == 405


def test_update_from_a_missing_directory_fails_and_changes_nothing(
    http: httpx.Client, url: str
) -> None:
    before = http.get(f"{url}/model_info").json()["weight_version"]
    body = {"model_path": "/nonexistent/model", "weight_version": "77"}
    response = http.post(f"{url}/update_weights_from_disk", json=body)
    assert response.status_code == 400 and response.json()["success"] is False
    assert http.get(f"{url}/model_info").json()["weight_version"] == before
