"""The ports that the engine needs from a coordination store and an object store.

The contracts below are tested by one conformance suite against every implementation.
"No" and "don't know" differ: a failed compare is a `TxnResult` with `succeeded=False` (a definite no), an
`Unavailable` means that the outcome is unknown and must be read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = [
    "KV",
    "Compare",
    "Put",
    "Delete",
    "Op",
    "Txn",
    "TxnResult",
    "RangeResult",
    "Event",
    "WatchBatch",
    "Watch",
    "StateStore",
    "ObjectInfo",
    "ObjectStore",
    "prefix_end",
]


@dataclass(frozen=True, slots=True)
class KV:
    """One key as the store holds it. Revisions are the store's, `lease` is 0 without one."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """One guard of a transaction: `field(key) relation operand`.

    An absent key has create, mod and version 0. With `prefix=True` the guard holds when it holds for *every
    present* key below `key`; an empty range is true, and a deletion is not seen.
    """

    key: str
    field: Literal["create", "mod", "version", "lease"]
    relation: Literal["=", "<", ">", "!="]
    operand: int
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value` (JSON bytes) to `key`, attached to `lease` unless 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`, or with `prefix=True` everything below it."""

    key: str
    prefix: bool = False


Op = Put | Delete


@dataclass(frozen=True, slots=True)
class Txn:
    """All guards hold, then all operations apply atomically; otherwise nothing is written."""

    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class TxnResult:
    """What a transaction did. `revision` is the store's revision after it (of the write, if it succeeded)."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Everything below a prefix at one revision, sorted by key."""

    kvs: tuple[KV, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change: `kv` is the new value of a put; for a delete only its key and mod_revision are meant."""

    kind: Literal["put", "delete"]
    kv: KV


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events in revision order. Empty `events` is a progress report: everything up to `revision` was delivered."""

    events: tuple[Event, ...]
    revision: int


class Watch(Protocol):
    """A stream of changes below a prefix, without loss or reordering (duplicates are possible)."""

    def next(self, timeout_seconds: float) -> WatchBatch | None:
        """Wait for the next batch. None: nothing came in time (silence; `StateStore.watch` says who checks it).

        Raises `Compacted` (list again), `StoreRewound`, `AuthFailed`, or `Unavailable` when the stream was silent
        or broken for longer than the backend's watchdog allows; after an error the watch is dead.
        """
        ...

    def close(self) -> None:
        """End the stream; idempotent, does not block."""
        ...


class StateStore(Protocol):
    """A linearizable key-value store with revisions, leases and transactions: etcd's subset that we use.

    All methods block up to the backend's call deadline, are safe to call from several threads, and raise
    `Unavailable` (outcome unknown), `AuthFailed`, `NoSpace` or `StoreError`. Reads retry by themselves; a write is
    sent once per call.
    """

    def get(self, key: str) -> KV | None:
        """Return the key, or None when it is absent. Linearizable."""
        ...

    def range(self, prefix: str, revision: int = 0) -> RangeResult:
        """Return everything below `prefix`, at one revision even when paged. `revision=0` means now."""
        ...

    def txn(self, txn: Txn) -> TxnResult:
        """Apply a transaction of at most 64 operations. `Unavailable`: it may or may not have been applied."""
        ...

    def grant(self, ttl_seconds: int) -> int:
        """Create a lease and return its id (never 0)."""
        ...

    def keep_alive(self, lease: int) -> float:
        """Renew a lease; return its time to live in seconds, 0.0 when it is gone.

        The holder's deadline is the moment this call was *sent* plus the lease's TTL; never the receive time.
        """
        ...

    def revoke(self, lease: int) -> None:
        """Delete a lease and its keys; a lease that is already gone is no error."""
        ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Watch changes below `prefix` beginning with `from_revision` (inclusive). Connects lazily."""
        ...

    def cluster_id(self) -> int:
        """The identity of the cluster; differs when the data directory is another one."""
        ...

    def close(self) -> None:
        """Release connections; idempotent."""
        ...


def prefix_end(prefix: str) -> bytes:
    """The exclusive end of the range of keys that begin with `prefix`, as etcd wants it."""
    raw = bytearray(prefix.encode())
    while raw:
        if raw[-1] < 0xFF:
            raw[-1] += 1
            return bytes(raw)
        raw.pop()
    return b"\0"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object. `checksum` is the CRC64NVME in the manifest's hex form, or "" when the store has none."""

    key: str
    size_bytes: int
    checksum: str = ""


class ObjectStore(Protocol):
    """An S3-compatible bucket (or one prefix of it). Keys are relative to the store's own prefix.

    Methods block with a deadline on progress, are thread-safe, and raise `NotFound`, `AuthFailed`, `NoSpace`,
    `Conflict` (a conditional put lost) or `Unavailable` (outcome unknown).
    """

    def probe(self) -> Sequence[str]:
        """Check reachability, credentials, bucket, conditional writes and checksum refusal.

        Returns the names of features that the store lacks (e.g. `conditional-put`, `checksum`); raises when it
        cannot be used at all.
        """
        ...

    def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        """Store a small object. `if_absent`: `Conflict` when the key exists, unless it holds the same bytes."""
        ...

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read an object or a range of it."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object, or None when it is missing (or may not be seen)."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a prefix, paged, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        ...
