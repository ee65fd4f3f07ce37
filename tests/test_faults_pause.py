"""Whole process groups, worker and beat, that are stopped for longer than lease and window, or killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.engine.keys import TRAINER
from slackwater.engine.model import Request
from slackwater.engine.view import View
from tests.faults import LEASE_S, WINDOW_S, FaultJob, kill_group, pause, resume
from tests.faults_invariants import changes, check_invariants

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture
def running(etcd3members: EtcdCluster, tmp_path: Path, job: str) -> Iterator[FaultJob]:
    """A job at rest with one checkpoint, on three members of its own."""
    started = FaultJob(tmp_path, job, etcd3members.endpoints)
    try:
        started.start()
        started.checkpoint()
        started.settled()
        yield started
    finally:
        started.close()


def check(job: FaultJob) -> View:
    """At rest again, and everything holds."""
    view = job.settled()
    check_invariants(job.store, job.keys, job.tier, job.first_revision)
    return view


def failed(view: View, name: str, incarnation: str) -> bool:
    """Whether this very life was declared failed."""
    health = view.health(name)
    return health is not None and health.incarnation == incarnation and health.state == "failed"


def mentions(job: FaultJob, incarnation: str, since: int) -> list[str]:
    """Every change since a revision that an incarnation signed. What the leader says about it does not count."""
    ours = (job.keys.logs, job.keys.healths)
    return [
        f"{event.kv.mod_revision} {event.kv.key} {event.kv.value.decode()}"
        for group in changes(job.store, job.keys, since)
        for event in group
        if event.kind == "put"
        and incarnation in event.kv.value.decode()
        and not event.kv.key.startswith(ours)
    ]


@pytest.mark.parametrize("blind", [False, True], ids=["by-its-clock", "by-the-store"])
def test_stopped_trainer_wakes_up_as_a_zombie(running: FaultJob, blind: bool) -> None:
    """Stopped in the middle of a round until another life has its slot, then woken up: nothing takes effect any more.

    `by-the-store`: it does not even know that its lease is over and goes on writing, so the fences are all there is.
    """
    if blind:
        running.workers[TRAINER].stop()
        running.worker(TRAINER, blind=True)
        running.until(lambda v: v.go is not None and v.timeline > 1, "the blind trainer has its grant")
        running.settled()
    before = running.view()
    old = before.participant(TRAINER)
    assert old is not None
    zombie = running.workers[TRAINER]
    running.hold(TRAINER, "saved")
    wish = running.request(Request(kind="checkpoint"))
    running.until(lambda v: v.round is not None and v.round.phase == "save", "phase save")
    pause(zombie)
    stopped = time.monotonic()
    running.hold(TRAINER)
    running.until(lambda v: failed(v, TRAINER, old.incarnation), "the verdict")
    took = time.monotonic() - stopped
    assert WINDOW_S < took < LEASE_S + WINDOW_S + 2 + LEASE_S, took
    assert running.fate(wish).state == "refused"
    (running.directory / f"{TRAINER}.events").rename(running.directory / f"{TRAINER}.old")
    running.worker(TRAINER)
    running.settled()
    first = running.checkpoint()
    assert first == before.last_checkpoint + 1
    paths = {record.path for record in running.view().checkpoints().values()}
    names = running.names_on_disk()
    since = running.store.revision() + 1
    resume(zombie)
    woken = time.monotonic()
    running.until(
        lambda v: any(e["event"] in ("over", "refused") and e["at"] > woken for e in running.events(TRAINER)),
        "the old life notices",
    )
    threading.Event().wait(2.0)  # time to do harm
    assert running.checkpoint() == first + 1
    assert mentions(running, old.incarnation, since) == []
    fresh = {name for name in running.names_on_disk() - names if old.incarnation in name}
    # It may write on, but only where nobody looks: into its own attempt, which no record names.
    assert all(f"/t{old.timeline}/" in name and name.endswith("/trainer.bin") for name in fresh), fresh
    assert not [name for name in fresh if name.startswith(tuple(paths))]
    tried = {e["error"] for e in running.events(TRAINER, "refused") if e["incarnation"] == old.incarnation}
    assert not blind or "Fenced" in tried, tried
    kill_group(zombie)
    check(running)


@pytest.mark.parametrize(
    "blind",
    [pytest.param(False, id="by-its-clock", marks=pytest.mark.soak), pytest.param(True, id="by-the-store")],
)
def test_stopped_rollout_comes_back_as_another_life(running: FaultJob, blind: bool) -> None:
    """A rollout that is stopped for longer than lease and window loses its route, the job does not go back, and when
    it wakes up its old life has no effect: it registers anew.
    """
    name = "rollout-1"
    if blind:
        running.workers[name].stop()
        running.until(lambda v: v.participant(name) is None, "forgotten")
        running.worker(name, blind=True)
        running.settled()
    before = running.view()
    old = before.participant(name)
    assert old is not None
    pause(running.workers[name])
    running.until(lambda v: name not in v.routes(), "without a route", LEASE_S * 2 + 1)
    running.until(lambda v: failed(v, name, old.incarnation), "the verdict")
    assert running.checkpoint() == before.last_checkpoint + 1
    since = running.store.revision() + 1
    zombie = running.workers[name]
    resume(zombie)
    if blind:
        running.until(lambda _: running.events(name, "over"), "the zombie at work")
        threading.Event().wait(2.0)
        assert mentions(running, old.incarnation, since) == []
        kill_group(zombie)
        running.worker(name)
    running.until(
        lambda v: name in v.routes() and v.routes()[name].incarnation != old.incarnation,
        "another life routed",
    )
    assert mentions(running, old.incarnation, since) == []
    assert check(running).timeline == before.timeline


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_all_rollouts_lost_at_once(running: FaultJob, kind: str) -> None:
    """The trainer is held, and it is said aloud, about a lease later; when they return it goes on from where it was."""
    before = running.view()
    groups = [running.workers[name] for name in running.rollouts]
    lost = time.monotonic()
    for process in groups:
        (kill_group if kind == "kill" else pause)(process)
    view = running.until(lambda v: "min_rollouts" in v.holds(), "the hold", 2 * LEASE_S + 4.0)
    took = time.monotonic() - lost
    print(f"held {took:.1f} s after the loss with a lease of {LEASE_S} s")
    assert view.holds()["min_rollouts"].text == "0 of at least 1 rollouts have a route"
    said = "the trainer is held: 0 of at least 1 rollouts have a route"
    running.until(
        lambda _: said in running.history("hold"), "the history says so", 5.0
    )  # written after the hold
    running.until(
        lambda v: (a := v.alive(TRAINER)) is not None and "min_rollouts" in a.waits_for, "the trainer says so"
    )
    stands = running.events(TRAINER, "step")[-1]["step"]
    for name in running.rollouts:
        registered = before.participant(name)
        assert registered is not None
        running.until(lambda v, r=registered: failed(v, r.name, r.incarnation), f"{name} failed")
    assert running.events(TRAINER, "step")[-1]["step"] == stands
    for name, process in zip(running.rollouts, groups, strict=True):
        if kind == "kill":
            running.worker(name)
        else:
            resume(process)
    view = check(running)
    assert view.timeline == before.timeline
    assert view.go == before.go
    running.until(lambda _: running.history("hold")[-1].startswith("released"), "the history says so", 5.0)
