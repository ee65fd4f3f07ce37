"""The beat of one participant: renews its lease, keeps its liveness key current, and says when both are over.

It runs in a small process of its own beside the worker, so that neither the GIL nor a compile can starve it; the
worker only reads a deadline. The same object is driven directly by the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .action import put
from .errors import LeaseLost, NoSpace, SlackwaterError, Unavailable
from .keys import Keys
from .model import Alive, Health, Participant, decode
from .ports import KV, Compare, Delete, StateStore, Txn
from .session import Session

__all__ = ["Beat", "BeatState"]

_PROGRESS_BEATS = 3


@dataclass(frozen=True, slots=True)
class BeatState:
    """What the worker needs from its beat.

    `deadline` is on the beat's monotonic clock; from then on (0: already now) no effect is allowed. `alive_create` 0:
    nothing is registered yet; below 0: the lease was lost and the liveness key is not back yet.
    """

    lease: int
    deadline: float
    alive_create: int
    lost: str = ""


class Beat:
    """Drives one lease and one liveness key by `pump`, to be called every `heartbeat_s`. No thread inside.

    When the lease is lost, the same incarnation may take a new one if its registration and timeline are unchanged and
    it was not declared failed; otherwise `state.lost` says why this life is over.
    """

    def __init__(
        self,
        store: StateStore,
        keys: Keys,
        name: str,
        ttl_seconds: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._name = name
        self._ttl = ttl_seconds
        self._clock = clock
        self._pause = pause
        self._session = self._new_session()
        self._timeline_mod = 0
        self._registration_mod = 0
        self._incarnation = ""
        self._alive_create = 0
        self._written: Alive | None = None
        self._beats_since_write = 0
        self._lost = ""

    def _new_session(self) -> Session:
        if self._pause is None:
            return Session(self._store, self._ttl, clock=self._clock)
        return Session(self._store, self._ttl, clock=self._clock, pause=self._pause)

    @property
    def state(self) -> BeatState:
        """Lease, deadline and liveness key as they are now."""
        deadline = self._session.deadline - self._session.margin_seconds
        if self._lost or self._alive_create < 0:
            deadline = 0.0
        return BeatState(self._session.lease, deadline, self._alive_create, self._lost)

    def open(self) -> int:
        """Grant the lease for a registration to come; returns its id."""
        return self._session.open()

    def adopt(self, timeline_mod: int, registration_mod: int, alive_create: int, alive: Alive) -> None:
        """The worker registered (or acknowledged a timeline): this is what the beat now stands for.

        For the incarnation that it keeps already, the beat knows its liveness key better than the worker does.
        """
        self._timeline_mod, self._registration_mod = timeline_mod, registration_mod
        if alive.incarnation == self._incarnation:
            return
        self._incarnation = alive.incarnation
        self._alive_create = alive_create
        self._written = alive

    def pump(self, alive: Alive) -> BeatState:
        """One beat with the worker's newest report; returns the state after it. Raises nothing of our error tree.

        The liveness key is rewritten when the report changed; a mere change of `progress` at most every third beat.
        """
        if self._lost:
            return self.state
        try:
            self._session.renew()
            if self._alive_create > 0:
                self._rewrite(alive)
            elif self._alive_create < 0:
                self._regain("the lease was lost", alive)
        except LeaseLost as error:
            self._regain(str(error), alive)
        except (Unavailable, NoSpace):
            pass  # the lease is renewed, the report can wait; a full store is no reason to die
        except SlackwaterError as error:
            self._lost = f"the store refuses us: {error}"
        return self.state

    def testify(self, reason: str) -> bool:
        """Write hard evidence that this life is over: the registration ends as "exited", key and route go at once.

        True when it stands in the store. Raises `Unavailable` (try again) and what else the store says.
        """
        self._lost = self._lost or reason
        key, alive_key = self._keys.participant(self._name), self._keys.alive(self._name)
        registered, other = self._store.get(key), self._store.get(alive_key)
        if not self._incarnation or registered is None:
            return False
        record = decode(Participant, registered.value, key)
        if record.incarnation != self._incarnation or record.ended:
            return record.incarnation == self._incarnation and record.ended == "exited"
        compares = (
            Compare(key, "mod", "=", registered.mod_revision),
            Compare(alive_key, "create", "=", other.create_revision if other is not None else 0),
        )
        ended = msgspec.structs.replace(record, ended="exited", reason=reason)
        ops = (put(key, ended), Delete(alive_key), Delete(self._keys.route(self._name)))
        return self._store.txn(Txn(compares, ops)).succeeded

    def end(self, reason: str) -> None:
        """This life is over, for a reason that the beat did not find itself."""
        self._lost = self._lost or reason

    def close(self) -> None:
        """Revoke the lease. Blocks for at most one TTL; idempotent."""
        self._session.close()

    def _rewrite(self, alive: Alive) -> None:
        self._beats_since_write += 1
        old = self._written
        if old is None or alive == old:
            return
        only_progress = msgspec.structs.replace(alive, progress=0) == msgspec.structs.replace(old, progress=0)
        if only_progress and self._beats_since_write < _PROGRESS_BEATS:
            return
        key = self._keys.alive(self._name)
        compares = (Compare(key, "create", "=", self._alive_create),)
        result = self._store.txn(Txn(compares, (put(key, alive, self._session.lease),)))
        if result.succeeded:
            self._written, self._beats_since_write = alive, 0
        else:
            self._regain("the liveness key is not ours any more", alive)

    def _regain(self, reason: str, alive: Alive) -> None:
        """Put the same incarnation's liveness key back, under a new lease if need be, or declare this life over.

        Where that cannot be decided yet, the next beat tries again.
        """
        if not self._alive_create:
            self._lost = reason
            return
        self._alive_create = -1
        try:
            if not self._session.alive():
                self._session = self._new_session()
            lease = self._session.open()
            self._lost = self._why_over(reason)
            if not self._lost:
                self._take_back(reason, lease, alive)
        except (Unavailable, NoSpace, LeaseLost):
            return
        except SlackwaterError as error:
            self._lost = f"{reason}; {error}"

    def _why_over(self, reason: str) -> str:
        key, health_key = self._keys.participant(self._name), self._keys.health(self._name)
        registered = self._store.get(key)
        if registered is None:
            return f"{reason}; the registration is gone"
        record = decode(Participant, registered.value, key)
        if record.incarnation != self._incarnation:
            return f"{reason}; the slot was taken over meanwhile"
        if record.ended or _failed(self._store.get(health_key), self._incarnation):
            return f"{reason}; declared {record.ended or 'failed'} meanwhile"
        return ""

    def _take_back(self, reason: str, lease: int, alive: Alive) -> None:
        key, alive_key = self._keys.participant(self._name), self._keys.alive(self._name)
        health = self._store.get(self._keys.health(self._name))
        if _failed(health, self._incarnation):
            self._lost = f"{reason}; declared failed meanwhile"
            return
        other = self._store.get(alive_key)
        if other is not None:
            found = decode(Alive, other.value, alive_key)
            if found.incarnation != self._incarnation:
                self._lost = f"{reason}; the slot was taken over meanwhile"
            elif other.lease == lease:  # written by us, the reply was lost
                self._alive_create, self._written = other.create_revision, found
            return  # otherwise under the old lease, which is about to expire
        compares = (
            Compare(alive_key, "create", "=", 0),
            Compare(key, "mod", "=", self._registration_mod),
            Compare(self._keys.timeline, "mod", "=", self._timeline_mod),
            Compare(
                self._keys.health(self._name), "mod", "=", health.mod_revision if health is not None else 0
            ),
        )
        result = self._store.txn(Txn(compares, (put(alive_key, alive, lease),)))
        if result.succeeded:
            self._alive_create, self._written, self._beats_since_write = result.revision, alive, 0
            return
        registered, timeline = self._store.get(key), self._store.get(self._keys.timeline)
        if registered is None or registered.mod_revision != self._registration_mod:
            return  # acknowledged a moment ago: the worker's word of it is on its way
        if timeline is None or timeline.mod_revision != self._timeline_mod:
            self._lost = f"{reason}; a recovery began meanwhile"


def _failed(kv: KV | None, incarnation: str) -> bool:
    if kv is None:
        return False
    health = decode(Health, kv.value, kv.key)
    return health.incarnation == incarnation and health.state == "failed"
