"""etcd itself fails under a running job: its leader, its quorum, its space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from slackwater.backends.embedded import EtcdCluster, EtcdMember
from slackwater.backends.etcd_stubs import rpc
from slackwater.engine.errors import NoSpace
from slackwater.engine.keys import TRAINER
from slackwater.engine.model import Request
from slackwater.engine.ports import Put, Txn
from slackwater.engine.view import View
from tests.faults import FaultJob, fault_config
from tests.faults_invariants import check_invariants

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

AWAY_SECONDS = 15.0
LAG_STEPS = 40  # of 0.1 s each: longer than a lease, shorter than etcd is away


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members with little space."""
    made = EtcdCluster(tmp_path / "etcd3", members=3, quota_bytes=16 * 1024 * 1024, unsafe_no_fsync=True)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def running(cluster: EtcdCluster, tmp_path: Path, job: str) -> Iterator[FaultJob]:
    """A job at rest with one checkpoint."""
    # A silent member costs every third call its timeout, until the connection is known to be dead: a longer window.
    config = fault_config(job, publish_every_steps=LAG_STEPS, max_lag_steps=LAG_STEPS, window_s=20.0)
    started = FaultJob(tmp_path / "job", job, cluster.endpoints, config)
    try:
        started.start()
        started.checkpoint()
        started.settled()
        yield started
    finally:
        started.close()


def raft_leader(cluster: EtcdCluster) -> EtcdMember:
    """The member that leads."""
    for number in range(3):
        member = cluster.member(number)
        with grpc.insecure_channel(member.endpoint) as channel:
            status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=5)
        if status.leader == status.header.member_id:
            return member
    raise AssertionError("etcd has no leader")


def unharmed(job: FaultJob, before: View) -> None:
    """At rest again on the same timeline and grant, nobody was failed for it, no process was restarted."""
    view = job.settled(60.0)
    assert (view.timeline, view.go) == (before.timeline, before.go)
    assert not [text for text in job.history("verdict") if "failed" in text]
    assert all(process.running() for process in (*job.workers.values(), *job.coordinators.values()))


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.soak)])
def test_leading_member_is_lost(running: FaultJob, cluster: EtcdCluster, kind: str) -> None:
    """The member that leads is gone or silent: the job goes on with the other two, and nobody is failed for it."""
    before = running.view()
    member = raft_leader(cluster)
    member.kill() if kind == "kill" else member.pause()
    assert running.checkpoint() == before.last_checkpoint + 1
    unharmed(running, before)
    member.restart() if kind == "kill" else member.resume()
    assert running.checkpoint() == before.last_checkpoint + 2
    unharmed(running, before)
    check_invariants(running.store, running.keys, running.tier, running.first_revision)


def test_quorum_is_lost_for_a_while(running: FaultJob, cluster: EtcdCluster) -> None:
    """Training goes on up to the lag limit, then stands and says so; nothing is committed; all resumes by itself."""
    before = running.settled()
    running.hold(TRAINER, "sealed")
    wish = running.request(Request(kind="checkpoint"))
    view = running.until(lambda v: v.round is not None and v.round.phase == "seal", "phase seal")
    head = view.mod(running.keys.weight_head)
    running.until(lambda v: v.mod(running.keys.weight_head) > head, "a publication")  # the next one is far
    cluster.member(0).pause()
    cluster.member(1).pause()
    lost = time.monotonic()
    running.hold(TRAINER)
    try:
        while time.monotonic() < lost + AWAY_SECONDS:
            time.sleep(0.2)
        said = running.events(TRAINER)
    finally:
        cluster.member(0).resume()
        cluster.member(1).resume()
    steps = [event for event in said if event["event"] == "step"]
    published = max(e["step"] for e in said if e["event"] == "published" and e["version"])
    print(f"the last step without etcd came {steps[-1]['at'] - lost:.1f} s after it was lost")
    assert steps[-1]["step"] == published + LAG_STEPS
    holds = [event["reason"] for event in said if event["event"] == "hold" and event["at"] > lost]
    assert holds[-1] == f"etcd is away and {LAG_STEPS} steps were done without it"
    running.fate(wish, 90.0)
    unharmed(running, before)
    running.checkpoint()
    check_invariants(running.store, running.keys, running.tier, running.first_revision)


def fill(job: FaultJob) -> None:
    """Write one key over and over until etcd has no room."""
    for _ in range(200):
        try:
            job.store.txn(Txn((), (Put("/fill", bytes(500_000)),)))
        except NoSpace:
            return
    raise AssertionError("etcd does not fill")


def make_room(job: FaultJob, cluster: EtcdCluster) -> int:
    """Compact, defragment and disarm as an operator does; returns the revision that history now begins after."""
    revision = job.store.revision()
    job.store.compact(revision)
    for endpoint in cluster.endpoints:
        with grpc.insecure_channel(endpoint) as channel:
            rpc.MaintenanceStub(channel).Defragment(rpc.DefragmentRequest(), timeout=20)
    with grpc.insecure_channel(cluster.endpoints[0]) as channel:
        stub = rpc.MaintenanceStub(channel)
        for alarm in stub.Alarm(rpc.AlarmRequest(action=0), timeout=5).alarms:
            stub.Alarm(rpc.AlarmRequest(action=2, memberID=alarm.memberID, alarm=1), timeout=5)
    return revision


def test_E7_full_etcd(running: FaultJob, cluster: EtcdCluster) -> None:
    """A commit without room in etcd fails aloud and keeps its files; with room again it goes on without a restart."""
    before = running.settled()
    running.hold(TRAINER, "sealed")
    wish = running.request(Request(kind="checkpoint"))
    view = running.until(lambda v: v.round is not None and v.round.phase == "seal", "phase seal")
    assert view.round is not None
    path = running.tier.root / view.round.path
    fill(running)
    running.hold(TRAINER)
    end = time.monotonic() + 20
    while "over its quota" not in "".join(running.log_text(name) for name in running.coordinators):
        assert time.monotonic() < end, "no coordinator says that etcd is full"
        time.sleep(0.1)
    time.sleep(4.0)
    assert [e for e in running.events(TRAINER, "refused") if e["error"] == "NoSpace"]
    assert running.view().last_checkpoint == before.last_checkpoint
    assert {file.name for file in path.iterdir()} >= {"trainer.bin", "buffer.log", "manifest.json"}
    revision = make_room(running, cluster)
    fate = running.fate(wish, 60.0)
    assert (fate.state, fate.answer) == ("done", f"checkpoint {before.last_checkpoint + 1}")
    unharmed(running, before)
    assert running.checkpoint() == before.last_checkpoint + 2
    running.settled()
    check_invariants(running.store, running.keys, running.tier, revision + 1)
