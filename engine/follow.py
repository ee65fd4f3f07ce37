"""A local copy of all keys below a prefix, kept current by list and watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from .errors import Compacted, StoreRewound, Unavailable
from .ports import KV, StateStore, Watch, WatchBatch

__all__ = ["Follower"]

_BROKEN_WATCHES = 3  # in one poll: more is a fault to report, not to go around


class Follower:
    """Follows one prefix: the copy is always some state that the store had, and never an older one than
    before.

    The first `poll` lists; later ones read a watch. Whatever breaks the watch (compaction, a lost
    connection, a silent server) leads to a new list and a comparison with the copy, so that nothing is
    missed: resuming at the compaction's own revision can lose a deletion. Not thread-safe; no thread
    inside.
    """

    def __init__(
        self, store: StateStore, prefix: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._kvs: dict[str, KV] = {}
        self._revision = 0
        self._listed = 0
        self._last_event = 0
        self._cluster_id = 0
        self._watch: Watch | None = None
        self._changed: set[str] = set()
        self._heard_at = 0.0
        self.lists = 0

    @property
    def kvs(self) -> Mapping[str, KV]:
        """Every key below the prefix as of `revision`; a live view, read-only."""
        return MappingProxyType(self._kvs)

    @property
    def revision(self) -> int:
        """The store's revision that the copy stands for; 0 before the first list."""
        return self._revision

    @property
    def heard_at(self) -> float:
        """When the store last gave a sign of life, on the clock."""
        return self._heard_at

    @property
    def changed_keys(self) -> frozenset[str]:
        """The keys that the last `poll` changed, added or removed."""
        return frozenset(self._changed)

    def poll(self, timeout_seconds: float) -> bool:
        """Bring the copy up to date, waiting at most `timeout_seconds` for news; return whether it changed.

        A list or a broken connection can take the store's call timeout on top.
        Raises `Unavailable` when the store cannot be listed (the copy stays as it is, call again),
        `StoreRewound` when it went back or is another cluster, `AuthFailed` when it may not be read.
        """
        self._changed = set()
        deadline = self._clock() + timeout_seconds
        broken = 0
        while True:
            if self._watch is None:
                self._list()
            try:
                self._read_watch(0.0 if self._changed else max(0.0, deadline - self._clock()))
            except (Compacted, Unavailable) as error:
                self.close()
                broken += 1
                if broken > _BROKEN_WATCHES and not self._changed:
                    raise Unavailable(f"{self._prefix}: the watch breaks again and again: {error}") from error
            if self._changed:
                return True
            if self._watch is not None and self._clock() >= deadline:
                return False

    def close(self) -> None:
        """End the watch; the copy stays readable, and `poll` would list again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _list(self) -> None:
        cluster_id = self._store.cluster_id()
        if self._cluster_id and cluster_id != self._cluster_id:
            raise StoreRewound(
                f"{self._prefix}: cluster {cluster_id:x} where {self._cluster_id:x} was before"
            )
        found = self._store.range(self._prefix)
        if found.revision < self._revision:
            raise StoreRewound(
                f"{self._prefix}: the store is at revision {found.revision}, {self._revision} was seen"
            )
        self.lists += 1
        self._cluster_id = cluster_id
        self._heard_at = self._clock()
        new = {kv.key: kv for kv in found.kvs}
        for key in self._kvs.keys() | new.keys():
            if self._kvs.get(key) != new.get(key):
                self._changed.add(key)
        self._kvs.clear()
        self._kvs.update(new)
        self._revision = self._listed = found.revision
        self._watch = self._store.watch(self._prefix, found.revision + 1)

    def _read_watch(self, timeout_seconds: float) -> None:
        """Read one batch, and then what is there without waiting."""
        if self._watch is None:
            return
        batch = self._watch.next(timeout_seconds)
        while batch is not None:
            self._apply(batch)
            batch = self._watch.next(0.0) if batch.events else None

    def _apply(self, batch: WatchBatch) -> None:
        self._heard_at = self._clock()
        for event in batch.events:
            kv = event.kv
            if kv.mod_revision <= self._listed or kv.mod_revision < self._last_event:
                continue  # told twice
            self._last_event = kv.mod_revision
            if event.kind == "put":
                self._kvs[kv.key] = kv
            elif self._kvs.pop(kv.key, None) is None:
                continue
            self._changed.add(kv.key)
        self._revision = max(self._revision, batch.revision)
