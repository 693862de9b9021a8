"""One round of `benchmarks/sessions.py`: server, engine and agents, each a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from session_costs import Corpus
from session_engine import routing_rows

HERE = Path(__file__).parent
TOKEN = "benchmark"
MAX_SEQ_LEN = 1_000_000


class Child:
    """A process that this benchmark started: CPU seconds and memory, read from /proc."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(command, **options)

    def cpu_s(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def status(self, name: str) -> int:
        """A number of /proc/PID/status: `VmHWM` and `VmRSS` in KiB, `Threads`."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise KeyError(name)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator[Child]:
    started = Child(command, **options)
    try:
        yield started
    finally:
        started.end()


@contextlib.contextmanager
def server(corpus: Corpus, row_bytes: int, scratch: Path) -> Iterator[tuple[str, Child]]:
    """A session server over an instant engine: its URL and its process."""
    settings = json.dumps({"output_ids": corpus.output_ids, "routing_row_bytes": row_bytes})
    command = [sys.executable, str(HERE / "session_engine.py"), settings]
    with child(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.process.stdout is not None
        url = engine.process.stdout.readline().strip()
        ready = scratch / f"ready-{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "miles_core.sessions.server", "--engine-url", url]
        command += ["--tokenizer", str(corpus.directory), "--ready-file", str(ready)]
        command += ["--parent-pid", str(os.getpid())]
        env = {**os.environ, "MILES_SESSION_TOKEN": TOKEN}
        log = scratch / "server.log"
        with (
            log.open("w") as out,
            child(command, stdout=out, stderr=out, env=env) as worker,
        ):
            while not ready.exists():
                if worker.process.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{log.read_text()}")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], worker


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def latencies_ms(seconds: list[float]) -> dict[str, float]:
    return {
        "p50_ms": 1000 * percentile(seconds, 0.5),
        "p99_ms": 1000 * percentile(seconds, 0.99),
        "max_ms": 1000 * max(seconds),
    }


class Load:
    """The process of agents, phase by phase."""

    def __init__(self, plan: dict[str, Any], scratch: Path) -> None:
        path = scratch / f"plan-{time.monotonic_ns()}.json"
        path.write_text(json.dumps(plan))
        command = [sys.executable, str(HERE / "session_load.py"), str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = Child(command, **pipes, text=True)

    def phase(self) -> dict[str, Any]:
        """Wait for the end of the next phase."""
        assert self.child.process.stdout is not None
        line = self.child.process.stdout.readline()
        if not line:
            raise RuntimeError("the agents failed")
        return json.loads(line)

    def go_on(self) -> None:
        assert self.child.process.stdin is not None
        self.child.process.stdin.write("\n")
        self.child.process.stdin.flush()


def drive(
    corpus: Corpus, row_bytes: int, load: dict[str, Any], scratch: Path, probe: bool = False
) -> dict[str, float]:
    """One round: open sessions, drive them, check their samples. `probe` measures /health too."""
    session: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "sampling_params": {"temperature": 1.0}}
    if row_bytes:
        session["routed_experts"] = True
    with server(corpus, row_bytes, scratch) as (url, worker):
        plan = {"url": url, "token": TOKEN, "session": session, **load}
        plan |= {"user_texts": corpus.user_texts, "answer": corpus.answer}
        agents = Load(plan, scratch)
        try:
            agents.phase()
            before, cpu = worker.status("VmRSS"), worker.cpu_s()
            health = Health(url) if probe else None
            agents.go_on()
            driven = agents.phase()
            result = {} if health is None else health.stop()
            cpu = worker.cpu_s() - cpu
            peak = worker.status("VmHWM")
            agents.go_on()
            read = agents.phase()
            agents.go_on()
            check(read["sessions"], load["turns"], row_bytes)
            turns = load["sessions"] * load["turns"]
            result |= {
                "turns_per_s": turns / driven["wall_s"],
                **{
                    f"turn_{k}" if probe else k: v
                    for k, v in latencies_ms(driven["latencies"]).items()
                },
                "worker_cpu_ms_per_turn": 1000 * cpu / turns,
                "agents_cpu_ms_per_turn": 1000 * driven["cpu_s"] / turns,
                "rss_before_mib": before / 1024,
                "peak_mib": peak / 1024,
                "peak_after_samples_mib": worker.status("VmHWM") / 1024,
                "samples_ms_per_session": 1000 * read["wall_s"] / load["sessions"],
                "tokens_per_turn": statistics.mean(sum(s["tokens"]) for s in read["sessions"])
                / load["turns"],
                "worker_threads": worker.status("Threads"),
            }
            return result
        finally:
            agents.child.end()


def check(sessions: list[dict[str, Any]], turns: int, row_bytes: int) -> None:
    """Every session is one sample of all its turns: a fast server that is wrong does not count."""
    for session in sessions:
        if session["model_calls"] != turns or len(session["tokens"]) != 1:
            raise RuntimeError(f"a session of {turns} turns recorded {session}")
        rows = routing_rows(row_bytes)[: (session["tokens"][0] - 1) * row_bytes]
        if row_bytes and session["routing"] != [hashlib.sha256(rows).hexdigest()]:
            raise RuntimeError("the routing data of a sample is not the engine's")


class Health:
    """Asks /health every 5 ms over one connection, from a thread of its own."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url).netloc
        self.seconds: list[float] = []
        self.failures = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        while not self.done.is_set():
            began = time.perf_counter()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.seconds.append(time.perf_counter() - began)
            self.failures += answer.status != 200
            time.sleep(0.005)
        connection.close()

    def stop(self) -> dict[str, float]:
        self.done.set()
        self.thread.join()
        found = {"health_asked": float(len(self.seconds)), "health_failures": float(self.failures)}
        return found | latencies_ms(self.seconds)
