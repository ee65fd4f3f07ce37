"""A state store in memory with etcd's semantics, for the simulator and for unit tests.

It keeps to what a real etcd does (one conformance suite runs against both): revisions, leases, guarded
transactions, refusals, watches with history, compaction.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..engine.errors import Compacted, LeaseLost, StoreError, StoreRewound, Unavailable
from ..engine.ports import KV, Compare, Delete, Event, Put, RangeResult, Txn, TxnResult, WatchBatch

__all__ = ["MemoryStore", "MemoryWatch", "Change"]

_MAX_OPS = 128  # etcd's --max-txn-ops
_MAX_REQUEST_BYTES = 1_572_864  # etcd's --max-request-bytes
_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_ABSENT = KV(key="", value=b"", create_revision=0, mod_revision=0, version=0)


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history: the event, and the key as it was before (None: absent)."""

    event: Event
    before: KV | None


@dataclass(slots=True)
class _Lease:
    ttl_seconds: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """`StateStore` in one process, thread-safe by one lock; several sessions may share one object.

    Leases expire by `clock` (monotonic seconds). With `auto_expire` every call first applies what has
    expired; without it only `expire()` does, as a real etcd that is late, but a renewal never revives an
    expired lease. Lease ids count up from `first_lease`, so that a simulator is deterministic.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        auto_expire: bool = True,
        cluster_id: int = 1,
        first_lease: int = 0x1000,
    ) -> None:
        self._clock = clock
        self._auto_expire = auto_expire
        self._cluster_id = cluster_id
        self._changed = threading.Condition(threading.RLock())
        self._kvs: dict[str, KV] = {}
        self._keys: list[str] = []
        self._leases: dict[int, _Lease] = {}
        self._expiries: list[tuple[float, int]] = []
        self._lease_ids = itertools.count(first_lease)
        self._revision = 1
        self._compacted = 0
        self._history: list[Change] = []
        self._closed = False

    # -- reads ---------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The revision of the last write."""
        return self._revision

    @property
    def history(self) -> Sequence[Change]:
        """Every change since the last compaction, oldest first. The list itself: read it, do not change
        it.
        """
        return self._history

    def get(self, key: str) -> KV | None:
        """Return the key, or None when it is absent."""
        with self._changed:
            self._enter()
            return self._kvs.get(key)

    def range(self, prefix: str, revision: int = 0) -> RangeResult:
        """Return everything below `prefix`, now or at an older revision."""
        with self._changed:
            self._enter()
            if revision > self._revision:
                raise StoreRewound(f"revision {revision} asked for, the store is at {self._revision}")
            if 0 < revision < self._compacted:
                raise Compacted(f"revision {revision} has been compacted", self._compacted)
            kvs = tuple(self._kvs[key] for key in self._below(prefix))
            if 0 < revision < self._revision:
                kvs = self._at(prefix, kvs, revision)
            return RangeResult(kvs, self._revision if revision == 0 else revision)

    def cluster_id(self) -> int:
        """The id given at construction."""
        return self._cluster_id

    def _enter(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")
        if self._auto_expire and self._expiries and self._expiries[0][0] <= self._clock():
            self.expire()

    def _below(self, prefix: str) -> list[str]:
        keys, start = self._keys, bisect_left(self._keys, prefix)
        end = start
        while end < len(keys) and keys[end].startswith(prefix):
            end += 1
        return keys[start:end]

    def _at(self, prefix: str, now: tuple[KV, ...], revision: int) -> tuple[KV, ...]:
        found = {kv.key: kv for kv in now}
        for change in reversed(self._history):
            kv = change.event.kv
            if kv.mod_revision <= revision:
                break
            if kv.key.startswith(prefix):
                found.pop(kv.key, None)
                if change.before is not None:
                    found[kv.key] = change.before
        return tuple(found[key] for key in sorted(found))

    # -- transactions --------------------------------------------------------------------------------------

    def txn(self, txn: Txn) -> TxnResult:
        """Apply a transaction atomically; refusals are those of etcd."""
        _refuse_malformed(txn)
        with self._changed:
            self._enter()
            if not all(self._holds(compare) for compare in txn.compares):
                return TxnResult(False, self._revision)
            for op in txn.ops:
                if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                    raise LeaseLost(f"lease {op.lease:016x} not found: {op.key} was not written")
            self._apply(txn.ops)
            return TxnResult(True, self._revision)

    def _holds(self, compare: Compare) -> bool:
        relation, operand = _RELATIONS[compare.relation], compare.operand
        if not compare.prefix:
            return relation(_field(self._kvs.get(compare.key, _ABSENT), compare.field), operand)
        keys = self._below(compare.key)
        # An empty range is compared as one absent key, as etcd does.
        kvs = [self._kvs[key] for key in keys] or [_ABSENT]
        return all(relation(_field(kv, compare.field), operand) for kv in kvs)

    def _apply(self, ops: Sequence[Put | Delete]) -> None:
        revision, before = self._revision + 1, len(self._history)
        for op in ops:
            if isinstance(op, Put):
                self._put(op, revision)
            else:
                for key in self._below(op.key) if op.prefix else [op.key]:
                    self._delete(key, revision)
        if len(self._history) > before:
            self._revision = revision
            self._changed.notify_all()

    def _put(self, op: Put, revision: int) -> None:
        old = self._kvs.get(op.key)
        if old is None:
            insort(self._keys, op.key)
            new = KV(op.key, op.value, revision, revision, 1, op.lease)
        else:
            new = KV(op.key, op.value, old.create_revision, revision, old.version + 1, op.lease)
            if old.lease and old.lease != op.lease:
                self._leases[old.lease].keys.discard(op.key)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        self._kvs[op.key] = new
        self._history.append(Change(Event("put", new), old))

    def _delete(self, key: str, revision: int) -> None:
        old = self._kvs.pop(key, None)
        if old is None:
            return
        del self._keys[bisect_left(self._keys, key)]
        if old.lease in self._leases:
            self._leases[old.lease].keys.discard(key)
        self._history.append(Change(Event("delete", KV(key, b"", 0, revision, 0)), old))

    # -- leases --------------------------------------------------------------------------------------------

    def grant(self, ttl_seconds: int) -> int:
        """Create a lease and return its id."""
        if ttl_seconds < 1:
            raise StoreError(f"a lease of {ttl_seconds} s is impossible")
        with self._changed:
            self._enter()
            lease = next(self._lease_ids)
            self._renew(lease, _Lease(float(ttl_seconds), 0.0))
            return lease

    def keep_alive(self, lease: int) -> float:
        """Renew a lease; 0.0 when it is gone or has expired."""
        with self._changed:
            self._enter()
            found = self._leases.get(lease)
            if found is None:
                return 0.0
            if found.expires_at <= self._clock():
                self._drop(lease)
                return 0.0
            self._renew(lease, found)
            return found.ttl_seconds

    def revoke(self, lease: int) -> None:
        """Delete a lease and its keys; no error when it is gone."""
        with self._changed:
            self._enter()
            self._drop(lease)

    def expire(self) -> int:
        """Apply the expiry of every lease due at the clock's now; return how many ended."""
        with self._changed:
            now, ended = self._clock(), 0
            while self._expiries and self._expiries[0][0] <= now:
                _, lease = heapq.heappop(self._expiries)
                found = self._leases.get(lease)
                if found is not None and found.expires_at <= now:
                    self._drop(lease)
                    ended += 1
            return ended

    def next_expiry(self) -> float | None:
        """When the next lease would expire, on the clock; None without leases."""
        with self._changed:
            while self._expiries:
                at, lease = self._expiries[0]
                found = self._leases.get(lease)
                if found is not None and found.expires_at == at:
                    return at
                heapq.heappop(self._expiries)
            return None

    def _renew(self, lease: int, found: _Lease) -> None:
        found.expires_at = self._clock() + found.ttl_seconds
        self._leases[lease] = found
        heapq.heappush(self._expiries, (found.expires_at, lease))

    def _drop(self, lease: int) -> None:
        found = self._leases.pop(lease, None)
        if found is not None and found.keys:
            self._apply([Delete(key) for key in sorted(found.keys)])

    # -- watches, compaction -------------------------------------------------------------------------------

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        """Watch changes below `prefix` from `from_revision` on."""
        return MemoryWatch(self, prefix, from_revision)

    def compact(self, revision: int) -> None:
        """Forget history up to `revision`: reads below it and watches from it or below raise `Compacted`."""
        with self._changed:
            if revision <= self._compacted:
                raise Compacted(f"revision {revision} has been compacted", self._compacted)
            if revision > self._revision:
                raise StoreRewound(f"revision {revision} asked for, the store is at {self._revision}")
            del self._history[: self._index_after(revision)]
            self._compacted = revision
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse every later call; watches end with `Unavailable`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _index_after(self, revision: int) -> int:
        return bisect_left(self._history, revision + 1, key=lambda change: change.event.kv.mod_revision)

    def _events(self, prefix: str, next_revision: int) -> WatchBatch | None:
        """What a watch gets from `next_revision` on; None when nothing is new. The lock is held."""
        self._enter()
        if next_revision <= self._compacted and next_revision <= self._revision:
            raise Compacted(f"revision {next_revision} has been compacted", self._compacted)
        if next_revision > self._revision:
            return None
        start = self._index_after(next_revision - 1)
        changes = itertools.islice(self._history, start, None)
        events = tuple(change.event for change in changes if change.event.kv.key.startswith(prefix))
        return WatchBatch(events, self._revision)


class MemoryWatch:
    """A watch on a `MemoryStore`. An empty batch reports that the store moved on elsewhere."""

    def __init__(self, store: MemoryStore, prefix: str, from_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = from_revision
        self._dead = False

    def next(self, timeout_seconds: float) -> WatchBatch | None:
        """Wait (in real time) for the next batch; None when nothing came in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._store._changed:
            while True:
                if self._dead:
                    raise Unavailable(f"the watch on {self._prefix} is closed")
                try:
                    batch = self._store._events(self._prefix, self._next)
                except Exception:
                    self._dead = True
                    raise
                if batch is not None:
                    self._next = batch.revision + 1
                    return batch
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._store._changed.wait(min(remaining, 0.05))  # leases expire without a notification

    def close(self) -> None:
        """End the watch; idempotent."""
        with self._store._changed:
            self._dead = True
            self._store._changed.notify_all()


def _field(kv: KV, name: str) -> int:
    if name == "create":
        return kv.create_revision
    if name == "mod":
        return kv.mod_revision
    return kv.version if name == "version" else kv.lease


def _refuse_malformed(txn: Txn) -> None:
    if len(txn.ops) > _MAX_OPS or len(txn.compares) > _MAX_OPS:
        raise StoreError(
            f"too many operations in a transaction: {max(len(txn.ops), len(txn.compares))} > {_MAX_OPS}"
        )
    if not all(item.key for item in (*txn.compares, *txn.ops)):
        raise StoreError("a key is empty")
    puts = [op for op in txn.ops if isinstance(op, Put)]
    if len({op.key for op in puts}) < len(puts):
        raise StoreError("duplicate key in a transaction")
    for op in txn.ops:
        if isinstance(op, Delete) and any(_covers(op, put.key) for put in puts):
            raise StoreError(f"duplicate key in a transaction: {op.key} is deleted and put")
    if sum(len(op.key) + len(op.value) for op in puts) > _MAX_REQUEST_BYTES:
        raise StoreError("a transaction is too large")


def _covers(op: Delete, key: str) -> bool:
    return key.startswith(op.key) if op.prefix else key == op.key
