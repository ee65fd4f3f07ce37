"""The beat as an object: leases, the liveness key, coming back, and the word that a life is over."""

from __future__ import annotations

import os

import msgspec
import pytest

from slackwater.adapters.beatboard import BeatNow, Board, Wanted, create_board
from slackwater.backends.memory import MemoryStore
from slackwater.engine.action import put
from slackwater.engine.beat import Beat
from slackwater.engine.errors import Unavailable
from slackwater.engine.keys import Keys
from slackwater.engine.model import Alive, Health, Participant, Route, Timeline, decode
from slackwater.engine.ports import KV, Compare, Delete, Txn, TxnResult

KEYS = Keys("job")
TTL = 15


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Away:
    """A store that can be out of reach, and can lose the reply of one transaction."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.away = False
        self.lose_reply = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("away")

    def get(self, key: str) -> KV | None:
        self._check()
        return self.store.get(key)

    def grant(self, ttl_seconds: int) -> int:
        self._check()
        return self.store.grant(ttl_seconds)

    def keep_alive(self, lease: int) -> float:
        self._check()
        return self.store.keep_alive(lease)

    def txn(self, txn: Txn) -> TxnResult:
        self._check()
        result = self.store.txn(txn)
        if self.lose_reply:
            self.lose_reply = False
            raise Unavailable("the reply was lost")
        return result


class Rig:
    """A registered trainer with its beat on a store in memory."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Away(MemoryStore(self.clock))
        self.beat = Beat(self.store, KEYS, "trainer", TTL, clock=self.clock, pause=self.clock.wait)  # type: ignore[arg-type]
        timeline = self.write(put(KEYS.timeline, Timeline(timeline=1)))
        self.alive = Alive(incarnation="a1", state="training")
        self.record = Participant(name="trainer", role="trainer", incarnation="a1", timeline=1)
        lease = self.beat.open()
        mod = self.write(
            put(KEYS.participant("trainer"), self.record), put(KEYS.alive("trainer"), self.alive, lease)
        )
        self.beat.adopt(timeline, mod, mod, self.alive)
        self.registration = mod

    def write(self, *ops: object) -> int:
        result = self.store.store.txn(Txn((), ops))  # type: ignore[arg-type]
        return result.revision

    def key(self) -> Alive | None:
        kv = self.store.store.get(KEYS.alive("trainer"))
        return decode(Alive, kv.value) if kv is not None else None

    def participant(self) -> Participant:
        kv = self.store.store.get(KEYS.participant("trainer"))
        assert kv is not None
        return decode(Participant, kv.value)

    def lose_lease(self) -> None:
        self.clock.wait(TTL + 1)
        self.store.store.revoke(self.beat.state.lease)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_deadline_counts_from_the_sent_renewal(rig: Rig) -> None:
    """It lies a margin before the TTL after the renewal was sent."""
    rig.clock.wait(5)
    state = rig.beat.pump(rig.alive)
    assert state.deadline == pytest.approx(rig.clock.now + TTL * 0.9)
    assert state.alive_create == rig.registration


def test_the_key_is_rewritten_only_on_change_and_progress_every_third_beat(rig: Rig) -> None:
    """An unchanged report writes nothing; progress alone waits for the third beat; a new state does not."""
    versions = []
    for progress in range(1, 7):
        rig.clock.wait(5)
        rig.beat.pump(msgspec.structs.replace(rig.alive, progress=progress))
        kv = rig.store.store.get(KEYS.alive("trainer"))
        assert kv is not None
        versions.append(kv.version)
    assert versions == [1, 1, 2, 2, 2, 3]
    rig.beat.pump(msgspec.structs.replace(rig.alive, progress=6, state="saving"))
    found = rig.key()
    assert found is not None
    assert found.state == "saving"


def test_the_same_life_comes_back_after_a_lost_lease(rig: Rig) -> None:
    """Registration and timeline unchanged: a new lease, a new liveness key, the same incarnation."""
    old = rig.beat.state.lease
    rig.lose_lease()
    assert rig.key() is None
    state = rig.beat.pump(rig.alive)
    assert not state.lost
    assert state.lease != old
    assert state.alive_create > rig.registration
    assert state.deadline > rig.clock.now
    assert rig.key() == rig.alive


@pytest.mark.parametrize("what", ["timeline", "registration", "failed", "ended"])
def test_a_life_that_was_judged_meanwhile_does_not_come_back(rig: Rig, what: str) -> None:
    """A recovery, another incarnation, the verdict `failed` or an ended registration: lost, and no key."""
    rig.lose_lease()
    other = msgspec.structs.replace(rig.record, incarnation="b2")
    rig.write(
        {
            "timeline": put(KEYS.timeline, Timeline(timeline=2)),
            "registration": put(KEYS.participant("trainer"), other),
            "failed": put(KEYS.health("trainer"), Health(incarnation="a1", state="failed")),
            "ended": put(KEYS.participant("trainer"), msgspec.structs.replace(rig.record, ended="exited")),
        }[what]
    )
    state = rig.beat.pump(rig.alive)
    assert state.lost
    assert state.deadline == 0.0
    assert rig.key() is None
    assert rig.beat.pump(rig.alive).lost == state.lost


def test_a_store_that_is_away_for_long_ends_nothing(rig: Rig) -> None:
    """While it is away effects are forbidden; when it is back the same life goes on, with an unchanged report."""
    rig.store.away = True
    for _ in range(3):
        state = rig.beat.pump(rig.alive)
        rig.clock.wait(5)
        assert not state.lost
        assert state.deadline <= rig.clock.now
    rig.store.store.revoke(1)
    rig.store.away = False
    rig.clock.wait(TTL)
    state = rig.beat.pump(rig.alive)
    assert state.alive_create > rig.registration
    assert rig.key() == rig.alive


def test_a_lost_reply_while_coming_back_is_read_back(rig: Rig) -> None:
    """The key that we wrote under the new lease is recognised as ours at the next beat."""
    rig.lose_lease()
    rig.store.lose_reply = True
    state = rig.beat.pump(rig.alive)
    assert state.alive_create < 0
    assert state.deadline == 0.0
    state = rig.beat.pump(rig.alive)
    kv = rig.store.store.get(KEYS.alive("trainer"))
    assert kv is not None
    assert state.alive_create == kv.create_revision


def test_an_acknowledged_timeline_keeps_the_key_that_the_beat_has(rig: Rig) -> None:
    """Adopting again for the same incarnation does not bring back the liveness key from before a lost lease."""
    rig.lose_lease()
    create = rig.beat.pump(rig.alive).alive_create
    timeline = rig.write(put(KEYS.timeline, Timeline(timeline=2)))
    mod = rig.write(put(KEYS.participant("trainer"), msgspec.structs.replace(rig.record, timeline=2)))
    rig.beat.adopt(timeline, mod, rig.registration, rig.alive)
    assert rig.beat.state.alive_create == create
    rig.lose_lease()
    assert rig.beat.pump(rig.alive).alive_create > create


def test_an_acknowledgement_on_its_way_to_the_beat_is_waited_for(rig: Rig) -> None:
    """The registration moved on for the same incarnation: not over, but the key returns only when the beat knows."""
    rig.lose_lease()
    timeline = rig.write(put(KEYS.timeline, Timeline(timeline=2)))
    mod = rig.write(put(KEYS.participant("trainer"), msgspec.structs.replace(rig.record, timeline=2)))
    state = rig.beat.pump(rig.alive)
    assert not state.lost
    assert rig.key() is None
    rig.beat.adopt(timeline, mod, rig.registration, rig.alive)
    assert rig.beat.pump(rig.alive).alive_create > mod


def test_a_deleted_key_comes_back_under_the_same_lease(rig: Rig) -> None:
    """Whoever deleted it without a verdict ended nothing."""
    rig.write(Delete(KEYS.alive("trainer")))
    lease = rig.beat.state.lease
    state = rig.beat.pump(msgspec.structs.replace(rig.alive, state="saving"))
    assert state.lease == lease
    assert not state.lost
    assert rig.key() is not None


def test_hard_evidence_ends_the_registration_and_removes_key_and_route(rig: Rig) -> None:
    """`testify` is one transaction; saying it again changes nothing."""
    route = Route(name="trainer", url="http://x", version=1, timeline=1, incarnation="a1")
    rig.write(put(KEYS.route("trainer"), route, rig.beat.state.lease))
    assert rig.beat.testify("gone")
    assert rig.participant().ended == "exited"
    assert rig.participant().reason == "gone"
    assert rig.key() is None
    assert rig.store.store.get(KEYS.route("trainer")) is None
    kv = rig.store.store.get(KEYS.participant("trainer"))
    assert rig.beat.testify("gone")
    assert rig.store.store.get(KEYS.participant("trainer")) == kv
    assert rig.beat.state.lost == "gone"


def test_evidence_touches_no_other_life(rig: Rig) -> None:
    """Neither another incarnation's registration nor its key, nor one that said goodbye."""
    other = msgspec.structs.replace(rig.record, incarnation="b2")
    rig.write(put(KEYS.participant("trainer"), other))
    assert not rig.beat.testify("gone")
    assert rig.participant() == other


def test_evidence_holds_without_a_key_and_after_an_acknowledgement(rig: Rig) -> None:
    """The incarnation is what counts: the lease may be lost, and the registration may have moved on."""
    rig.lose_lease()
    rig.write(put(KEYS.participant("trainer"), msgspec.structs.replace(rig.record, timeline=2)))
    assert rig.beat.testify("gone")
    assert rig.participant().ended == "exited"
    assert rig.participant().timeline == 2


def test_a_lease_lost_before_the_registration_is_the_end() -> None:
    """There is nothing to come back to."""
    clock = Clock()
    store = MemoryStore(clock)
    beat = Beat(store, KEYS, "trainer", TTL, clock=clock, pause=clock.wait)
    beat.open()
    clock.wait(TTL + 1)
    assert beat.pump(Alive(incarnation="")).lost
    assert not store.txn(Txn((Compare(KEYS.alive("trainer"), "create", ">", 0),), ())).succeeded


def test_the_board_keeps_the_newest_whole_message() -> None:
    """Latest wins; a write torn by a stop or a kill leaves the message before it; a new writer goes on counting."""
    board = create_board()
    for step in range(3):
        board.want(Wanted(life=1, alive=Alive(incarnation="a1", training_step=step)))
    reader = Board(board.fd)
    found = reader.wanted().alive
    assert found is not None
    assert found.training_step == 2
    slot = board._wanted._slots[0]  # the next write goes there; its body is half written
    slot[20:40] = b"x" * 20
    assert reader.wanted().alive == found
    reader.want(Wanted(life=2))
    assert board.wanted().life == 2
    assert reader.now() == BeatNow()
    os.close(board.fd)
