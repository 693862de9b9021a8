"""The routes of the dashboard: the page and its data. All of them are GET; none changes anything.

The page itself holds no data and is open. Its data need the bearer token of the server when there
is one; without one, `callers.py` says who is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathPart
from pydantic import BaseModel, ConfigDict, Field

from miles_core.agent_server.answers import Refused, set_errors
from miles_core.agent_server.callers import OwnCallers, bearer
from miles_core.agent_server.dashboard.clean import Cleaner
from miles_core.agent_server.dashboard.detail import TrialFiles, detail
from miles_core.agent_server.dashboard.index import MOST_TRIALS
from miles_core.agent_server.dashboard.view import DashboardView
from miles_core.agent_server.protocol import Phase, TrialState, valid_id
from miles_core.verdicts import Cause, VerdictKind

PAGE = ("index.html", "dashboard.css", "dashboard.js", "overview.js", "panel.js", "dom.js")
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class ListQuery(BaseModel):
    """Which trials of the list; `task` is a part of a task's or a trial's name."""

    model_config = ConfigDict(extra="forbid")

    state: TrialState | None = None
    phase: Phase | None = None
    kind: VerdictKind | None = None
    cause: Cause | None = None
    task: str = Field("", max_length=200)
    offset: int = Field(0, ge=0, le=MOST_TRIALS)
    limit: int = Field(50, ge=1, le=200)


class TasksQuery(BaseModel):
    """Which tasks; `task` is a part of the name."""

    model_config = ConfigDict(extra="forbid")

    task: str = Field("", max_length=200)
    offset: int = Field(0, ge=0, le=MOST_TRIALS)
    limit: int = Field(50, ge=1, le=200)


def make_dashboard_app(
    view: DashboardView, trials_dir: Path, token: str | None, bound: str
) -> FastAPI:
    """The application of the dashboard port, served on the address `bound`."""
    app = FastAPI(title="Miles Flow dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnCallers, token=token, bound=bound)
    secured = [Depends(bearer(token))]

    @app.get("/api/overview", dependencies=secured)
    async def get_overview(request: Request) -> Response:
        return _answer(request, view.overview())

    @app.get("/api/trials", dependencies=secured)
    async def get_trials(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
        return _answer(request, view.trials(**dict(query)))

    @app.get("/api/tasks", dependencies=secured)
    async def get_tasks(request: Request, query: Annotated[TasksQuery, Query()]) -> Response:
        return _answer(request, view.tasks(**dict(query)))

    @app.get("/api/trials/{trial_id}", dependencies=secured)
    async def get_trial(request: Request, trial_id: Annotated[str, PathPart()]) -> Response:
        if not valid_id(trial_id):
            raise Refused(422, "invalid_trial_id", "this cannot name a trial")
        row = view.row(trial_id)
        if row is None:
            raise Refused(404, "unknown_trial", "no such trial here")
        shown, secrets = view.request(trial_id)
        live = view.live(trial_id)

        def read() -> tuple[str, bytes | None]:
            files = TrialFiles(trials_dir, trial_id)
            said = live and (live.runs, live.count)
            tag = _tag(repr((row, said, files.stamps())).encode())
            if _known(request, tag):
                return tag, None
            found = detail(files, row, shown, live, Cleaner([token, *secrets]))
            return tag, orjson.dumps(found)

        return _tagged(*await asyncio.to_thread(read))

    _serve_page(app)
    set_errors(app)

    @app.middleware("http")
    async def headers(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS)
        response.headers["x-server-time"] = f"{time.time():.3f}"
        response.headers.setdefault("cache-control", "no-store")
        return response

    return app


def _serve_page(app: FastAPI) -> None:
    """A route for each file of the page; they are read once, and no path comes from a request."""
    folder = resources.files("miles_core.agent_server.dashboard").joinpath("page")
    for name in PAGE:
        data = folder.joinpath(name).read_bytes()
        kind = f"{KINDS[name.rpartition('.')[2]]}; charset=utf-8"

        def get(request: Request, data: bytes = data, kind: str = kind) -> Response:
            tag = _tag(data)
            headers = {"etag": tag, "cache-control": "no-cache"}
            if _known(request, tag):
                return Response(status_code=304, headers=headers)
            return Response(data, media_type=kind, headers=headers)

        app.add_route("/" if name == "index.html" else f"/{name}", get, methods=["GET"])


def _answer(request: Request, value: Any) -> Response:
    """A JSON answer, or 304 when the caller has it already."""
    body = orjson.dumps(value)
    tag = _tag(body)
    return _tagged(tag, None if _known(request, tag) else body)


def _tagged(tag: str, body: bytes | None) -> Response:
    if body is None:
        return Response(status_code=304, headers={"etag": tag})
    return Response(body, media_type="application/json", headers={"etag": tag})


def _tag(data: bytes) -> str:
    return f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'


def _known(request: Request, tag: str) -> bool:
    given = request.headers.get("if-none-match", "")
    return tag in [one.strip().removeprefix("W/") for one in given.split(",")]
