"""A whole job of real processes on a real etcd, to be broken on purpose: coordinators, scripted participants, signals.

`FaultJob` starts and breaks it; `tests.faults_invariants` says afterwards whether everything held.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slackwater.backends.child import ChildProcess
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.local import LocalTier
from slackwater.engine.action import put
from slackwater.engine.config import CheckpointSettings, JobConfig, Site, Timers, WeightSettings
from slackwater.engine.errors import Unavailable
from slackwater.engine.keys import BUFFER, TRAINER, Keys
from slackwater.engine.model import LogEntry, Request
from slackwater.engine.ports import Compare, Txn
from slackwater.engine.settings import bootstrap
from slackwater.engine.view import View
from tests.faults_worker import Spec

__all__ = ["FaultJob", "fault_config", "pause", "resume", "kill_group"]

ROOT = Path(__file__).parent.parent
LEASE_S = 3
WINDOW_S = 4.0
MAX_LAG_STEPS = 10


def fault_config(
    job: str, *, publish_every_steps: int = 5, max_lag_steps: int = MAX_LAG_STEPS, **timers: Any
) -> JobConfig:
    """Short timers; a checkpoint only when a request asks for one, so that a job at rest has no round."""
    return JobConfig(
        job=job,
        timers=Timers(
            **{
                "heartbeat_s": 0.5,
                "lease_s": LEASE_S,
                "window_s": WINDOW_S,
                "persist_s": 1.0,
                "ready_deadline_s": 60.0,
                "save_deadline_s": 60.0,
                "resync_deadline_s": 60.0,
                "retry_wait_s": 6.0,
                **timers,
            }
        ),
        checkpoint=CheckpointSettings(every_steps=0, keep_last=-1),
        weights=WeightSettings(
            publish_every_steps=publish_every_steps, max_lag_steps=max_lag_steps, min_rollouts=1
        ),
    ).checked()


# -- processes ---------------------------------------------------------------------------------------------


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def group(process: ChildProcess) -> list[int]:
    """A process and what it started (its beat), the newest first."""
    return [*_children(process.pid), process.pid]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pause(process: ChildProcess) -> None:
    """SIGSTOP the process and its beat."""
    _signal(group(process), signal.SIGSTOP)


def resume(process: ChildProcess) -> None:
    """SIGCONT both."""
    _signal(group(process), signal.SIGCONT)


def kill_group(process: ChildProcess) -> None:
    """SIGKILL both at once, so that nobody is left to say what happened."""
    pids = group(process)
    _signal(pids, signal.SIGSTOP)
    _signal(pids, signal.SIGKILL)
    process.kill()


class FaultJob:
    """One job. `start` brings up two coordinators and all participants; `close` ends every process."""

    def __init__(
        self,
        directory: Path,
        job: str,
        endpoints: tuple[str, ...],
        config: JobConfig | None = None,
        *,
        rollouts: int = 2,
    ) -> None:
        self.directory, self.endpoints = directory, endpoints
        directory.mkdir(parents=True, exist_ok=True)
        self.config = config or fault_config(job)
        self.keys = Keys(job)
        self.tier = LocalTier(directory / "local")
        self.store = EtcdStore(endpoints, call_timeout_seconds=2.0)
        self.first_revision = self.store.revision() + 1
        self.rollouts = [f"rollout-{number}" for number in range(rollouts)]
        self.coordinators: dict[str, ChildProcess] = {}
        self.workers: dict[str, ChildProcess] = {}
        self._all: list[ChildProcess] = []
        self._serial = 0

    # -- starting ------------------------------------------------------------------------------------------

    def start(self, endpoints: dict[str, tuple[str, ...]] | None = None) -> FaultJob:
        """Two coordinators, buffer, rollouts and trainer; returns when the trainer has its grant."""
        own = endpoints or {}
        bootstrap(self.store, self.config)
        for name in ("c0", "c1"):
            self.coordinator(name, own.get(name))
        for name in (BUFFER, *self.rollouts, TRAINER):
            self.worker(name, endpoints=own.get(name))
        self.until(lambda v: v.go is not None, "the grant", 60.0)
        self.until(lambda v: len(self.candidates(v)) == 2, "two candidates", 60.0)
        return self

    def coordinator(self, name: str, endpoints: tuple[str, ...] | None = None) -> ChildProcess:
        """A replica as the command line starts it."""
        argv = [sys.executable, "-m", "slackwater.adapters.cli", "coordinator", "--name", name]
        argv += ["--job", self.keys.job, "--etcd", ",".join(endpoints or self.endpoints)]
        self.coordinators[name] = self._spawn(argv, name)
        return self.coordinators[name]

    def worker(
        self, name: str, *, endpoints: tuple[str, ...] | None = None, blind: bool = False
    ) -> ChildProcess:
        """A scripted participant."""
        site = Site(etcd=endpoints or self.endpoints, local=str(self.tier.root))
        spec = Spec(config=self.config, site=site, name=name, directory=str(self.directory), blind=blind)
        argv = [sys.executable, "-m", "tests.faults_worker", msgspec.json.encode(spec).decode()]
        self.workers[name] = self._spawn(argv, name)
        return self.workers[name]

    def _spawn(self, argv: list[str], name: str) -> ChildProcess:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = ChildProcess(argv, self.directory / f"{name}.log", environment)
        process.start()
        self._all.append(process)
        return process

    def close(self) -> None:
        """End every process, paused ones too."""
        for process in self._all:
            if process.running():
                kill_group(process)
        self.store.close()

    # -- looking -------------------------------------------------------------------------------------------

    def view(self) -> View:
        """The job as etcd holds it now."""
        found = self.store.range(self.keys.root)
        return View(self.keys, {kv.key: kv for kv in found.kvs}, found.revision, {})

    def until(self, condition: Callable[[View], Any], what: str, seconds: float = 40.0) -> View:
        """Wait for the job to come into a state."""
        end, look = time.monotonic() + seconds, threading.Event()
        while True:
            try:
                view = self.view()
                if condition(view):
                    return view
            except Unavailable:
                if time.monotonic() > end + 20:
                    raise
                continue
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds:g} s: {what}\n{self.describe(view)}")
            look.wait(0.05)

    def describe(self, view: View) -> str:
        """What a person wants to see of a job that does not do as it should."""
        skip = (self.keys.weight_versions, self.keys.logs, self.keys.config)
        held = [f"{k} {kv.value.decode()}" for k, kv in view.kvs.items() if not k.startswith(skip)]
        tails = [
            f"-- {path.name}\n" + "".join(path.read_text().splitlines(keepends=True)[-12:])
            for path in sorted([*self.directory.glob("*.log"), *self.directory.glob("*.events")])
        ]
        return "\n".join([*held, *self.history()[-25:], *tails])

    def candidates(self, view: View) -> list[tuple[int, str]]:
        """(create-revision, name) of every candidate, the leader first."""
        found = [kv for key, kv in view.kvs.items() if key.startswith(self.keys.leaders)]
        return sorted((kv.create_revision, str(msgspec.json.decode(kv.value)["id"])) for kv in found)

    def leader(self, view: View | None = None) -> tuple[int, str]:
        """(epoch, name) of who leads now; (0, "") for nobody."""
        found = self.candidates(view or self.view())
        return found[0] if found else (0, "")

    def history(self, kind: str = "") -> list[str]:
        """Texts of the job's history in etcd."""
        entries = self.view().under(self.keys.logs, LogEntry).values()
        return [entry.text for entry in entries if kind in ("", entry.kind)]

    def events(self, name: str, event: str = "") -> list[dict[str, Any]]:
        """What a worker did."""
        path = self.directory / f"{name}.events"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [entry for entry in found if event in ("", entry["event"])]

    def log_text(self, name: str) -> str:
        """What a process wrote to its log so far."""
        return (self.directory / f"{name}.log").read_text()

    def names_on_disk(self) -> set[str]:
        """Every path below the local tier, relative to it."""
        return {str(path.relative_to(self.tier.root)) for path in self.tier.root.rglob("*")}

    # -- asking --------------------------------------------------------------------------------------------

    def request(self, request: Request) -> str:
        """Put an operator's wish; returns its id."""
        self._serial += 1
        uuid = f"r{self._serial}"
        key = self.keys.request(uuid)
        wish = Txn((Compare(key, "create", "=", 0),), (put(key, request),))
        for _ in range(10):
            with contextlib.suppress(Unavailable):
                if self.store.txn(wish).succeeded or self.store.get(key) is not None:
                    return uuid
        raise AssertionError("etcd takes no request")

    def fate(self, uuid: str, seconds: float = 40.0) -> Request:
        """Wait until a wish is done or refused."""

        def over(view: View) -> bool:
            found = view.record(self.keys.request(uuid), Request)
            return found is not None and found.state in ("done", "refused")

        found = self.until(over, f"an answer to {uuid}", seconds).record(self.keys.request(uuid), Request)
        assert found is not None
        return found

    def checkpoint(self) -> int:
        """Ask for a checkpoint and wait for it."""
        fate = self.fate(self.request(Request(kind="checkpoint")))
        assert fate.state == "done", f"{fate}\n{self.describe(self.view())}"
        return int(fate.answer.rsplit(" ", 1)[1])

    def hold(self, name: str, *phases: str) -> None:
        """From now on this worker does not answer these phases (none: it answers all)."""
        path = self.directory / f"{name}.hold"
        path.with_suffix(".new").write_text("\n".join(phases))
        path.with_suffix(".new").replace(path)

    @contextlib.contextmanager
    def holding(self, name: str, phase: str) -> Iterator[None]:
        """Hold one phase for a block."""
        self.hold(name, phase)
        try:
            yield
        finally:
            self.hold(name)

    def settled(self, seconds: float = 40.0) -> View:
        """Wait until the job is at rest: trainer granted and training, everybody routed, nothing open."""

        def rest(view: View) -> bool:
            routes = view.routes()
            return (
                view.go is not None
                and view.recovery is None
                and view.round is None
                and view.freeze is None
                and not view.holds()
                and all(name in routes and view.alive(name) is not None for name in self.rollouts)
                and view.alive(TRAINER) is not None
                and view.alive(BUFFER) is not None
            )

        self.until(rest, "a job at rest", seconds)
        last = self.events(TRAINER, "step")[-1]["at"]
        return self.until(
            lambda v: rest(v) and self.events(TRAINER, "step")[-1]["at"] > last, "training goes on", seconds
        )
