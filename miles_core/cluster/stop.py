"""Stopping a run from outside its supervisor."""

from __future__ import annotations

import logging
import time

from miles_core.cluster import local_client
from miles_core.cluster.jobs import ClusterUnreachable
from miles_core.cluster.local import needs_agent_server, needs_ray
from miles_core.cluster.local_secrets import read_secrets, secrets_path
from miles_core.cluster.supervise import free_trials, job_stop_s, stop_file
from miles_core.runs.directory import RunDir
from miles_core.runs.fold import FINAL_STATES, fold
from miles_core.runs.journal import Journal, read
from miles_core.runs.lock import holder

log = logging.getLogger(__name__)

_SUPERVISOR_LAG_S = 45.0  # from the end of the job to that of its supervisor


def stop_run(run: RunDir, reason: str, supervisor_wait_s: float | None = None) -> bool:
    """Cancel a run: its job, its trials, its local cluster; returns whether anything was left.

    A supervisor is asked and waited for; what it leaves is done here. Safe to repeat.
    """
    run.identity()
    active = holder(run) is not None or local_client.guardian(run) is not None
    if holder(run) is not None:
        stop_file(run).write_text(reason)
        if supervisor_wait_s is None:
            supervisor_wait_s = job_stop_s(run.load_config()) + _SUPERVISOR_LAG_S
        deadline = time.monotonic() + supervisor_wait_s
        while holder(run) is not None and time.monotonic() < deadline:
            time.sleep(0.2)
    active = release(run) or active
    state = fold(read(run.journal))
    if state.state not in FINAL_STATES and (active or state.state != "new"):
        with Journal(run.journal) as journal:
            journal.append("run_ended", state="cancelled", detail=reason)
        active = True
    if holder(run) is None:
        stop_file(run).unlink(missing_ok=True)
    return active


def release(run: RunDir) -> bool:
    """Stop a live job, free its trials and end the local cluster; returns whether a job lived."""
    config = run.load_config()
    stopped = False
    own_ray, own_agent = needs_ray(config), needs_agent_server(config)
    reachable = not own_ray or local_client.guardian(run) is not None
    cluster = local_client.locate(run, config) if reachable else None
    if cluster is not None:
        try:
            with cluster.jobs() as jobs:
                job = jobs.live(run.identity()["id"])
                if job is not None:
                    stopped = True
                    jobs.stop(job.id, job_stop_s(config))
        except ClusterUnreachable as error:
            log.warning("%s", error)
    if not own_agent and secrets_path(run).exists() and config.agent_server.agent_server_url:
        url = config.agent_server.agent_server_url
        free_trials(run, url, read_secrets(run)["HARBOR_ADMIN_SECRET"])
    if not local_client.stop(run):
        log.warning("the guardian of %s does not end; see %s/cluster", run.path, run.path)
    return stopped
