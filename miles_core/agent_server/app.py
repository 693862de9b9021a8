"""The HTTP routes of the agent server."""

from __future__ import annotations

import asyncio
import hmac
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from miles_core.agent_server.agents import JOBS
from miles_core.agent_server.body_limit import BodyLimit
from miles_core.agent_server.dashboard.app import make_dashboard_app
from miles_core.agent_server.dashboard.index import TrialIndex
from miles_core.agent_server.dashboard.view import DashboardView
from miles_core.agent_server.protocol import (
    Health,
    TrialRequest,
    TrialResult,
    TrialState,
    TrialStatus,
    valid_id,
)
from miles_core.agent_server.queueing import QueueFull
from miles_core.agent_server.settings import ServerSettings
from miles_core.agent_server.tasks import TaskSet
from miles_core.agent_server.trials import TrialManager, UnknownTrial

LONGEST_WAIT_S = 120.0
BODY_LIMIT = 4 << 20
"""Bytes of a request; a row's metadata travels with it."""
DISCONNECT_CHECK_S = 1.0


class FlushRequest(BaseModel):
    """Which trainer's trials to end."""

    session_server_instance_id: str


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


def _checked_id(trial_id: str) -> str:
    if not valid_id(trial_id):
        raise Refused(422, "invalid_trial_id", f"{trial_id[:80]!r} cannot name a trial")
    return trial_id


TrialId = Annotated[str, Depends(_checked_id)]


def make_app(
    settings: ServerSettings,
    manager: TrialManager,
    health: dict[str, Any],
    token: str | None,
) -> FastAPI:
    """The application; `health` holds the parts of its answer that do not change."""
    app = FastAPI(title="Miles Flow agent server", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    tasks = TaskSet(settings.tasks_dir)
    _add_health(app, manager, tasks, health)
    secured = APIRouter(dependencies=[Depends(_bearer(token))])
    _add_trials(secured, manager)
    _add_run(secured, manager)

    @secured.get("/tasks")
    async def get_tasks() -> dict[str, list[str]]:
        return {"tasks": tasks.ids()}

    @secured.post("/flush")
    async def post_flush(body: FlushRequest) -> dict[str, list[str]]:
        return {"ended": await manager.flush(body.session_server_instance_id)}

    app.include_router(secured)
    _add_errors(app)
    return app


def _bearer(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """A check of a request's bearer token; without a token every request passes."""

    async def authorised(request: Request) -> None:
        if token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refused(401, "unauthorized", "this route needs the server's bearer token")

    return authorised


def _add_health(
    app: FastAPI, manager: TrialManager, tasks: TaskSet, health: dict[str, Any]
) -> None:
    instance_id = str(uuid.uuid4())

    @app.get("/health")
    async def get_health() -> Health:
        running, queued = manager.counts()
        return Health(
            status="stopping" if manager.stopping.is_set() else "ready",
            instance_id=instance_id,
            running=running,
            queued=queued,
            tasks_found=len(tasks.ids()),
            **health,
        )


def _accepting(manager: TrialManager) -> None:
    if manager.stopping.is_set():
        raise Refused(503, "stopping", "the agent server is being stopped")


def _add_trials(router: APIRouter, manager: TrialManager) -> None:
    """The durable routes: start, long-poll, cancel."""

    @router.put("/trials/{trial_id}")
    async def put_trial(trial_id: TrialId, body: TrialRequest) -> TrialStatus:
        _accepting(manager)
        return manager.start(trial_id, body)

    @router.get("/trials/{trial_id}")
    async def get_trial(
        trial_id: TrialId, wait: Annotated[float, Query(ge=0)] = 0.0
    ) -> TrialStatus:
        return await manager.wait(trial_id, min(wait, LONGEST_WAIT_S))

    @router.delete("/trials/{trial_id}")
    async def delete_trial(trial_id: TrialId) -> TrialStatus:
        return await manager.cancel(trial_id)


def _add_run(router: APIRouter, manager: TrialManager) -> None:
    """The route that answers when its trial has ended."""

    @router.post("/run")
    async def post_run(body: TrialRequest, request: Request) -> TrialResult:
        _accepting(manager)
        trial_id = _checked_id(body.trial_id or uuid.uuid4().hex)
        status = manager.start(trial_id, body)
        while status.state is not TrialState.ENDED:
            if manager.stopping.is_set():
                await asyncio.sleep(0.05)
            if await request.is_disconnected():
                raise Refused(499, "disconnected", "the caller is gone; the lease decides")
            status = await manager.wait(trial_id, DISCONNECT_CHECK_S)
        assert status.result is not None
        return status.result


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def on_refused(request: Request, error: Refused) -> JSONResponse:
        return _error(error.status, error.code, error.message)

    @app.exception_handler(QueueFull)
    async def on_full(request: Request, error: QueueFull) -> JSONResponse:
        answer = _error(429, "queue_full", str(error))
        answer.headers["retry-after"] = str(math.ceil(error.retry_s))
        return answer

    @app.exception_handler(UnknownTrial)
    async def on_unknown(request: Request, error: UnknownTrial) -> JSONResponse:
        return _error(404, "unknown_trial", f"no trial {error} here")

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return _error(422, "invalid_request", f"{place}: {first['msg']}")


def make_dashboard(
    app: FastAPI,
    settings: ServerSettings,
    manager: TrialManager,
    health: dict[str, Any],
    token: str | None,
) -> FastAPI:
    """The application of the dashboard port: its page and data, and the health of the server."""
    index = TrialIndex(settings.trials_dir)
    view = DashboardView(manager, index, health, JOBS)
    dashboard = make_dashboard_app(view, settings.trials_dir, token)
    dashboard.router.routes.extend(
        route for route in app.router.routes if getattr(route, "path", None) == "/health"
    )
    return dashboard
