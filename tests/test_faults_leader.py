"""The leading coordinator is killed or stopped in each phase of a round and of a recovery, on three etcd members."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.engine.keys import BUFFER, TRAINER
from slackwater.engine.model import Request
from slackwater.engine.view import View
from tests.faults import LEASE_S, FaultJob
from tests.faults_invariants import check_invariants

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members for all tests of this file."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd3"), members=3, unsafe_no_fsync=True)
    cluster.start()
    yield cluster
    cluster.kill()


_JOBS: dict[str, FaultJob] = {}


@pytest.fixture
def running(
    members: EtcdCluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[FaultJob]:
    """A job at rest with two coordinators and a checkpoint; the same one for all tests, until one of them fails."""
    job = _JOBS.get("job")
    if job is None:
        name = f"job-{uuid.uuid4().hex[:8]}"
        job = FaultJob(tmp_path_factory.mktemp("job"), name, members.endpoints)
        _JOBS["job"] = job
        job.start()
        job.checkpoint()
    job.settled()
    del _JOBS["job"]  # until this test is through
    try:
        yield job
        job.settled()
        check_invariants(job.store, job.keys, job.tier, job.first_revision)
        _JOBS["job"] = job
    finally:
        if "job" not in _JOBS:
            job.close()


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    for job in _JOBS.values():
        job.close()
    _JOBS.clear()


# Who must be held so that the job stays in a phase of a round.
ROUND = {"prepare": (TRAINER, "cut"), "ready": ("rollout-0", "ready"), "save": (BUFFER, "saved")}
ROUND |= {"seal": (TRAINER, "sealed")}
# … and in a phase of a recovery. Selection takes no time but where a restore failed and waits for its second attempt.
RECOVERY = {"fence": (TRAINER, "fence"), "select": (TRAINER, "restore_failed")}
RECOVERY |= {"restore": (TRAINER, "restore"), "resync": ("rollout-0", "route")}
RECOVERY |= {"freshness": (BUFFER, "freshness")}


def cases(phases: dict[str, tuple[str, str]], killed_in_soak: tuple[str, ...]) -> list[object]:
    """Each phase with a leader that is killed and one that is stopped; some of the kills are left for the soak."""
    found = []
    for phase in phases:
        marks = [pytest.mark.soak] if phase in killed_in_soak else []
        found += [pytest.param(phase, "kill", marks=marks), pytest.param(phase, "stop")]
    return found


def strike(job: FaultJob, kind: str, hold: tuple[str, str]) -> None:
    """Kill or stop the leader, let the phase go on once another one leads, and wake the stopped one up."""
    epoch, name = job.leader()
    process = job.coordinators[name]
    struck = time.monotonic()
    process.signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    view = job.until(lambda v: job.leader(v)[1] not in ("", name), "another leader")
    took = time.monotonic() - struck
    print(f"{kind}: another leader after {took:.1f} s with a lease of {LEASE_S} s")
    assert job.leader(view)[0] > epoch
    assert took < 2 * LEASE_S + 1  # lease + 1 s, and a lease for a machine that is busy
    if hold[1] != "restore_failed":
        job.hold(hold[0])


def wake(job: FaultJob, kind: str, name: str) -> None:
    """The old leader is back as a candidate, the younger one."""
    if kind == "kill":
        job.coordinators[name].kill()
        job.coordinator(name)
    else:
        job.coordinators[name].signal(signal.SIGCONT)
    view = job.until(lambda v: len(job.candidates(v)) == 2, "two candidates again", 60.0)
    assert job.leader(view)[1] != name


def phase_of(view: View) -> str:
    """The phase of what is open."""
    if view.recovery is not None:
        return view.recovery.phase
    return view.round.phase if view.round is not None else ""


@pytest.mark.parametrize(("phase", "kind"), cases(ROUND, ("prepare", "save")))
def test_leader_lost_in_a_round(running: FaultJob, phase: str, kind: str) -> None:
    """The next leader finishes the very round; the old one, woken up, changes nothing; nobody was failed for it."""
    before, verdicts = running.view(), len(running.history("verdict"))
    _, name = running.leader()
    running.hold(*ROUND[phase])
    wish = running.request(Request(kind="checkpoint"))
    running.until(lambda v: phase_of(v) == phase, f"phase {phase}")
    strike(running, kind, ROUND[phase])
    fate = running.fate(wish)
    assert (fate.state, fate.answer) == ("done", f"checkpoint {before.last_checkpoint + 1}")
    wake(running, kind, name)
    view = running.settled()
    assert view.last_checkpoint == before.last_checkpoint + 1
    assert view.timeline == before.timeline
    assert running.history("verdict")[verdicts:] == []


@pytest.mark.parametrize(("phase", "kind"), cases(RECOVERY, ("fence", "restore", "resync")))
def test_leader_lost_in_a_recovery(running: FaultJob, phase: str, kind: str) -> None:
    """The next leader goes on with the recovery where it was, and it ends in the state of the checkpoint."""
    before = running.view()
    target = before.checkpoints()[before.last_checkpoint]
    _, name = running.leader()
    running.hold(*RECOVERY[phase])
    wish = running.request(Request(kind="rollback", checkpoint=target.checkpoint))
    running.until(lambda v: phase_of(v) == phase and (phase != "select" or v.recovery.attempts), phase)
    strike(running, kind, RECOVERY[phase])
    fate = running.fate(wish)
    assert fate.state == "done", fate
    wake(running, kind, name)
    view = running.settled()
    assert view.timeline == before.timeline + 1
    assert view.go is not None
    assert view.go.from_step == target.training_step
    restored = running.events(TRAINER, "restored")[-1]
    assert (restored["checkpoint"], restored["step"]) == (target.checkpoint, target.training_step)
