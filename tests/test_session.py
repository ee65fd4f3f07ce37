"""Sessions: when a holder may act, and when it must have stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.memory import MemoryStore
from slackwater.engine.errors import ConfigError, LeaseLost, Unavailable
from slackwater.engine.ports import Put, Txn
from slackwater.engine.session import Session, SessionKeeper


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FlakyStore(MemoryStore):
    """A store whose renewals fail or take time, as told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.faults: list[Callable[[], None]] = []
        self.calls = 0

    def keep_alive(self, lease: int) -> float:
        self.calls += 1
        if self.faults:
            self.faults.pop(0)()
        return super().keep_alive(lease)


def unavailable() -> None:
    raise Unavailable("lost on the way")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flaky(clock: Clock) -> FlakyStore:
    return FlakyStore(clock)


@pytest.fixture
def session(flaky: FlakyStore, clock: Clock) -> Session:
    opened = Session(flaky, 15, clock=clock, pause=clock.advance)
    opened.open()
    return opened


def test_deadline_counts_from_when_the_renewal_was_sent(
    session: Session, flaky: FlakyStore, clock: Clock
) -> None:
    """A slow answer does not lengthen the lease."""
    flaky.faults = [lambda: clock.advance(4)]
    clock.advance(5)
    sent = clock.now
    session.renew()
    assert clock.now == sent + 4
    assert session.deadline == sent + 15


def test_alive_ends_a_margin_before_the_deadline(session: Session, clock: Clock) -> None:
    """The holder stops before the server can have expired the lease."""
    clock.advance(13.4)
    assert session.alive()
    clock.advance(0.2)
    assert not session.alive()
    assert clock.now < session.deadline
    with pytest.raises(LeaseLost):
        session.check()


def test_E1_transient_faults_are_retried(session: Session, flaky: FlakyStore, clock: Clock) -> None:
    """A reset and a timeout do not end a session that can still be renewed in time."""
    flaky.faults = [unavailable, unavailable, unavailable]
    clock.advance(5)
    session.renew()
    assert flaky.calls == 4
    assert session.alive()
    assert session.deadline > clock.now + 14


def test_E1_unreachable_store_ends_the_session_before_the_lease(
    session: Session, flaky: FlakyStore, clock: Clock
) -> None:
    """Retries stop at the local deadline, and the loss is announced while the lease still exists."""
    told: list[tuple[str, float]] = []
    session.on_lost(lambda reason: told.append((reason, clock.now)))
    lease_end = session.deadline
    flaky.faults = [unavailable] * 10_000
    with pytest.raises(LeaseLost):
        session.renew()
    assert len(told) == 1
    assert told[0][1] < lease_end
    assert flaky.next_expiry() == lease_end


def test_lost_lease_is_never_replaced(session: Session, flaky: FlakyStore) -> None:
    """TTL 0 means lost for good: one signal, no new lease, every later renewal refused."""
    told: list[str] = []
    session.on_lost(told.append)
    lease = session.lease
    flaky.revoke(lease)
    for _ in range(3):
        with pytest.raises(LeaseLost):
            session.renew()
    with pytest.raises(LeaseLost):
        session.open()
    assert session.lease == lease
    assert not session.alive()
    assert len(told) == 1
    late: list[str] = []
    session.on_lost(late.append)
    assert late == told


def test_old_answer_after_a_pause_does_not_revive(clock: Clock) -> None:
    """A process that stood still while its renewal was on the way counts from when it was sent."""

    class Buffered(MemoryStore):
        def keep_alive(self, lease: int) -> float:
            answer = super().keep_alive(lease)
            clock.advance(60)  # the process stands still; the answer waits in its socket
            return answer

    session = Session(Buffered(clock), 15, clock=clock, pause=clock.advance)
    session.open()
    with pytest.raises(LeaseLost):
        session.renew()
    assert not session.alive()


def test_dead_for_ever_once_seen_dead(session: Session, flaky: FlakyStore, clock: Clock) -> None:
    """Who was told to stop once is not told to go on by a renewal that was on its way."""
    clock.advance(13.6)
    assert not session.alive()
    assert flaky.keep_alive(session.lease) == 15.0
    clock.now -= 10  # not even a clock that goes back
    assert not session.alive()


def test_close_revokes_and_fires_nothing(session: Session, flaky: FlakyStore) -> None:
    """An orderly end is no loss, and the keys go at once."""
    told: list[str] = []
    session.on_lost(told.append)
    flaky.txn(Txn((), (Put("/a", b"", session.lease),)))
    session.close()
    session.close()
    assert flaky.get("/a") is None
    assert not session.alive()
    assert told == []
    assert not session.wait_lost(0)


def test_close_gives_up_after_one_ttl(session: Session, flaky: FlakyStore, clock: Clock) -> None:
    """With the store away, closing takes no longer than the lease would live."""
    flaky.close()
    start = clock.now
    session.close()
    assert 15 <= clock.now - start < 16


@pytest.mark.parametrize(("ttl", "margin"), [(0, None), (3, 2.0), (3, 5.0), (3, -1.0)])
def test_impossible_timers_are_refused(clock: Clock, ttl: int, margin: float | None) -> None:
    """A margin that leaves no time for one beat is a configuration error."""
    with pytest.raises(ConfigError):
        Session(MemoryStore(clock), ttl, clock=clock, margin_seconds=margin)


@pytest.mark.real
def test_keeper_keeps_and_stops(store: EtcdStore, job: str) -> None:
    """A session of 2 s lives on for longer than its TTL, and its keeper ends on request."""
    session = Session(store, 2)
    session.open()
    key = f"/slackwater/{job}/alive"
    store.txn(Txn((), (Put(key, b"", session.lease),)))
    keeper = SessionKeeper(session)
    keeper.start()
    assert not session.wait_lost(4)
    assert store.get(key) is not None
    keeper.stop()
    assert not keeper.running
    session.close()
    assert store.get(key) is None


def test_E1_loss_is_noticed_without_the_renewing_thread() -> None:
    """When the thread is dead, the holder's own clock still ends the session, in time."""
    session = Session(MemoryStore(), 1)
    start = time.monotonic()
    session.open()
    assert session.wait_lost(5)
    assert time.monotonic() - start < 1.0
    assert not session.alive()


def test_keeper_that_fails_ends_the_session() -> None:
    """A renewing thread that dies of anything says so to the holder."""

    class Broken(MemoryStore):
        def keep_alive(self, lease: int) -> float:
            raise MemoryError("no memory for a reply")

    session = Session(Broken(), 3)
    session.open()
    keeper = SessionKeeper(session)
    seen = threading.Event()
    session.on_lost(lambda _: seen.set())
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        keeper.start()
        assert seen.wait(2.5)
        keeper.stop()
    finally:
        threading.excepthook = hook
    assert "MemoryError" in session.reason


_HOLDER = """
import sys, time
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.session import Session, SessionKeeper
session = Session(EtcdStore([sys.argv[1]], call_timeout_seconds=1), 2)
session.open()
keeper = SessionKeeper(session)
keeper.start()
print("open", flush=True)
sys.stdin.readline()
print("alive" if session.alive() else "dead", flush=True)
print("dead" if session.wait_lost(3) else "alive", flush=True)
"""


@pytest.mark.real
def test_E3_stopped_process_finds_its_session_dead(etcd: EtcdCluster) -> None:
    """After a SIGSTOP longer than the TTL the first look says dead, whatever is buffered in the sockets."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, etcd.endpoints[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "open\n"
        os.kill(process.pid, signal.SIGSTOP)
        threading.Event().wait(3.5)
        process.stdin.write("\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "dead\n"
        assert process.stdout.readline() == "dead\n"
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.communicate()


def test_E4_wall_clock_plays_no_part(session: Session, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by an hour each way; the session neither ends nor lasts longer."""
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda offset=jump: 1_700_000_000.0 + offset)
        clock.advance(5)
        session.renew()
        assert session.alive()
    clock.advance(13.6)
    assert not session.alive()
