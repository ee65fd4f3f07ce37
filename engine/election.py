"""Election of one coordinator: the candidate whose key has the lowest create-revision leads.

That revision is the leader's *epoch*. Every write of a leader compares it, so a leader that was paused past
its lease is refused by the store itself, whatever it still believes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .errors import LeaseLost, Unavailable
from .ports import KV, Compare, Delete, Put, StateStore, Txn
from .session import Session

__all__ = ["Candidate"]


class Candidate:
    """One process that wants to lead, by the key `<prefix><lease>` under its session's lease.

    `prefix` ends with a slash. Drive it by calling `campaign` now and then, or when a key below `prefix`
    changed; there is no thread inside. Not thread-safe; `guard`, `epoch` and `leading` may be read from any
    thread.
    """

    def __init__(
        self, store: StateStore, prefix: str, session: Session, identity: Mapping[str, object]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._session = session
        self._value = msgspec.json.encode(dict(identity))
        self._epoch = 0
        self._leads = False
        self._leader: KV | None = None

    @property
    def key(self) -> str:
        """Our key; its last part is the lease in 16 hexadecimal digits."""
        return f"{self._prefix}{self._session.lease:016x}"

    @property
    def epoch(self) -> int:
        """The create-revision of our key, the fencing token when we lead; 0 while we have none."""
        return self._epoch

    @property
    def leading(self) -> bool:
        """Whether we led at the last `campaign` and our session is still alive by its own clock."""
        return self._leads and self._session.alive()

    @property
    def leader(self) -> KV | None:
        """The leader's key as the last `campaign` saw it."""
        return self._leader

    def campaign(self) -> bool:
        """One step: be a candidate, then tell whether our key is the oldest one now.

        `LeaseLost` when the session is over. `Unavailable` when the store does not answer: call again, a key
        that was written all the same is found by reading it back.
        """
        self._session.check()
        if self._epoch == 0:
            self._enter()
        found = self._store.range(self._prefix)
        mine = next((kv for kv in found.kvs if kv.key == self.key), None)
        self._leader = min(found.kvs, key=lambda kv: kv.create_revision, default=None)
        if mine is None or mine.create_revision != self._epoch:
            # Somebody deleted our key (an operator, or the expiry of the lease): we are no candidate any
            # more.
            self._epoch, self._leads = 0, False
        else:
            self._leads = self._leader is not None and self._leader.key == self.key
        return self.leading

    def _enter(self) -> None:
        self._leads = False
        put = Put(self.key, self._value, self._session.lease)
        try:
            result = self._store.txn(Txn((Compare(self.key, "create", "=", 0),), (put,)))
        except Unavailable:
            result = None
        except LeaseLost as error:
            self._session.fail(str(error))
            raise
        if result is not None and result.succeeded:
            self._epoch = result.revision
            return
        # The key was there already, or the outcome is unknown: only the store knows which.
        kv = self._store.get(self.key)
        if kv is None:
            raise Unavailable(f"the candidacy {self.key} was not written; try again")
        self._epoch = kv.create_revision

    def guard(self) -> Compare:
        """What every transaction of a leader compares; it never holds while we are no candidate."""
        if self._epoch == 0:
            return Compare(self.key, "create", "<", 0)
        return Compare(self.key, "create", "=", self._epoch)

    def resign(self) -> None:
        """Stop being a candidate; the session lives on. `Unavailable`: the key may still be there."""
        if self._epoch == 0:
            return
        guard, self._leads = self.guard(), False
        self._store.txn(Txn((guard,), (Delete(self.key),)))
        self._epoch = 0
