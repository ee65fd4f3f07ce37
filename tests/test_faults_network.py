"""A proxy between one process and etcd: replies that are lost after the write was applied, resets, and black holes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.engine.keys import TRAINER
from slackwater.engine.model import Request
from slackwater.engine.view import View
from tests.faults import LEASE_S, FaultJob
from tests.faults_invariants import check_invariants
from tests.faults_proxy import Proxy

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture
def proxy(etcd3members: EtcdCluster) -> Iterator[Proxy]:
    """To the first member."""
    made = Proxy(etcd3members.endpoints[0])
    yield made
    made.close()


@pytest.fixture
def idle(etcd3members: EtcdCluster, tmp_path: Path, job: str) -> Iterator[FaultJob]:
    """A job that is not started yet."""
    made = FaultJob(tmp_path, job, etcd3members.endpoints)
    yield made
    made.close()


def check(job: FaultJob) -> View:
    """At rest again, and everything holds."""
    view = job.settled()
    check_invariants(job.store, job.keys, job.tier, job.first_revision)
    return view


@pytest.mark.parametrize("silence_seconds", [0.0, LEASE_S + 1.0], ids=["reset", "longer-than-the-lease"])
def test_reply_of_a_commit_is_lost(idle: FaultJob, proxy: Proxy, silence_seconds: float) -> None:
    """The leader's commit is applied and it never hears of it: one checkpoint, told once, and the next one follows."""
    job = idle.start({"c0": (proxy.endpoint,), "c1": (proxy.endpoint,)})
    before = job.checkpoint()
    job.hold(TRAINER, "sealed")
    wish = job.request(Request(kind="checkpoint"))
    job.until(lambda v: v.round is not None and v.round.phase == "seal", "phase seal")
    epoch = job.leader()[0]
    proxy.swallow_after(job.keys.checkpoint(before + 1))
    job.hold(TRAINER)
    assert proxy.swallowed.wait(20)
    job.until(lambda v: v.last_checkpoint == before + 1, "applied all the same", 10.0)
    threading.Event().wait(silence_seconds)
    proxy.reset()
    assert job.fate(wish).answer == f"checkpoint {before + 1}"
    job.settled()
    assert job.checkpoint() == before + 2
    assert silence_seconds or job.leader()[0] == epoch
    check(job)


@pytest.mark.parametrize("silence_seconds", [0.0, LEASE_S + 1.0], ids=["reset", "longer-than-the-lease"])
def test_reply_of_a_publication_is_lost(idle: FaultJob, proxy: Proxy, silence_seconds: float) -> None:
    """The trainer's cut is applied and it never hears of it: it finds out; no version is made twice, none missing."""
    job = idle.start({TRAINER: (proxy.endpoint,)})
    job.hold(TRAINER, "cut")
    wish = job.request(Request(kind="checkpoint"))
    job.until(lambda v: v.round is not None, "a round")
    before = job.view()
    proxy.swallow_after(job.keys.freeze + "\x12")  # the field after the key: a put of it
    job.hold(TRAINER)
    assert proxy.swallowed.wait(20)
    job.until(lambda v: v.freeze is not None, "applied all the same", 10.0)
    if silence_seconds:
        proxy.go_silent()
        threading.Event().wait(silence_seconds)
    proxy.reset()
    assert job.fate(wish).state == "done"
    view = check(job)
    assert view.timeline == before.timeline
    assert view.go == before.go


@pytest.mark.parametrize(
    "name",
    [TRAINER, pytest.param("rollout-0", marks=pytest.mark.soak), pytest.param("c0", marks=pytest.mark.soak)],
)
def test_black_hole_for_longer_than_the_lease(idle: FaultJob, proxy: Proxy, name: str) -> None:
    """One process is cut off from etcd without a word for longer than its lease, and is back without a restart."""
    job = idle.start({name: (proxy.endpoint,)})
    before = job.checkpoint()
    view = job.settled()
    timeline, head = view.timeline, view.head
    assert head is not None
    proxy.go_silent()
    key = job.keys.alive(name)
    if name.startswith("c"):
        job.until(lambda v: job.leader(v)[1] == "c1" and len(job.candidates(v)) == 1, "c0 lost its lease")
    else:
        job.until(lambda v: key not in v.kvs, f"the lease of {name} runs out", 3 * LEASE_S)
    threading.Event().wait(1.0)
    if name == TRAINER:
        after = job.view()
        stands = job.events(TRAINER, "step")[-1]["step"]
        published = after.step_map()[after.head.version] if after.head is not None else 0
        assert stands - published <= job.config.weights.max_lag_steps
        assert after.timeline == timeline
    proxy.reset()
    job.until(lambda v: len(job.candidates(v)) == 2, "two candidates")
    view = job.settled()
    assert view.timeline == timeline
    assert job.checkpoint() == before + 1
    check(job)
