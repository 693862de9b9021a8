"""The HTTP routes of the agent server."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from miles_core.agent_server.agents import JOBS
from miles_core.agent_server.answers import Refused, error_answer, set_errors
from miles_core.agent_server.body_limit import BodyLimit
from miles_core.agent_server.callers import OwnCallers, bearer
from miles_core.agent_server.dashboard.app import make_dashboard_app
from miles_core.agent_server.dashboard.index import TrialIndex
from miles_core.agent_server.dashboard.view import DashboardView
from miles_core.agent_server.protocol import (
    Health,
    Name,
    TrialRequest,
    TrialResult,
    TrialState,
    TrialStatus,
    id_problem,
    valid_id,
)
from miles_core.agent_server.queueing import QueueFull
from miles_core.agent_server.retention import Retention
from miles_core.agent_server.same_trial import TrialConflict
from miles_core.agent_server.settings import ServerSettings
from miles_core.agent_server.tasks import TaskSet, TasksGone
from miles_core.agent_server.trials import TrialManager, UnknownTrial
from miles_core.agent_server.trials_dir import RETRY_S, CannotKeep

LONGEST_WAIT_S = 120.0
BODY_LIMIT = 4 << 20
"""Bytes of a request; a row's metadata travels with it."""
DISCONNECT_CHECK_S = 1.0


class FlushRequest(BaseModel):
    """Which trainer's trials to end."""

    session_server_instance_id: Name


def _checked_id(trial_id: str) -> str:
    if not valid_id(trial_id):
        raise Refused(
            422,
            "invalid_trial_id",
            f"{trial_id[:80]!r} cannot name a trial: {id_problem(trial_id)}",
        )
    return trial_id


TrialId = Annotated[str, Depends(_checked_id)]


def make_app(
    settings: ServerSettings,
    manager: TrialManager,
    health: dict[str, Any],
    token: str | None,
    bound: str,
) -> FastAPI:
    """The application; `health` holds the parts of its answer that do not change, and `bound` is
    the address that it is served on."""
    app = FastAPI(title="Miles Flow agent server", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    app.add_middleware(OwnCallers, token=token, bound=bound)
    tasks = TaskSet(settings.tasks_dir)
    _add_health(app, manager, tasks, health)
    secured = APIRouter(dependencies=[Depends(bearer(token))])
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


def _add_health(
    app: FastAPI, manager: TrialManager, tasks: TaskSet, health: dict[str, Any]
) -> None:
    instance_id = str(uuid.uuid4())

    @app.get("/health")
    async def get_health() -> Health:
        problem = manager.problem()
        if problem:
            raise Refused(503, "trials_dir_gone", problem)
        running, queued = manager.counts()
        try:
            found = len(tasks.ids())
        except TasksGone:
            found = 0
        return Health(
            status="stopping" if manager.stopping.is_set() else "ready",
            instance_id=instance_id,
            running=running,
            queued=queued,
            tasks_found=found,
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
        trial_id: TrialId, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
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
    set_errors(app)

    @app.exception_handler(QueueFull)
    async def on_full(request: Request, error: QueueFull) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(error.retry_s))}
        return error_answer(429, "queue_full", str(error), headers)

    @app.exception_handler(UnknownTrial)
    async def on_unknown(request: Request, error: UnknownTrial) -> JSONResponse:
        return error_answer(404, "unknown_trial", f"no trial {error} here")

    @app.exception_handler(CannotKeep)
    async def on_unkept(request: Request, error: CannotKeep) -> JSONResponse:
        return error_answer(503, error.code, str(error), {"retry-after": str(RETRY_S)})

    @app.exception_handler(RecursionError)
    async def on_deep(request: Request, error: RecursionError) -> JSONResponse:
        return error_answer(422, "invalid_request", "body: it is nested too deep")

    @app.exception_handler(TrialConflict)
    async def on_conflict(request: Request, error: TrialConflict) -> JSONResponse:
        return error_answer(409, "trial_conflict", str(error))

    @app.exception_handler(TasksGone)
    async def on_gone(request: Request, error: TasksGone) -> JSONResponse:
        return error_answer(503, "tasks_dir_gone", str(error))


def make_view(
    settings: ServerSettings, manager: TrialManager, retention: Retention, health: dict[str, Any]
) -> DashboardView:
    """What the dashboard shows; it follows what ends and what is removed."""
    index = TrialIndex(settings.trials_dir)
    retention.watchers.append(index.remove)
    return DashboardView(manager, index, health, JOBS)


def make_dashboard(
    app: FastAPI,
    settings: ServerSettings,
    view: DashboardView,
    token: str | None,
    bound: str,
) -> FastAPI:
    """The application of the dashboard port: its page and data, and the health of the server."""
    dashboard = make_dashboard_app(view, settings.trials_dir, token, bound)
    dashboard.router.routes.extend(
        route for route in app.router.routes if getattr(route, "path", None) == "/health"
    )
    return dashboard
