"""Election: at most one leader takes effect."""

from __future__ import annotations

import threading

import pytest

from slackwater.backends.etcd import EtcdStore
from slackwater.backends.memory import MemoryStore
from slackwater.engine.election import Candidate
from slackwater.engine.errors import LeaseLost, Unavailable
from slackwater.engine.ports import Delete, Put, Txn, TxnResult
from slackwater.engine.session import Session, SessionKeeper

from .test_session import Clock

PREFIX = "/slackwater/j/leader/"


class LossyStore(MemoryStore):
    """A store that loses the answer to a transaction, after or instead of applying it."""

    lose = ""

    def txn(self, txn: Txn) -> TxnResult:
        mode, self.lose = self.lose, ""
        if mode == "request":
            raise Unavailable("request lost")
        result = super().txn(txn)
        if mode == "reply":
            raise Unavailable("reply lost")
        return result


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lossy(clock: Clock) -> LossyStore:
    return LossyStore(clock)


def candidate(store: MemoryStore, clock: Clock, name: str) -> tuple[Candidate, Session]:
    session = Session(store, 15, clock=clock, pause=clock.advance)
    session.open()
    return Candidate(store, PREFIX, session, {"id": name}), session


def test_first_candidate_leads_and_the_next_takes_over(lossy: LossyStore, clock: Clock) -> None:
    """The lowest create-revision leads; when its lease goes, the next one does, with a higher epoch."""
    (first, first_session), (second, second_session) = (
        candidate(lossy, clock, "a"),
        candidate(lossy, clock, "b"),
    )
    assert first.campaign()
    assert not second.campaign()
    assert second.leader is not None
    assert second.leader.key == first.key
    assert first.key == f"{PREFIX}{first_session.lease:016x}"
    kv = lossy.get(first.key)
    assert kv is not None
    assert first.epoch == kv.create_revision
    assert kv.value == b'{"id":"a"}'
    clock.advance(8)
    second_session.renew()
    clock.advance(8)
    assert not first.leading
    assert second.campaign()
    assert second.epoch > first.epoch


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_unknown_outcome_is_read_back(lossy: LossyStore, clock: Clock, lost: str) -> None:
    """A lost request or reply leaves one key and the right epoch, never a second candidacy."""
    mine, _ = candidate(lossy, clock, "a")
    lossy.lose = lost
    if lost == "request":
        with pytest.raises(Unavailable):
            mine.campaign()
    assert mine.campaign()
    kvs = lossy.range(PREFIX).kvs
    assert len(kvs) == 1
    assert mine.epoch == kvs[0].create_revision


def test_E3_write_of_an_old_leader_is_refused(lossy: LossyStore, clock: Clock) -> None:
    """An old leader that does not know yet is refused by the store: commit, move and delete alike."""
    (old, _), (new, new_session) = candidate(lossy, clock, "old"), candidate(lossy, clock, "new")
    assert old.campaign()
    new.campaign()
    clock.advance(8)
    new_session.renew()
    guard = old.guard()
    clock.advance(8)  # the old leader stands still here and never looks at its clock
    assert new.campaign()
    assert lossy.txn(Txn((new.guard(),), (Put("/latest", b"21"),))).succeeded
    for op in (Put("/latest", b"20"), Put("/checkpoints/20", b""), Delete("/latest")):
        assert not lossy.txn(Txn((guard,), (op,))).succeeded
    kv = lossy.get("/latest")
    assert kv is not None
    assert kv.value == b"21"
    with pytest.raises(LeaseLost):
        old.campaign()


def test_guard_of_a_non_candidate_never_holds(lossy: LossyStore, clock: Clock) -> None:
    """Before the first campaign and after resigning nothing can be written in a leader's name."""
    mine, session = candidate(lossy, clock, "a")
    assert not lossy.txn(Txn((mine.guard(),), (Put("/x", b""),))).succeeded
    mine.campaign()
    held = mine.guard()
    mine.resign()
    assert not mine.leading
    for guard in (held, mine.guard()):
        assert not lossy.txn(Txn((guard,), (Put("/x", b""),))).succeeded
    assert session.alive()


def test_deleted_key_ends_leadership(lossy: LossyStore, clock: Clock) -> None:
    """An operator who deletes the leader's key deposes it; it comes back as the youngest candidate."""
    (first, _), (second, _) = candidate(lossy, clock, "a"), candidate(lossy, clock, "b")
    first.campaign()
    second.campaign()
    lossy.txn(Txn((), (Delete(first.key),)))
    assert not first.campaign()
    assert second.campaign()
    assert not first.campaign()
    assert first.epoch > second.epoch


def test_lost_lease_ends_the_session(lossy: LossyStore, clock: Clock) -> None:
    """A candidacy on a lease that the store has dropped is a loss that the session announces."""
    mine, session = candidate(lossy, clock, "a")
    lossy.revoke(session.lease)
    with pytest.raises(LeaseLost):
        mine.campaign()
    assert not session.alive()


def test_one_leader_at_a_time_on_etcd(store: EtcdStore, job: str) -> None:
    """Five candidates resign in turn on a real etcd: always exactly one leads, and epochs only grow."""
    prefix = f"/slackwater/{job}/leader/"
    sessions = [Session(store, 5) for _ in range(5)]
    keepers = [SessionKeeper(session) for session in sessions]
    for session, keeper in zip(sessions, keepers, strict=True):
        session.open()
        keeper.start()
    standing = [Candidate(store, prefix, session, {"n": n}) for n, session in enumerate(sessions)]
    threads = [threading.Thread(target=one.campaign) for one in standing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epochs = []
    while standing:
        leaders = [one for one in standing if one.campaign()]
        assert len(leaders) == 1
        epochs.append(leaders[0].epoch)
        leaders[0].resign()
        standing.remove(leaders[0])
    assert epochs == sorted(epochs)
    assert len(epochs) == 5
    for session, keeper in zip(sessions, keepers, strict=True):
        keeper.stop()
        session.close()
