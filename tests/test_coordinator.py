"""The coordinator on a real etcd, with scripted participants: birth, rounds, and a change of leader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.config import CheckpointSettings, JobConfig, StallLimits, Timers, WeightSettings
from slackwater.engine.coordinator import Coordinator
from slackwater.engine.errors import LeaseLost
from slackwater.engine.keys import BUFFER, TRAINER, Keys
from slackwater.engine.model import LogEntry
from slackwater.engine.session import Session, SessionKeeper
from slackwater.engine.settings import bootstrap
from slackwater.engine.view import View
from tests.participants import Scripted

pytestmark = pytest.mark.real

TIMERS = Timers(
    heartbeat_s=0.5,
    lease_s=3,
    window_s=2.0,
    persist_s=1.0,
    ready_deadline_s=3.0,
    save_deadline_s=3.0,
    resync_deadline_s=5.0,
    stall_s=StallLimits(training=60.0),
)


def settings(job: str, every_steps: int = 0) -> JobConfig:
    """A job with short timers; no checkpoints unless asked."""
    return JobConfig(
        job=job,
        timers=TIMERS,
        checkpoint=CheckpointSettings(every_steps=every_steps, keep_last=-1),
        weights=WeightSettings(publish_every_steps=2, max_lag_steps=4),
    ).checked()


class Leader:
    """One coordinator replica in a thread."""

    def __init__(self, store: EtcdStore, config: JobConfig, name: str) -> None:
        self.session = Session(store, config.timers.lease_s)
        self.session.open()
        self.keeper = SessionKeeper(self.session)
        self.keeper.start()
        self.replica = Coordinator(store, Keys(config.job), self.session, {"id": name})
        self.stopping = threading.Event()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.replica.step(0.1)
        except LeaseLost:
            return
        except BaseException as error:
            self.errors.append(error)
            raise

    def kill(self) -> None:
        """The session ends under it, as when its host dies."""
        self.keeper.stop()
        self.session.fail("killed by the test")
        self.thread.join()
        self.session.close()
        self.replica.close()

    def stop(self) -> None:
        """Resign."""
        self.stopping.set()
        self.thread.join()
        self.keeper.stop()
        self.replica.close()
        self.session.close()


class Job:
    """A running job: its store, its participants and a fresh look at etcd."""

    def __init__(self, store: EtcdStore, config: JobConfig, stack: ExitStack) -> None:
        self.store, self.config, self.stack = store, config, stack
        self.keys = Keys(config.job)
        self.parts: dict[str, Scripted] = {}

    def lead(self, name: str = "c0") -> Leader:
        """Start a replica."""
        leader = Leader(self.store, self.config, name)
        self.stack.callback(leader.stop)
        return leader

    def add(self, name: str, role: str) -> Scripted:
        """Start a participant."""
        part = Scripted(self.store, self.config, name, role)
        part.announced_every = self.config.checkpoint.every_steps
        self.parts[name] = part.start()
        self.stack.callback(part.stop)
        return part

    def add_all(self) -> None:
        """Trainer, buffer and one rollout."""
        self.add(BUFFER, "buffer")
        self.add("rollout-0", "rollout")
        self.add(TRAINER, "trainer")

    def view(self) -> View:
        """The job as etcd holds it now."""
        found = self.store.range(self.keys.root)
        return View(self.keys, {kv.key: kv for kv in found.kvs}, found.revision, {})

    def until(self, condition: Callable[[View], bool], what: str, seconds: float = 25.0) -> View:
        """Wait for the job to come into a state."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            view = self.view()
            if condition(view):
                return view
            threading.Event().wait(0.05)
        view = self.view()
        log = [entry.text for entry in view.under(self.keys.logs, LogEntry).values()]
        errors = {name: part.errors for name, part in self.parts.items()}
        pytest.fail(f"not within {seconds} s: {what}; {view.recovery} {view.round} {log} {errors}")

    def history(self) -> list[str]:
        """Texts of the history."""
        return [entry.text for entry in self.view().under(self.keys.logs, LogEntry).values()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever a test starts ends with it."""
    with ExitStack() as found:
        yield found


def born(store: EtcdStore, config: JobConfig, stack: ExitStack) -> Job:
    """A job in etcd without any process yet."""
    bootstrap(store, config)
    return Job(store, config, stack)


def test_birth_is_recovery_one_and_ends_with_go(store: EtcdStore, job: str, stack: ExitStack) -> None:
    """The trainer takes no step before recovery 1 has gone through every phase (I8)."""
    running = born(store, settings(job), stack)
    running.lead()
    running.add(BUFFER, "buffer")
    trainer = running.add(TRAINER, "trainer")
    running.until(
        lambda v: v.recovery is not None and v.recovery.phase == "resync", "resync without rollouts"
    )
    assert trainer.trained == 0
    running.add("rollout-0", "rollout")
    view = running.until(lambda v: v.go is not None, "go")
    go = view.go
    assert go is not None
    assert (go.timeline, go.incarnation, go.from_step) == (1, trainer.membership.incarnation, 0)
    assert view.recovery is None
    assert view.head is not None
    running.until(lambda _: trainer.trained > 3, "training")
    assert any("recovery 1 done" in text for text in running.history())


def test_rounds_commit_checkpoints_one_after_the_other(store: EtcdStore, job: str, stack: ExitStack) -> None:
    """Two rounds become checkpoints 1 and 2, each cut at the announced step, where the step map says (I1, I2)."""
    running = born(store, settings(job, every_steps=5), stack)
    running.lead()
    running.add_all()
    view = running.until(lambda v: v.last_checkpoint >= 2, "two checkpoints")
    records = view.checkpoints()
    assert list(records)[:2] == [1, 2]
    for record in records.values():
        version = view.weight_version(record.weight_version)
        assert version is not None
        assert version.step == record.training_step
        assert record.training_step % 5 == 0
        assert record.state == "committed"


def test_a_round_that_is_not_saved_aborts_without_an_id(store: EtcdStore, job: str, stack: ExitStack) -> None:
    """An abort frees the trainer and takes no id; the next round becomes checkpoint 1 (I2, I6)."""
    running = born(store, settings(job, every_steps=5), stack)
    running.lead()
    running.add_all()
    trainer = running.parts[TRAINER]
    trainer.refuse.add("saved")
    running.until(lambda _: any("aborted in save" in text for text in running.history()), "an abort")
    # A round that was open at the very start may have been saved before the refusal.
    before = running.view().last_checkpoint
    assert before <= 1
    trainer.refuse.clear()
    view = running.until(lambda v: v.last_checkpoint > before, "a checkpoint after the abort")
    assert sorted(view.checkpoints()) == list(range(1, view.last_checkpoint + 1))


def test_another_leader_goes_on(store: EtcdStore, job: str, stack: ExitStack) -> None:
    """When the leader's session ends, the other replica finishes what was begun; epochs rise (I4)."""
    running = born(store, settings(job, every_steps=5), stack)
    first = running.lead("c0")
    running.until(lambda _: first.replica.leading, "a leader")
    second = running.lead("c1")
    running.add_all()
    running.until(lambda v: v.last_checkpoint >= 1, "a checkpoint")
    assert not second.replica.leading
    first.kill()
    running.until(lambda _: second.replica.leading, "another leader")
    before = running.view().last_checkpoint
    running.until(lambda v: v.last_checkpoint > before, "a checkpoint of the new leader")
    assert not second.errors


def test_a_new_trainer_gets_the_newest_checkpoint(store: EtcdStore, job: str, stack: ExitStack) -> None:
    """A trainer that dies and comes back is given the newest checkpoint on a new timeline (I5, I9)."""
    running = born(store, settings(job, every_steps=5), stack)
    running.lead()
    running.add_all()
    running.until(lambda v: v.last_checkpoint >= 1, "a checkpoint")
    running.parts[TRAINER].stop(silent=True)
    view = running.until(lambda v: v.go is None, "the verdict")
    newest = view.checkpoints()[view.last_checkpoint]
    again = running.add(TRAINER, "trainer")
    view = running.until(lambda v: v.go is not None and v.timeline > 1, "go on a new timeline")
    go = view.go
    assert go is not None
    assert go.incarnation == again.membership.incarnation
    assert go.from_step == newest.training_step


def replica_process(etcd: EtcdCluster, job: str, name: str, log: Path) -> subprocess.Popen[bytes]:
    """A real coordinator process that joins a job."""
    argv = [sys.executable, "-m", "slackwater.adapters.cli", "coordinator", "--name", name]
    argv += ["--job", job, "--etcd", ",".join(etcd.endpoints)]
    with log.open("wb") as file:
        return subprocess.Popen(argv, stderr=file, stdout=file)


def leader_name(running: Job) -> str:
    """Who has the oldest candidacy now; "" for nobody."""
    found = [kv for kv in running.view().kvs.values() if kv.key.startswith(running.keys.leaders)]
    if not found:
        return ""
    oldest = min(found, key=lambda kv: kv.create_revision)
    return str(msgspec.json.decode(oldest.value)["id"])


def test_a_killed_leader_process_is_replaced(
    etcd: EtcdCluster, store: EtcdStore, job: str, tmp_path: Path, stack: ExitStack
) -> None:
    """Of two processes, SIGKILL of the leader makes the other lead; SIGTERM makes that one resign with code 0."""
    running = born(store, settings(job), stack)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name in ("c0", "c1"):
        processes[name] = replica_process(etcd, job, name, tmp_path / f"{name}.log")
        stack.callback(processes[name].wait)
        stack.callback(processes[name].kill)

    def candidates(view: View) -> int:
        return sum(key.startswith(running.keys.leaders) for key in view.kvs)

    running.until(lambda v: candidates(v) == 2, "two candidates", 40.0)
    first = leader_name(running)
    other = "c1" if first == "c0" else "c0"
    os.kill(processes[first].pid, signal.SIGKILL)
    killed = time.monotonic()
    running.until(lambda _: leader_name(running) == other, "the other leads")
    took = time.monotonic() - killed
    print(f"fail-over took {took:.2f} s with a lease of {TIMERS.lease_s} s")
    assert took < 3 * TIMERS.lease_s + 1
    running.add(BUFFER, "buffer")
    running.add("rollout-0", "rollout")
    running.add(TRAINER, "trainer")
    running.until(lambda v: v.go is not None, "the new leader leads")
    processes[other].send_signal(signal.SIGTERM)
    assert processes[other].wait(20) == 0, (tmp_path / f"{other}.log").read_text()
    running.until(lambda v: candidates(v) == 0, "the candidacy gone at once", 2.0)
