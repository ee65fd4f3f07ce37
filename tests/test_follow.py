"""Followers: a local copy that is never wrong for longer than it takes to hear."""

from __future__ import annotations

import random
import time

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.memory import MemoryStore, MemoryWatch
from slackwater.engine.errors import Compacted, StoreRewound, Unavailable
from slackwater.engine.follow import Follower
from slackwater.engine.ports import Delete, Put, StateStore, Txn, WatchBatch

PREFIX = "/slackwater/j/"


def put(store: StateStore, key: str, value: bytes = b"{}") -> int:
    return store.txn(Txn((), (Put(key, value),))).revision


def poll_until_equal(
    follower: Follower, store: StateStore, prefix: str, timeout_seconds: float = 15.0
) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            follower.poll(0.2)
        except Unavailable:
            continue
        if dict(follower.kvs) == {kv.key: kv for kv in store.range(prefix).kvs}:
            return True
    return False


def test_poll_lists_then_follows() -> None:
    """First everything, then each change, and False when there is nothing new."""
    store = MemoryStore()
    put(store, PREFIX + "a", b"1")
    put(store, "/elsewhere", b"1")
    follower = Follower(store, PREFIX)
    assert follower.poll(0)
    assert set(follower.kvs) == {PREFIX + "a"}
    assert not follower.poll(0)
    put(store, PREFIX + "b", b"2")
    store.txn(Txn((), (Delete(PREFIX + "a"),)))
    assert follower.poll(0)
    assert follower.changed_keys == {PREFIX + "a", PREFIX + "b"}
    assert set(follower.kvs) == {PREFIX + "b"}
    assert follower.revision == store.revision
    assert follower.lists == 1


def test_transaction_is_seen_whole() -> None:
    """The copy never shows half of a transaction."""
    store = MemoryStore()
    follower = Follower(store, PREFIX)
    follower.poll(0)
    store.txn(Txn((), (Put(PREFIX + "a", b"1"), Put(PREFIX + "b", b"1"))))
    assert follower.poll(0)
    assert [kv.value for kv in follower.kvs.values()] == [b"1", b"1"]


def test_E6_compaction_while_away_leads_to_a_new_list() -> None:
    """50 changes and a compaction pass unseen; the copy is right again with the next poll, deletions
    included.
    """
    store = MemoryStore()
    put(store, PREFIX + "gone")
    put(store, PREFIX + "stays")
    follower = Follower(store, PREFIX)
    follower.poll(0)
    for n in range(50):
        put(store, PREFIX + "a", str(n).encode())
    store.txn(Txn((), (Delete(PREFIX + "gone"),)))
    store.compact(store.revision)
    assert follower.poll(0)
    assert follower.lists == 2
    assert follower.changed_keys == {PREFIX + "a", PREFIX + "gone"}
    assert dict(follower.kvs) == {kv.key: kv for kv in store.range(PREFIX).kvs}


def test_E6_restored_backup_is_noticed() -> None:
    """A store that went back to an older revision is refused, and the copy stays as it was."""
    store, backup = MemoryStore(), MemoryStore()
    for n in range(10):
        put(store, PREFIX + "a", str(n).encode())
    put(backup, PREFIX + "a", b"0")
    follower = Follower(store, PREFIX)
    follower.poll(0)
    follower.close()
    follower._store = backup
    with pytest.raises(StoreRewound):
        follower.poll(0)
    assert follower.kvs[PREFIX + "a"].value == b"9"


def test_other_cluster_is_noticed() -> None:
    """Another cluster is refused, even when its revision is higher."""
    store, other = MemoryStore(), MemoryStore(cluster_id=2)
    for n in range(10):
        put(other, PREFIX + "a", str(n).encode())
    follower = Follower(store, PREFIX)
    follower.poll(0)
    follower.close()
    follower._store = other
    with pytest.raises(StoreRewound):
        follower.poll(0)


class FickleStore(MemoryStore):
    """A store whose watches break, and tell things twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        return FickleWatch(self, prefix, from_revision)


class FickleWatch(MemoryWatch):
    def __init__(self, store: FickleStore, prefix: str, from_revision: int) -> None:
        super().__init__(store, prefix, from_revision)
        self.random = store.random
        self.last: WatchBatch | None = None

    def next(self, timeout_seconds: float) -> WatchBatch | None:
        fate = self.random.random()
        if fate < 0.1:
            raise Unavailable("broken")
        if fate < 0.15:
            raise Compacted("compacted")
        if fate < 0.3 and self.last is not None:
            again, self.last = self.last, None
            return again
        self.last = super().next(timeout_seconds)
        return self.last


@pytest.mark.parametrize("seed", range(20))
def test_copy_is_right_whatever_the_watch_does(seed: int) -> None:
    """Watches break and repeat themselves; after every poll the copy still equals a state of the store."""
    store = FickleStore(seed)
    follower = Follower(store, PREFIX)
    for _ in range(300):
        key = PREFIX + store.random.choice("abcdef")
        store.txn(Txn((), (Delete(key) if store.random.random() < 0.4 else Put(key, b"x"),)))
        if store.random.random() < 0.5:
            try:
                follower.poll(0)
            except Unavailable:
                continue
            assert (
                tuple(follower.kvs[key] for key in sorted(follower.kvs))
                == store.range(PREFIX, follower.revision).kvs
            )
    assert poll_until_equal(follower, store, PREFIX)


def test_watch_that_always_breaks_is_reported() -> None:
    """A store that can be listed but not watched is a fault to show, not a loop."""
    store = FickleStore(0)
    store.random.random = lambda: 0.0  # type: ignore[method-assign]
    follower = Follower(store, PREFIX)
    with pytest.raises(Unavailable, match="again and again"):
        follower.poll(0)


def test_E6_follows_a_real_etcd_through_compaction(store: EtcdStore, job: str) -> None:
    """A follower that slept over a compaction converges on a real etcd."""
    prefix = f"/slackwater/{job}/"
    put(store, prefix + "gone")
    follower = Follower(store, prefix)
    assert follower.poll(1)
    follower.close()
    for n in range(50):
        revision = put(store, prefix + "a", str(n).encode())
    store.txn(Txn((), (Delete(prefix + "gone"),)))
    store.compact(revision)
    assert follower.poll(1)
    assert {key: kv.value for key, kv in follower.kvs.items()} == {prefix + "a": b"49"}
    assert poll_until_equal(follower, store, prefix)
    follower.close()


def test_follows_through_the_death_of_the_server(own_etcd: EtcdCluster, job: str) -> None:
    """The server is killed and comes back; the follower reports the outage, then goes on without a gap."""
    prefix = f"/slackwater/{job}/"
    store = EtcdStore(own_etcd.endpoints, call_timeout_seconds=1.5)
    put(store, prefix + "a", b"1")
    follower = Follower(store, prefix)
    assert follower.poll(1)
    own_etcd.member(0).kill()
    with pytest.raises(Unavailable):
        follower.poll(30)
    assert follower.kvs[prefix + "a"].value == b"1"
    own_etcd.member(0).restart()
    writer = EtcdStore(own_etcd.endpoints)
    put(writer, prefix + "a", b"2")
    assert poll_until_equal(follower, writer, prefix)
    assert follower.kvs[prefix + "a"].value == b"2"
    follower.close()
    store.close()
    writer.close()
