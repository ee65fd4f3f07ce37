"""The beat as a process, on a real etcd: what it survives, and what it says when its worker is gone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slackwater.adapters.beat import BeatProcess
from slackwater.adapters.ranklink import RankLink
from slackwater.adapters.stores import open_objects, open_store
from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.engine.action import put
from slackwater.engine.config import JobConfig, Site, Timers
from slackwater.engine.errors import AuthFailed, ConfigError, NotFound, SlotOccupied, Unavailable
from slackwater.engine.keys import Keys
from slackwater.engine.membership import Membership
from slackwater.engine.model import Alive, Participant, Timeline, decode
from slackwater.engine.ports import StateStore, Txn

pytestmark = pytest.mark.real

LEASE_S = 3

# A worker in a process of its own: argv is etcd's address, job, and optionally the rank link as JSON.
WORKER = """
import sys, time, json, msgspec
from slackwater.adapters.beat import BeatProcess
from slackwater.adapters.ranklink import RankLink
from slackwater.adapters.stores import open_store
from slackwater.engine.config import JobConfig, Site, Timers
from slackwater.engine.keys import Keys
from slackwater.engine.membership import Membership
from slackwater.engine.model import Alive, Participant
site = Site(etcd=(sys.argv[1],))
config = JobConfig(job=sys.argv[2], timers=Timers(heartbeat_s=1.0, lease_s=3))
link = msgspec.json.decode(sys.argv[3], type=RankLink) if len(sys.argv) > 3 else None
beat = BeatProcess(site, config, "trainer", link=link)
if link is None or link.rank == 0:
    member = Membership(open_store(site), Keys(config.job), Participant(name="trainer", role="trainer", incarnation="",
                        timeline=0), beat)
    member.join(Alive(incarnation="", state="training"))
else:
    beat.open()
print(json.dumps({"beat": beat.pid, "port": beat.link_port}), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "alive":
        print(json.dumps({"alive": beat.alive(), "lost": beat.lost}), flush=True)
    elif word == "busy":
        while True: beat.tick()
    elif word == "fork":
        import os
        pid = os.fork()
        if pid == 0:
            time.sleep(60); os._exit(0)
        print(json.dumps({"child": pid}), flush=True)
    elif word == "close":
        beat.close(); break
    elif word == "crash":
        raise RuntimeError("a bug")
"""


class Worker:
    """Such a process, driven by lines."""

    def __init__(self, etcd: EtcdCluster, job: str, link: RankLink | None = None) -> None:
        import msgspec

        argv = [sys.executable, "-c", WORKER, etcd.endpoints[0], job]
        if link is not None:
            argv.append(msgspec.json.encode(link).decode())
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        hello = self.read()
        self.beat, self.port = int(hello["beat"]), int(hello["port"])

    def read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self, word: str) -> dict[str, object]:
        self.say(word)
        return self.read()

    def end(self) -> None:
        for pid in (self.process.pid, self.beat):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(timeout=10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        until(lambda: not exists(self.beat), 10, "the beat ends with its worker")


def exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for it; returns how long it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - begin


@pytest.fixture
def keys(store: StateStore, job: str) -> Keys:
    """A job with a timeline."""
    found = Keys(job)
    store.txn(Txn((), (put(found.timeline, Timeline(timeline=1)),)))
    return found


@pytest.fixture
def make(etcd: EtcdCluster, job: str, keys: Keys) -> Iterator[Callable[..., Worker]]:
    """Starts workers, and ends them."""
    made: list[Worker] = []

    def start(link: RankLink | None = None) -> Worker:
        made.append(Worker(etcd, job, link))
        return made[-1]

    yield start
    for worker in made:
        worker.end()


@pytest.fixture
def beat(etcd: EtcdCluster, job: str) -> Iterator[BeatProcess]:
    """A beat of this process."""
    made = BeatProcess(site(etcd), config(job), "trainer")
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.kill(made.pid, signal.SIGCONT)
    made.close()


def site(etcd: EtcdCluster) -> Site:
    return Site(etcd=tuple(etcd.endpoints))


def config(job: str) -> JobConfig:
    return JobConfig(job=job, timers=Timers(heartbeat_s=1.0, lease_s=LEASE_S))


def member_of(store: StateStore, keys: Keys, beat: BeatProcess) -> Membership:
    template = Participant(name="trainer", role="trainer", incarnation="", timeline=0)
    return Membership(store, keys, template, beat)


def participant(store: StateStore, keys: Keys) -> Participant:
    kv = store.get(keys.participant("trainer"))
    assert kv is not None
    return decode(Participant, kv.value)


def alive_key(store: StateStore, keys: Keys) -> Alive | None:
    kv = store.get(keys.alive("trainer"))
    return decode(Alive, kv.value) if kv is not None else None


def test_it_starts_at_once_and_keeps_the_lease(beat: BeatProcess, store: StateStore, keys: Keys) -> None:
    """A lease within 2 s (start included), alive beyond its TTL, reports and progress in etcd, a clean end."""
    member = member_of(store, keys, beat)
    begin = time.monotonic()
    member.join(Alive(incarnation="", state="idle"))
    assert time.monotonic() - begin < 2.0
    first = member.alive_create
    assert first == member.registration_mod
    member.report(Alive(incarnation="", state="training", training_step=7))

    def reported() -> bool:
        found = alive_key(store, keys)
        return found is not None and found.training_step == 7

    until(reported, 1.5, "the report")
    end = time.monotonic() + LEASE_S + 1
    while time.monotonic() < end:
        beat.tick()
        assert beat.alive()
        time.sleep(0.05)
    assert member.alive_create == first
    found = alive_key(store, keys)
    assert found is not None
    assert found.progress > 0
    assert member.end("left")
    beat.close()
    assert not beat.alive()
    assert participant(store, keys).ended == "left"
    assert alive_key(store, keys) is None


def test_a_held_gil_does_not_cost_the_lease(beat: BeatProcess, store: StateStore, keys: Keys) -> None:
    """20 s inside a C function that keeps the GIL, with a lease of 3 s: alive right after it."""
    member = member_of(store, keys, beat)
    member.join(Alive(incarnation=""))
    create = member.alive_create
    assert ctypes.PyDLL(None).usleep(20_000_000) == 0
    assert beat.alive()
    assert not beat.lost
    assert member.alive_create == create
    kv = store.get(keys.alive("trainer"))
    assert kv is not None
    assert kv.create_revision == create


@pytest.mark.parametrize("how", ["SIGKILL", "crash"])
def test_a_worker_that_dies_leaves_evidence_within_a_second(
    make: Callable[..., Worker], store: StateStore, keys: Keys, how: str
) -> None:
    """The registration ends as "exited" and the liveness key is gone; the beat ends too."""
    worker = make()
    assert alive_key(store, keys) is not None
    if how == "crash":
        worker.say("crash")
        worker.process.wait(timeout=10)
    else:
        worker.process.kill()
    until(lambda: participant(store, keys).ended == "exited", 1.0, "the evidence")
    assert alive_key(store, keys) is None
    until(lambda: not exists(worker.beat), 2.0, "the beat's end")


def test_a_forked_child_of_the_worker_does_not_hide_its_death(
    make: Callable[..., Worker], store: StateStore, keys: Keys
) -> None:
    """The child still holds the pipe to the beat; the evidence comes all the same."""
    worker = make()
    child = int(str(worker.ask("fork")["child"]))
    try:
        worker.process.kill()
        until(lambda: participant(store, keys).ended == "exited", 1.0, "the evidence")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stop_of_worker_and_beat_forbids_effects_afterwards(
    beat: BeatProcess, store: StateStore, keys: Keys
) -> None:
    """The lease expires in etcd; the deadline, not a message, tells the worker; then the same life comes back."""
    member = member_of(store, keys, beat)
    member.join(Alive(incarnation=""))
    create = member.alive_create
    os.kill(beat.pid, signal.SIGSTOP)
    until(lambda: alive_key(store, keys) is None, 2 * LEASE_S + 2, "the lease expires")
    assert not beat.alive()
    os.kill(beat.pid, signal.SIGCONT)
    until(lambda: member.alive_create > create, 2 * LEASE_S, "the same life has a new key")
    assert beat.alive()
    assert not beat.lost


def test_a_stopped_worker_is_not_alive_when_it_wakes_up_late(
    make: Callable[..., Worker], store: StateStore, keys: Keys
) -> None:
    """Both stopped beyond the lease: the worker alone awake sees at once that it must not act."""
    worker = make()
    for pid in (worker.process.pid, worker.beat):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: alive_key(store, keys) is None, 2 * LEASE_S + 2, "the lease expires")
    os.kill(worker.process.pid, signal.SIGCONT)
    assert worker.ask("alive")["alive"] is False


def test_a_worker_stopped_alone_keeps_its_lease_without_progress(
    make: Callable[..., Worker], store: StateStore, keys: Keys
) -> None:
    """The beat cannot hide a hang: the key stays, its progress stands still."""
    worker = make()
    worker.say("busy")

    def progress() -> int:
        found = alive_key(store, keys)
        assert found is not None
        return found.progress

    until(lambda: progress() > 0, 3 * LEASE_S, "progress")
    os.kill(worker.process.pid, signal.SIGSTOP)
    time.sleep(3.5)  # the beats still carry what was counted before
    stood = progress()
    time.sleep(LEASE_S + 1)
    assert progress() == stood


def test_a_dead_beat_is_noticed_and_a_new_life_begins(
    beat: BeatProcess, store: StateStore, keys: Keys
) -> None:
    """`lost` says so, `alive` is false by the deadline, `open` starts another process for a new incarnation."""
    member = member_of(store, keys, beat)
    member.join(Alive(incarnation=""))
    first, old = member.incarnation, beat.pid
    os.kill(old, signal.SIGKILL)
    until(lambda: "beat process" in beat.lost, 1.0, "the loss")
    until(lambda: not beat.alive(), LEASE_S, "no effects")

    def joined() -> bool:
        try:
            member.join(Alive(incarnation=""))
        except SlotOccupied:
            return False
        return True

    until(joined, 2 * LEASE_S + 2, "the old key expires")
    assert beat.pid != old
    assert member.incarnation != first
    assert beat.alive()
    assert not beat.lost


def test_a_new_life_frees_the_old_ones_slot(beat: BeatProcess, store: StateStore, keys: Keys) -> None:
    """After a verdict the same process joins again at once: the old lease is revoked."""
    member = member_of(store, keys, beat)
    member.join(Alive(incarnation=""))
    first, lease = member.incarnation, beat.lease
    member.join(Alive(incarnation=""))
    assert member.incarnation != first
    assert beat.lease != lease
    assert beat.alive()
    until(lambda: member.alive_create == member.registration_mod, 1.0, "the beat has taken it up")


def test_an_etcd_that_is_not_there_is_one_clear_error(job: str, free_port: int) -> None:
    """`open` raises what the store said, and the process can be closed."""
    with (
        BeatProcess(Site(etcd=(f"127.0.0.1:{free_port}",)), config(job), "trainer") as beat,
        pytest.raises(Unavailable, match="trainer"),
    ):
        beat.open()


def test_a_rank_that_exits_is_named_by_rank_0s_beat(
    make: Callable[..., Worker], store: StateStore, keys: Keys
) -> None:
    """SIGKILL of rank 1's worker ends the trainer's registration, with rank and host; rank 0 learns it as well."""
    zero = make(RankLink(host="127.0.0.1", port=0, token="t", rank=0))
    one = make(RankLink(host="127.0.0.1", port=zero.port, token="t", rank=1, host_name="node-b"))
    assert one.ask("alive") == {"alive": True, "lost": ""}
    one.process.kill()
    until(lambda: participant(store, keys).ended == "exited", 1.0, "the evidence")
    assert "rank 1 on host node-b exited" in participant(store, keys).reason
    answer = zero.ask("alive")
    assert answer["alive"] is False
    assert "rank 1" in str(answer["lost"])


def test_a_beat_that_is_killed_on_another_rank_is_evidence_after_the_grace(
    make: Callable[..., Worker], store: StateStore, keys: Keys
) -> None:
    """Its link closes without a goodbye and does not come back; a rank that says goodbye is no evidence."""
    zero = make(RankLink(host="127.0.0.1", port=0, token="t", rank=0, grace_seconds=1.0))
    one = make(RankLink(host="127.0.0.1", port=zero.port, token="t", rank=1))
    two = make(RankLink(host="127.0.0.1", port=zero.port, token="t", rank=2))
    one.say("close")
    one.process.wait(timeout=10)
    time.sleep(1.5)
    assert participant(store, keys).ended == ""
    os.kill(two.beat, signal.SIGKILL)
    until(lambda: participant(store, keys).ended == "exited", 3.0, "the evidence")
    assert "rank 2" in participant(store, keys).reason


def test_rank_0s_end_is_told_to_the_others_and_strangers_are_ignored(
    make: Callable[..., Worker], etcd: EtcdCluster, job: str, keys: Keys
) -> None:
    """Another token does not join; after rank 0's death the other ranks' lives are over."""
    zero = make(RankLink(host="127.0.0.1", port=0, token="t", rank=0))
    one = make(RankLink(host="127.0.0.1", port=zero.port, token="t", rank=1))
    stranger = RankLink(host="127.0.0.1", port=zero.port, token="other", rank=2, join_seconds=1.0)
    with (
        BeatProcess(site(etcd), config(job), "trainer", link=stranger) as beat,
        pytest.raises(Unavailable, match=r"rank 0|link"),
    ):
        beat.open()
    zero.process.kill()
    until(lambda: one.ask("alive")["alive"] is False, 2.0, "the others know")


def test_stores_say_in_one_line_what_is_wrong(
    etcd: EtcdCluster, s3: S3Server, free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unreachable, without a password, wrong keys, a missing bucket: each is its own error naming the place."""
    open_store(site(etcd)).close()
    with pytest.raises(Unavailable, match=rf"etcd at 127.0.0.1:{free_port} does not answer"):
        open_store(Site(etcd=(f"127.0.0.1:{free_port}",)), call_timeout_seconds=1.0)
    monkeypatch.delenv("SLACKWATER_ETCD_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="SLACKWATER_ETCD_PASSWORD"):
        open_store(Site(etcd=tuple(etcd.endpoints), etcd_user="root"))
    with pytest.raises(ConfigError, match="etcd_password_file"):
        open_store(
            Site(etcd=tuple(etcd.endpoints), etcd_user="root", etcd_password_file=str(tmp_path / "none"))
        )
    assert open_objects(Site()) is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    opened = open_objects(Site(s3_bucket=s3.bucket, s3_endpoint=s3.url, s3_prefix="stores"))
    assert opened is not None
    opened.close()
    with pytest.raises((NotFound, AuthFailed), match="bucket 'none-such' at http"):
        open_objects(Site(s3_bucket="none-such", s3_endpoint=s3.url))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AuthFailed, match=f"bucket '{s3.bucket}' at http"):
        open_objects(Site(s3_bucket=s3.bucket, s3_endpoint=s3.url))
