"""Whatever a request holds, the answer is no fault of the server, and a bad one starts nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("hypothesis")
from agent_server_helpers import make_task  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from miles_core.agent_server.protocol import MOST_COUNT, MOST_SECONDS, TrialRequest  # noqa: E402
from miles_core.cluster.own_agent import OwnAgentServer  # noqa: E402

NUMBERS = ("lease_s", "deadline_s", "max_seq_len", "max_turns")
NAMES = ("instance_id", "agent_name", "model", "trial_id", "session_server_id")
NAMES += ("session_server_instance_id",)
ids = map("fuzz-{}".format, itertools.count())


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("requests")
    make_task(root / "tasks", "answer")
    with OwnAgentServer(root / "tasks", max_concurrent=2).serve() as (url, token):
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
            yield client


def put(http: httpx.Client, body: Any) -> tuple[str, httpx.Response]:
    """Ask for a trial with a body: JSON as Python writes it, or a text, half characters and all."""
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else json.dumps(body)
    trial_id = next(ids)
    answer = http.put(f"/trials/{trial_id}", content=content)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"code", "message"} and len(error["message"]) <= 500
        assert http.get(f"/trials/{trial_id}").status_code == 404, body
    return trial_id, answer


def request(**fields: Any) -> dict[str, Any]:
    return {"instance_id": "absent", "agent_name": "nop", **fields}


numbers = st.one_of(
    st.integers(),
    st.integers(min_value=-(10**40), max_value=10**40),
    st.floats(),
    st.sampled_from([0, -1, 1e308, -0.0, 2**31, 2**63, 10**400, float("inf"), float("nan")]),
)
texts = st.one_of(
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs", "Cc"])),
    st.sampled_from(["../..", "a" * 5000, "\ud800", "\0", "1e999", "os:system"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
no_deadline = settings(
    max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@no_deadline
@given(st.sampled_from(sorted(TrialRequest.model_fields)), values)
def test_any_value_of_any_field(http: httpx.Client, field: str, value: Any) -> None:
    trial_id, answer = put(http, request(**{field: value}))
    if answer.status_code == 200:
        http.delete(f"/trials/{trial_id}").raise_for_status()


@no_deadline
@given(values)
def test_any_body(http: httpx.Client, body: Any) -> None:
    put(http, body)


@no_deadline
@given(st.sampled_from(NUMBERS), numbers)
def test_a_number_is_taken_only_within_its_bounds(
    http: httpx.Client, field: str, value: float
) -> None:
    most = MOST_SECONDS if field.endswith("_s") else MOST_COUNT
    good = 0 < value <= most and (field.endswith("_s") or value == int(value))
    _, answer = put(http, request(**{field: value}))
    assert (answer.status_code == 200) == good, (field, value, answer.text)
    if not good:
        assert answer.json()["error"]["code"] == "invalid_request"
        assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000, '"inf"', "{}"])
def test_a_number_that_is_none(http: httpx.Client, field: str, text: str) -> None:
    body = json.dumps(request())[:-1] + f', "{field}": {text}}}'
    _, answer = put(http, body)
    assert answer.status_code in (400, 422), answer.text


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"seed": 2**64},
        {"messages": []},
        {"model": "other"},
        {"stop": ["\ud800"]},
        {"deep": [[[[[[[[[[]]]]]]]]]]},
        {"long": "x" * (65 << 10)},
        {"bias": {"1": float("inf")}},
    ],
)
def test_sampling_parameters_that_cannot_be_sent(
    http: httpx.Client, params: dict[str, Any]
) -> None:
    _, answer = put(http, request(sampling_params=params))
    assert answer.status_code == 422 and "sampling_params" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "url", ["host:1/v1", "http://:5/v1", "http://h:99999", "http://h:x-secret/", "http://h/a b", ""]
)
def test_an_address_that_is_none(http: httpx.Client, url: str) -> None:
    _, answer = put(http, request(agent_name="terminus-2", instance_id="answer", base_url=url))
    assert answer.status_code == 422 and "base_url" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_bounded(http: httpx.Client, name: str) -> None:
    _, answer = put(http, request(**{name: "n" * 1001}))
    assert answer.status_code == 422


def test_every_refusal_has_one_form(http: httpx.Client) -> None:
    deep = "[" * 100_000
    cases = [
        ("GET", "/", b"", 404),
        ("GET", "/openapi.json", b"", 404),
        ("GET", "/trials", b"", 404),
        ("PATCH", "/trials/x", b"{}", 405),
        ("OPTIONS", "/run", b"", 405),
        ("PUT", "/trials/bad", b"{", 400),
        ("PUT", "/trials/bad", b"\xff\xfe", 400),
        ("PUT", "/trials/bad", deep.encode(), 400),
        ("PUT", "/trials/bad", b"", 422),
        ("PUT", "/trials/bad", b"[]", 422),
        ("POST", "/run", b"null", 422),
        ("POST", "/flush", b"{}", 422),
        ("GET", "/trials/bad?wait=-1", b"", 422),
        ("GET", "/trials/bad?wait=nan", b"", 422),
        ("GET", "/trials/bad?wait=1e999", b"", 422),
        ("GET", "/trials/bad", b"", 404),
        ("GET", "/trials/%2e%2e", b"", 422),
        ("DELETE", "/trials/bad", b"", 404),
    ]
    for method, path, content, status in cases:
        answer = http.request(method, path, content=content)
        assert answer.status_code == status, (method, path, answer.text)
        error = answer.json()["error"]
        assert error["code"] and error["message"] and answer.json().keys() == {"error"}


def test_a_body_of_another_kind_is_refused(http: httpx.Client) -> None:
    """A form of a web page can send text, and no JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body = json.dumps(request())
        answer = http.put("/trials/text", content=body, headers={"content-type": kind})
        assert answer.status_code == 422 and "error" in answer.json()
    assert http.get("/trials/text").status_code == 404


def test_a_fault_of_the_server_has_that_form_too(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "answer")
    server = OwnAgentServer(tmp_path / "tasks", max_concurrent=1, trials_dir=tmp_path / "trials")
    with server.serve() as (url, token):
        (tmp_path / "trials" / "broken").mkdir()
        (tmp_path / "trials" / "broken" / "result.json").write_text('{"reward": "of-someone"}')
        headers = {"authorization": f"Bearer {token}"}
        answer = httpx.get(f"{url}/trials/broken", headers=headers, trust_env=False)
        assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["code"] == "internal_error" and "ValidationError" in error["message"]
        assert "of-someone" not in answer.text
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_the_tasks_directory_may_vanish(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    make_task(tasks, "answer")
    with OwnAgentServer(tasks, max_concurrent=1).serve() as (url, token):
        tasks.rename(tmp_path / "elsewhere")
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as http:
            assert http.get("/health").json()["tasks_found"] == 0
            listed = http.get("/tasks")
            assert (listed.status_code, listed.json()["error"]["code"]) == (503, "tasks_dir_gone")
            result = http.post("/run", json=request(instance_id="answer")).json()
            assert result["reward"] is None
            assert result["verdict"]["cause"] == "task_invalid"
            assert "tasks_dir gone" in result["verdict"]["detail"]
            (tmp_path / "elsewhere").rename(tasks)
            assert http.post("/run", json=request(instance_id="answer")).json()["reward"] == 0.0
