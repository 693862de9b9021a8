"""Who may ask: what a web page elsewhere can make a browser send starts and shows nothing."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("harbor")
import agent_server_helpers  # noqa: E402
from agent_dashboard_helpers import free_port  # noqa: E402
from agent_server_helpers import SECRET, Server, make_task  # noqa: E402

from miles_core.agent_server.callers import host_name, is_loopback  # noqa: E402
from miles_core.agent_server.client import AgentServerClient  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402

pytestmark = pytest.mark.agent_env

NOP = {"instance_id": "answer", "agent_name": "nop"}
OURS = ("127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:80", "127.0.0.1:8500", "127.1.2.3:9")
FOREIGN = ("evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "localhost.evil", "[::2]:80")
ROUTES = (("GET", "/health"), ("GET", "/tasks"), ("GET", "/trials/x"), ("PUT", "/trials/x"))
ROUTES += (("POST", "/run"), ("POST", "/flush"), ("DELETE", "/trials/x"), ("GET", "/none"))


@pytest.fixture(scope="module")
def no_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server without a token, and the URL of its dashboard."""
    root = tmp_path_factory.mktemp("callers")
    make_task(root / "tasks", "answer")
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_server_helpers, "SECRET", "")
        made = Server(root, root / "tasks", "--dashboard-port", str(port))
    yield made, f"http://127.0.0.1:{port}"
    made.stop()


HTTP = httpx.Client(timeout=60, trust_env=False)


def ask(method: str, url: str, **headers: str) -> httpx.Response:
    return HTTP.request(method, url, headers=headers, json=NOP)


def test_without_a_token_a_name_that_is_not_this_machines_is_refused(
    no_token: tuple[Server, str],
) -> None:
    server, page = no_token
    for host in FOREIGN:
        answers = [ask(method, server.url + path, host=host) for method, path in ROUTES]
        answers += [ask("GET", page + path, host=host) for path in ("/", "/api/overview")]
        for answer in answers:
            assert answer.status_code == 403, host
            error = answer.json()["error"]
            assert error["code"] == "forbidden_host"
            assert host in error["message"] and "HARBOR_ADMIN_SECRET" in error["message"]
    assert not (server.trials / "x").exists()
    for host in OURS:
        for url in (f"{server.url}/tasks", f"{page}/api/overview", f"{page}/"):
            assert ask("GET", url, host=host).status_code == 200, (host, url)


def test_a_page_of_another_site_changes_nothing(no_token: tuple[Server, str]) -> None:
    server, page = no_token
    own = f"127.0.0.1:{server.port}"
    for origin in ("https://evil.example", "null", page, "http://127.0.0.1", f"x{own}", ""):
        for method, path in (route for route in ROUTES if route[0] != "GET"):
            answer = ask(method, server.url + path, origin=origin)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                *(403, "forbidden_origin"),
            )
    assert not (server.trials / "x").exists()
    assert ask("POST", f"{server.url}/run", origin=f"http://{own}").status_code == 200
    assert ask("GET", f"{server.url}/tasks", origin="https://evil.example").status_code == 200


def test_a_page_of_another_site_is_refused_with_a_token_too(server: Server) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "origin": "https://evil.example"}
    answer = ask("PUT", f"{server.url}/trials/foreign", **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    assert not (server.trials / "foreign").exists()
    named = {"authorization": f"Bearer {SECRET}", "host": "agents.example:80"}
    assert ask("GET", f"{server.url}/tasks", **named).status_code == 200


def test_real_clients_pass(no_token: tuple[Server, str]) -> None:
    server, _ = no_token

    async def run(name: str) -> float | None:
        async with AgentServerClient(f"http://{name}:{server.port}") as client:
            request = TrialRequest.model_validate(NOP)
            return (await client.run(f"by-{name}", request, 60.0)).reward

    for name in ("127.0.0.1", "localhost"):
        assert asyncio.run(run(name)) == 0.0
        if curl := shutil.which("curl"):
            url = f"http://{name}:{server.port}/trials/by-{name}"
            done = subprocess.run([curl, "-sf", "--noproxy", "*", url], capture_output=True)
            assert done.returncode == 0 and b'"ended"' in done.stdout


@pytest.mark.parametrize(
    ("host", "name"),
    [("A:1", "a"), ("[::1]:2", "::1"), ("[::1]", "::1"), ("a", "a"), ("", ""), (":80", ":80")],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


def test_only_loopback_is_loopback() -> None:
    assert all(is_loopback(name) for name in ("localhost", "::1", "127.0.0.1", "127.9.9.9"))
    assert not any(is_loopback(name) for name in ("", "0.0.0.0", "::", "10.0.0.1", "127.0.0.1.a"))
