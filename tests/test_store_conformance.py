"""What every state store promises, run against the one in memory and against real etcd."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slackwater.backends.etcd import EtcdStore
from slackwater.backends.memory import MemoryStore
from slackwater.engine.errors import Compacted, LeaseLost, StoreError, StoreRewound, Unavailable
from slackwater.engine.ports import Compare, Delete, Event, Put, StateStore, Txn, Watch

AnyStore = MemoryStore | EtcdStore


@pytest.fixture(
    params=[
        "memory",
        pytest.param("etcd35", marks=pytest.mark.real),
        pytest.param("etcd34", marks=pytest.mark.etcd34),
    ]
)
def any_store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    """The same tests on every implementation."""
    if request.param == "memory":
        opened: AnyStore = MemoryStore()
    else:
        cluster = request.getfixturevalue("etcd" if request.param == "etcd35" else "etcd34")
        opened = EtcdStore(cluster.endpoints)
    yield opened
    opened.close()


@pytest.fixture
def root(job: str) -> str:
    return f"/slackwater/{job}/"


def put(store: StateStore, key: str, value: bytes = b"{}", lease: int = 0) -> int:
    result = store.txn(Txn((), (Put(key, value, lease),)))
    assert result.succeeded
    return result.revision


def delete(store: StateStore, key: str, prefix: bool = False) -> int:
    return store.txn(Txn((), (Delete(key, prefix),))).revision


def holds(store: StateStore, *compares: Compare) -> bool:
    return store.txn(Txn(compares, ())).succeeded


def events_until(watch: Watch, count: int, timeout_seconds: float = 10.0) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + timeout_seconds
    while len(events) < count and time.monotonic() < deadline:
        batch = watch.next(0.5)
        events += batch.events if batch is not None else ()
    return events


def eventually(condition: Callable[[], bool], timeout_seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True


# -- keys and revisions ------------------------------------------------------------------------------------


def test_absent_key_is_none_and_range_is_empty(any_store: AnyStore, root: str) -> None:
    """Absence is an answer, not an error."""
    assert any_store.get(root + "x") is None
    assert any_store.range(root).kvs == ()


def test_put_sets_create_mod_version(any_store: AnyStore, root: str) -> None:
    """A key remembers where it was created, where it was changed, and how often."""
    first = put(any_store, root + "x", b"1")
    second = put(any_store, root + "x", b"2")
    kv = any_store.get(root + "x")
    assert kv is not None
    assert (kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease) == (
        b"2",
        first,
        second,
        2,
        0,
    )
    delete(any_store, root + "x")
    third = put(any_store, root + "x", b"3")
    again = any_store.get(root + "x")
    assert again is not None
    assert (again.create_revision, again.version) == (third, 1)


def test_one_transaction_is_one_revision(any_store: AnyStore, root: str) -> None:
    """All operations of a transaction share one revision, the next one."""
    before = put(any_store, root + "z")
    ops = (Put(root + "a", b"1"), Put(root + "b", b"2"), Delete(root + "z"))
    after = any_store.txn(Txn((), ops)).revision
    assert after == before + 1
    assert [kv.mod_revision for kv in any_store.range(root).kvs] == [after, after]


def test_deleting_nothing_makes_no_revision(any_store: AnyStore, root: str) -> None:
    """A transaction without effect leaves the revision where it is."""
    before = put(any_store, root + "x")
    assert delete(any_store, root + "y") == before
    assert delete(any_store, root + "none/", prefix=True) == before
    assert any_store.txn(Txn((), ())).revision == before


def test_range_is_sorted_bounded_and_paged(any_store: AnyStore, root: str) -> None:
    """A range has every key below the prefix and no neighbour, sorted, even above one page."""
    count = 1100
    for start in range(0, count, 100):
        any_store.txn(Txn((), tuple(Put(f"{root}k/{n:05}", b"v") for n in range(start, start + 100))))
    put(any_store, root + "k0")
    put(any_store, root + "j")
    result = any_store.range(root + "k/")
    assert [kv.key for kv in result.kvs] == [f"{root}k/{n:05}" for n in range(count)]
    assert result.revision >= result.kvs[-1].mod_revision


def test_range_at_an_older_revision(any_store: AnyStore, root: str) -> None:
    """An old revision shows what was there then: changed, deleted and newer keys included."""
    put(any_store, root + "a", b"1")
    then = put(any_store, root + "b", b"1")
    put(any_store, root + "a", b"2")
    put(any_store, root + "c", b"1")
    delete(any_store, root + "b")
    old = any_store.range(root, then)
    assert [(kv.key[-1], kv.value) for kv in old.kvs] == [("a", b"1"), ("b", b"1")]
    assert old.revision == then


def test_future_revision_is_a_rewound_store(any_store: AnyStore, root: str) -> None:
    """Who saw a higher revision than the store has looks at a restored backup."""
    now = put(any_store, root + "a")
    with pytest.raises(StoreRewound):
        any_store.range(root, now + 1_000_000)


def test_large_values_come_back_in_one_range(any_store: AnyStore, root: str) -> None:
    """More than gRPC's default of 4 MiB can be listed."""
    for n in range(90):
        put(any_store, f"{root}big/{n:03}", bytes(60_000))
    assert sum(len(kv.value) for kv in any_store.range(root + "big/").kvs) == 90 * 60_000
    delete(any_store, root + "big/", prefix=True)


# -- guards ------------------------------------------------------------------------------------------------


def test_failed_compare_writes_nothing(any_store: AnyStore, root: str) -> None:
    """A definite no: not one of the operations happened, and the revision did not move."""
    before = put(any_store, root + "x", b"1")
    guard = Compare(root + "x", "mod", "=", before + 1)
    result = any_store.txn(Txn((guard,), (Put(root + "x", b"2"), Put(root + "y", b"2"))))
    assert (result.succeeded, result.revision) == (False, before)
    assert [kv.value for kv in any_store.range(root).kvs] == [b"1"]


@pytest.mark.parametrize("field", ["create", "mod", "version", "lease"])
def test_absent_key_compares_as_zero(any_store: AnyStore, root: str, field: str) -> None:
    """Every number of an absent key is 0."""
    key = root + "absent"
    assert holds(any_store, Compare(key, field, "=", 0))  # type: ignore[arg-type]
    assert holds(any_store, Compare(key, field, "<", 1))  # type: ignore[arg-type]
    assert not holds(any_store, Compare(key, field, ">", 0))  # type: ignore[arg-type]
    assert not holds(any_store, Compare(key, field, "!=", 0))  # type: ignore[arg-type]


def test_each_relation_on_each_field(any_store: AnyStore, root: str) -> None:
    """The four numbers of a present key can be guarded."""
    lease = any_store.grant(60)
    created = put(any_store, root + "x")
    modified = put(any_store, root + "x", lease=lease)
    for field, actual in (("create", created), ("mod", modified), ("version", 2), ("lease", lease)):
        assert holds(any_store, Compare(root + "x", field, "=", actual))  # type: ignore[arg-type]
        assert holds(any_store, Compare(root + "x", field, "<", actual + 1))  # type: ignore[arg-type]
        assert holds(any_store, Compare(root + "x", field, ">", actual - 1))  # type: ignore[arg-type]
        assert not holds(any_store, Compare(root + "x", field, "!=", actual))  # type: ignore[arg-type]
    any_store.revoke(lease)


def test_prefix_compare_stands_for_every_present_key(any_store: AnyStore, root: str) -> None:
    """`mod(prefix) < R+1` notices a changed and a new key, and does not notice a deletion."""
    put(any_store, root + "p/a")
    put(any_store, root + "p/b")
    seen = any_store.range(root + "p/").revision
    guard = Compare(root + "p/", "mod", "<", seen + 1, prefix=True)
    assert holds(any_store, guard)
    delete(any_store, root + "p/a")
    assert holds(any_store, guard)
    put(any_store, root + "p/c")
    assert not holds(any_store, guard)


def test_prefix_compare_of_nothing_compares_one_absent_key(any_store: AnyStore, root: str) -> None:
    """An empty range counts as one key with zeros: `mod < R` holds, `create > 0` does not."""
    assert holds(any_store, Compare(root + "none/", "mod", "<", 1, prefix=True))
    assert holds(any_store, Compare(root + "none/", "create", "=", 0, prefix=True))
    assert not holds(any_store, Compare(root + "none/", "create", ">", 0, prefix=True))
    assert not holds(any_store, Compare(root + "none/", "version", "!=", 0, prefix=True))


def test_create_race_has_one_winner(any_store: AnyStore, root: str) -> None:
    """Of many who create one key, exactly one succeeds."""

    def attempt(n: int) -> bool:
        key = root + "slot"
        return any_store.txn(Txn((Compare(key, "create", "=", 0),), (Put(key, str(n).encode()),))).succeeded

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(32))) == 1


def test_counter_without_holes(any_store: AnyStore, root: str) -> None:
    """Compare-and-put on a head hands out every number once, to threads that race."""
    head = root + "head"
    put(any_store, head, b"0")

    def allocate(_: int) -> int:
        while True:
            kv = any_store.get(head)
            assert kv is not None
            number = int(kv.value) + 1
            guard = Compare(head, "mod", "=", kv.mod_revision)
            if any_store.txn(Txn((guard,), (Put(head, str(number).encode()),))).succeeded:
                return number

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(allocate, range(60))) == list(range(1, 61))


# -- refusals (case E9) ------------------------------------------------------------------------------------


def test_E9_more_than_128_operations_are_refused(any_store: AnyStore, root: str) -> None:
    """128 operations pass, 129 do not, and nothing of them is written."""
    assert any_store.txn(Txn((), tuple(Put(f"{root}a/{n}", b"") for n in range(128)))).succeeded
    with pytest.raises(StoreError):
        any_store.txn(Txn((), tuple(Put(f"{root}b/{n}", b"") for n in range(129))))
    assert any_store.range(root + "b/").kvs == ()


def test_E9_too_large_a_request_is_refused(any_store: AnyStore, root: str) -> None:
    """2 MiB do not pass."""
    with pytest.raises(StoreError):
        put(any_store, root + "x", bytes(2 * 1024 * 1024))
    assert any_store.get(root + "x") is None


@pytest.mark.parametrize(
    "ops",
    [
        (Put("k/x", b"1"), Put("k/x", b"2")),
        (Delete("k/", prefix=True), Put("k/x", b"1")),
        (Put("k/x", b"1"), Delete("k/x")),
    ],
    ids=["put-put", "delete-range-put", "put-delete"],
)
def test_duplicate_keys_are_refused(any_store: AnyStore, root: str, ops: tuple[Put | Delete, ...]) -> None:
    """A key is written once in a transaction; a range is not deleted with a put inside it."""
    moved = tuple(
        Put(root + op.key, op.value) if isinstance(op, Put) else Delete(root + op.key, op.prefix)
        for op in ops
    )
    with pytest.raises(StoreError):
        any_store.txn(Txn((), moved))
    assert any_store.range(root).kvs == ()


def test_deleting_twice_is_allowed(any_store: AnyStore, root: str) -> None:
    """Overlapping deletions are no duplicate."""
    put(any_store, root + "k/x")
    assert any_store.txn(Txn((), (Delete(root + "k/x"), Delete(root + "k/", prefix=True)))).succeeded


def test_empty_key_is_refused(any_store: AnyStore) -> None:
    """A key has a name."""
    with pytest.raises(StoreError):
        put(any_store, "")


# -- leases ------------------------------------------------------------------------------------------------


def test_revoke_deletes_the_keys_in_one_revision(any_store: AnyStore, root: str) -> None:
    """What hangs on a lease goes together; revoking again is no error."""
    lease = any_store.grant(60)
    put(any_store, root + "a", lease=lease)
    put(any_store, root + "b", lease=lease)
    before = put(any_store, root + "c")
    any_store.revoke(lease)
    any_store.revoke(lease)
    left = any_store.range(root)
    assert [kv.key for kv in left.kvs] == [root + "c"]
    watch = any_store.watch(root, before + 1)
    gone = events_until(watch, 2)
    watch.close()
    assert [event.kind for event in gone] == ["delete", "delete"]
    assert len({event.kv.mod_revision for event in gone}) == 1


def test_put_without_lease_detaches(any_store: AnyStore, root: str) -> None:
    """The last put decides to which lease a key belongs."""
    first, second = any_store.grant(60), any_store.grant(60)
    put(any_store, root + "a", lease=first)
    put(any_store, root + "a")
    put(any_store, root + "b", lease=first)
    put(any_store, root + "b", lease=second)
    any_store.revoke(first)
    assert [kv.key for kv in any_store.range(root).kvs] == [root + "a", root + "b"]
    any_store.revoke(second)
    assert [kv.key for kv in any_store.range(root).kvs] == [root + "a"]


def test_put_on_a_lost_lease_is_refused(any_store: AnyStore, root: str) -> None:
    """Nothing is written in the name of a dead session, and nothing else of its transaction either."""
    lease = any_store.grant(60)
    any_store.revoke(lease)
    with pytest.raises(LeaseLost):
        any_store.txn(Txn((), (Put(root + "a", b""), Put(root + "b", b"", lease))))
    assert any_store.range(root).kvs == ()


def test_lost_lease_does_not_matter_to_a_failed_compare(any_store: AnyStore, root: str) -> None:
    """The guard is looked at first."""
    lease = any_store.grant(60)
    any_store.revoke(lease)
    result = any_store.txn(Txn((Compare(root + "x", "create", ">", 0),), (Put(root + "b", b"", lease),)))
    assert not result.succeeded


def test_keep_alive_of_a_lost_lease_is_zero(any_store: AnyStore) -> None:
    """A renewal of a lost lease is an answer, not an error."""
    lease = any_store.grant(60)
    assert lease != 0
    assert any_store.keep_alive(lease) == pytest.approx(60, abs=1)
    any_store.revoke(lease)
    assert any_store.keep_alive(lease) == 0.0
    assert any_store.keep_alive(123_456_789) == 0.0


def test_renewals_from_many_threads_get_their_own_answer(any_store: AnyStore) -> None:
    """Living and lost leases share the stream, and nobody gets another's answer."""
    living = [any_store.grant(60 + n) for n in range(10)]
    lost = [any_store.grant(60) for _ in range(10)]
    for lease in lost:
        any_store.revoke(lease)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(any_store.keep_alive, [*living, *lost] * 10))
    for start in range(0, 200, 20):
        assert answers[start : start + 10] == [pytest.approx(60 + n, abs=1) for n in range(10)]
        assert answers[start + 10 : start + 20] == [0.0] * 10
    for lease in living:
        any_store.revoke(lease)


def test_unrenewed_lease_expires(any_store: AnyStore, root: str) -> None:
    """Without renewals the key goes by itself, and a watch says so."""
    lease = any_store.grant(2)
    revision = put(any_store, root + "a", lease=lease)
    watch = any_store.watch(root, revision + 1)
    assert eventually(lambda: any_store.get(root + "a") is None)
    assert [event.kind for event in events_until(watch, 1)] == ["delete"]
    watch.close()
    assert any_store.keep_alive(lease) == 0.0


# -- watches -----------------------------------------------------------------------------------------------


def test_watch_delivers_history_and_news_in_order(any_store: AnyStore, root: str) -> None:
    """From an old revision on: everything once, in order, nothing from outside the prefix."""
    first = put(any_store, root + "a", b"1")
    put(any_store, root[:-1] + "-other/a", b"x")
    put(any_store, root + "a", b"2")
    watch = any_store.watch(root, first)
    old = events_until(watch, 2)
    delete(any_store, root + "a")
    put(any_store, root + "b", b"3")
    new = events_until(watch, 2)
    watch.close()
    assert [(event.kind, event.kv.value) for event in old + new] == [
        ("put", b"1"),
        ("put", b"2"),
        ("delete", b""),
        ("put", b"3"),
    ]
    assert new[0].kv.key == root + "a"
    revisions = [event.kv.mod_revision for event in old + new]
    assert revisions == sorted(set(revisions))


def test_watch_from_the_future_waits_for_it(any_store: AnyStore, root: str) -> None:
    """The usual way, list at R and watch from R + 1, delivers just what comes after."""
    put(any_store, root + "a")
    seen = any_store.range(root).revision
    watch = any_store.watch(root, seen + 1)
    quiet = watch.next(0.2)
    assert quiet is None or quiet.events == ()
    put(any_store, root + "b")
    assert [event.kv.key for event in events_until(watch, 1)] == [root + "b"]
    watch.close()


def test_watch_shows_a_transaction_in_the_order_of_its_operations(any_store: AnyStore, root: str) -> None:
    """Several events of one revision come together, in the order they were written."""
    revision = put(any_store, root + "z")
    any_store.txn(Txn((), (Put(root + "c", b""), Delete(root + "z"), Put(root + "a", b""))))
    watch = any_store.watch(root, revision + 1)
    batch = watch.next(5)
    while batch is not None and not batch.events:
        batch = watch.next(5)
    watch.close()
    assert batch is not None
    shown = [(event.kind, event.kv.key[-1]) for event in batch.events]
    assert shown == [("put", "c"), ("delete", "z"), ("put", "a")]


def test_E6_watch_from_a_compacted_revision_says_so(any_store: AnyStore, root: str) -> None:
    """A watcher that missed the compaction is told, instead of being given a later start."""
    first = put(any_store, root + "a", b"1")
    for n in range(10):
        last = put(any_store, root + "a", str(n).encode())
    any_store.compact(last)
    watch = any_store.watch(root, first)
    with pytest.raises(Compacted):
        events_until(watch, 1, 5)
    with pytest.raises(Compacted):
        any_store.range(root, first)
    assert any_store.range(root).kvs[0].value == b"9"


def test_closed_watch_wakes_its_reader(any_store: AnyStore, root: str) -> None:
    """A reader that waits is not left behind by `close` from another thread."""
    watch = any_store.watch(root, any_store.range(root).revision + 1)
    watch.next(0.2)
    done = threading.Event()

    def read() -> None:
        try:
            while True:
                watch.next(30)
        except Unavailable:
            done.set()

    thread = threading.Thread(target=read)
    thread.start()
    watch.close()
    watch.close()
    assert done.wait(10)
    thread.join(10)


def test_closed_store_refuses(any_store: AnyStore, root: str) -> None:
    """After `close` every call is `Unavailable`; closing twice is no error."""
    any_store.close()
    any_store.close()
    with pytest.raises(Unavailable):
        any_store.get(root + "x")
    with pytest.raises(Unavailable):
        any_store.keep_alive(1)


def test_cluster_id_is_stable(any_store: AnyStore) -> None:
    """A cluster knows who it is."""
    assert any_store.cluster_id() == any_store.cluster_id() != 0
