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
from .ports import KV, Compare, StateStore, Txn
from .session import Session

__all__ = ["Beat", "BeatState"]

_PROGRESS_BEATS = 3


@dataclass(frozen=True, slots=True)
class BeatState:
    """What the worker needs from its beat. `deadline` is monotonic; `alive_create` 0 means: no liveness key."""

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
        self._registration: tuple[int, str] = (0, "")
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
        return BeatState(self._session.lease, deadline, self._alive_create, self._lost)

    def open(self) -> int:
        """Grant the lease for a registration to come; returns its id."""
        return self._session.open()

    def adopt(self, timeline_mod: int, registration_mod: int, alive_create: int, alive: Alive) -> None:
        """The worker registered (or acknowledged a timeline): this is what the beat now stands for."""
        self._timeline_mod = timeline_mod
        self._registration = (registration_mod, alive.incarnation)
        self._alive_create = alive_create
        self._written = alive

    def pump(self, alive: Alive) -> BeatState:
        """One beat with the worker's newest report; returns the state after it.

        The liveness key is rewritten when the report changed; a mere change of `progress` at most every third beat.
        """
        if self._lost:
            return self.state
        try:
            self._session.renew()
        except LeaseLost as error:
            self._regain(str(error), alive)
        if not self._lost and self._alive_create > 0:
            self._beats_since_write += 1
            try:
                self._rewrite(alive)
            except Unavailable:
                pass  # the lease is renewed; the report can wait for the next beat
            except NoSpace:
                pass  # a full store takes no reports, and that is no reason to die
        return self.state

    def _rewrite(self, alive: Alive) -> None:
        old = self._written
        if old is None or alive == old:
            return
        only_progress = msgspec.structs.replace(alive, progress=0) == msgspec.structs.replace(old, progress=0)
        if only_progress and self._beats_since_write < _PROGRESS_BEATS:
            return
        key = self._keys.alive(self._name)
        result = self._store.txn(
            Txn((Compare(key, "create", "=", self._alive_create),), (put(key, alive, self._session.lease),))
        )
        if result.succeeded:
            self._written, self._beats_since_write = alive, 0
        elif self._store.get(key) is None:
            self._regain("the liveness key is gone", alive)

    def _regain(self, reason: str, alive: Alive) -> None:
        """Take a new lease for the same incarnation, or declare this life over."""
        if not self._alive_create:
            self._lost = reason
            return
        self._alive_create = -1  # none that we may rely on, until the transaction below has put it there
        try:
            self._session = self._new_session()
            self._lost = self._take_lease(reason, self._session.open(), alive)
        except Unavailable:
            pass  # etcd is away: tried again at the next beat
        except SlackwaterError as error:
            self._lost = f"{reason}; {error}"

    def _take_lease(self, reason: str, lease: int, alive: Alive) -> str:
        """Put the liveness key under a new lease; returns why that is not allowed, or ""."""
        key, health_key = self._keys.participant(self._name), self._keys.health(self._name)
        alive_key = self._keys.alive(self._name)
        registered, health = self._store.get(key), self._store.get(health_key)
        if registered is None or registered.mod_revision != self._registration[0]:
            return f"{reason}; the slot was taken over meanwhile"
        if decode(Participant, registered.value, key).ended or _failed(health, self._registration[1]):
            return f"{reason}; declared failed meanwhile"
        # The key may still be there under the old lease (etcd prolongs leases when its leader changes).
        old = self._store.get(alive_key)
        if old is not None and decode(Alive, old.value, alive_key).incarnation != alive.incarnation:
            return f"{reason}; another incarnation is alive"
        created = old.create_revision if old is not None else 0
        compares = (
            Compare(alive_key, "create", "=", created),
            Compare(key, "mod", "=", self._registration[0]),
            Compare(self._keys.timeline, "mod", "=", self._timeline_mod),
            Compare(health_key, "mod", "=", health.mod_revision if health is not None else 0),
        )
        result = self._store.txn(Txn(compares, (put(alive_key, alive, lease),)))
        if result.succeeded:
            self._alive_create, self._written = created or result.revision, alive
            return ""
        timeline = self._store.get(self._keys.timeline)
        if timeline is None or timeline.mod_revision != self._timeline_mod:
            return f"{reason}; a recovery began meanwhile"
        raise Unavailable(f"{self._name}: the liveness key changed under us; tried again at the next beat")


def _failed(kv: KV | None, incarnation: str) -> bool:
    if kv is None:
        return False
    health = decode(Health, kv.value, kv.key)
    return health.incarnation == incarnation and health.state == "failed"
