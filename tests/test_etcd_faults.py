"""The store on a real etcd that is killed, paused, full, locked and replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.etcd_errors import ForkedClient
from slackwater.backends.etcd_stubs import rpc
from slackwater.engine.errors import (
    AuthFailed,
    Compacted,
    ConfigError,
    NoSpace,
    SlackwaterError,
    StoreRewound,
    Unavailable,
)
from slackwater.engine.ports import Compare, Delete, Put, StateStore, Txn, Watch

pytestmark = pytest.mark.real


def put(store: StateStore, key: str, value: bytes = b"{}", lease: int = 0) -> int:
    return store.txn(Txn((), (Put(key, value, lease),))).revision


def read_for_ever(watch: Watch) -> None:
    while True:
        watch.next(10)


def retry_until_done(store: StateStore, key: str, timeout_seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            put(store, key)
        except Unavailable:
            continue
        return True
    return False


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoints",
    [
        [],
        "127.0.0.1:2379",
        ["127.0.0.1"],
        ["127.0.0.1:"],
        ["127.0.0.1:http"],
        ["127.0.0.1:70000"],
        ["ftp://127.0.0.1:2379"],
        ["http://127.0.0.1:2379/v3"],
        ["::1:2379"],
        ["http://a:1", "https://b:1"],
    ],
)
def test_bad_endpoints_get_one_line(endpoints: list[str]) -> None:
    """What is no address is refused at construction, in one line that quotes it."""
    with pytest.raises(ConfigError) as caught:
        EtcdStore(endpoints)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [{"user": "u"}, {"cert": "c.pem"}, {"ca": "ca.pem"}, {"call_timeout_seconds": 0.0}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_contradict_are_refused(arguments: dict[str, object]) -> None:
    """Half a credential, or a CA without TLS, is a configuration error."""
    with pytest.raises(ConfigError):
        EtcdStore(["127.0.0.1:2379"], **arguments)  # type: ignore[arg-type]


def test_constructor_connects_to_nothing(free_port: int) -> None:
    """Making and closing a store needs no server."""
    store = EtcdStore([f"127.0.0.1:{free_port}", "[::1]:2379", "http://etcd.invalid:2379"])
    store.close()


def test_unreachable_names_the_endpoints(free_port: int) -> None:
    """Nobody listens: `Unavailable` within the call timeout, with the address."""
    store = EtcdStore([f"127.0.0.1:{free_port}"], call_timeout_seconds=0.5)
    for call in (
        lambda: store.get("/x"),
        lambda: put(store, "/x"),
        lambda: store.keep_alive(1),
        lambda: store.range("/x"),
    ):
        start = time.monotonic()
        with pytest.raises(Unavailable, match=f"127.0.0.1:{free_port}"):
            call()
        assert time.monotonic() - start < 2
    watch = store.watch("/x", 1, watchdog_seconds=0.5)
    with pytest.raises(Unavailable):
        watch.next(5)
    store.close()


def test_endpoint_forms_reach_the_server(etcd: EtcdCluster) -> None:
    """With and without a scheme, by address and by name."""
    port = etcd.member(0).client_port
    for endpoint in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/", f"localhost:{port}"):
        store = EtcdStore([endpoint])
        assert store.cluster_id() != 0
        store.close()


_FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.etcd_errors import ForkedClient
store = EtcdStore([sys.argv[1]])
store.get("/x")
calls = [lambda: store.get("/x"), lambda: store.keep_alive(1)]
calls += [lambda: store.watch("/x", 1), lambda: store.grant(5)]
pid = os.fork()
if pid == 0:
    refused = 0
    for call in calls:
        try:
            call()
        except ForkedClient as error:
            refused += str(os.getppid()) in str(error)
    os._exit(refused)
_, status = os.waitpid(pid, 0)
store.get("/x")
print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


def test_forked_child_is_refused_by_name(etcd: EtcdCluster) -> None:
    """A store does not survive a fork; the child gets a named error at once instead of hanging."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK, etcd.endpoints[0]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["4"], done.stderr
    assert issubclass(ForkedClient, ConfigError)


# -- members that die --------------------------------------------------------------------------------------


def test_member_killed_under_load_then_quorum_lost_and_back(etcd3members: EtcdCluster) -> None:
    """One member of three dies: nothing acknowledged is lost, work goes on. Two: `Unavailable`, then
    recovery.
    """
    store = EtcdStore(etcd3members.endpoints, call_timeout_seconds=3)
    acknowledged: list[str] = []
    unknown: list[str] = []
    stop = threading.Event()

    def write(worker: int) -> None:
        n = 0
        while not stop.is_set():
            key, n = f"/load/{worker}/{n:06}", n + 1
            try:
                put(store, key)
            except Unavailable:
                unknown.append(key)
            else:
                acknowledged.append(key)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    watch = store.watch("/load/", 1, watchdog_seconds=20)
    watch.next(1)
    threading.Event().wait(0.5)
    etcd3members.member(1).kill()
    after_kill = len(acknowledged)
    threading.Event().wait(4)
    assert len(acknowledged) > after_kill + 50
    stop.set()
    for writer in writers:
        writer.join()
    present = {kv.key for kv in store.range("/load/").kvs}
    assert set(acknowledged) <= present
    assert present <= set(acknowledged) | set(unknown)
    assert len(unknown) < 20
    watch.close()

    etcd3members.member(2).kill()
    with pytest.raises(Unavailable):
        put(store, "/quorum")
    with pytest.raises(Unavailable):
        store.get("/quorum")
    etcd3members.member(1).restart(wait_ready=False)
    start = time.monotonic()
    assert retry_until_done(store, "/quorum")
    assert time.monotonic() - start < 15
    store.close()


def test_paused_server_is_noticed_and_forgiven(own_etcd: EtcdCluster) -> None:
    """A SIGSTOPped server: calls end at their deadline, the watch's watchdog fires; after SIGCONT all work
    again.
    """
    store = EtcdStore(own_etcd.endpoints, call_timeout_seconds=1)
    revision = put(store, "/a")
    lease = store.grant(60)
    watch = store.watch("/", revision + 1, progress_seconds=0.3, watchdog_seconds=1.0)
    assert watch.next(1) is not None  # a sign of life, asked for after silence
    own_etcd.member(0).pause()
    try:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            read_for_ever(watch)
        assert 0.5 < time.monotonic() - start < 3
        with pytest.raises(Unavailable):
            watch.next(0)
        for call in (lambda: store.get("/a"), lambda: put(store, "/b"), lambda: store.keep_alive(lease)):
            start = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            assert time.monotonic() - start < 2
    finally:
        own_etcd.member(0).resume()
    assert retry_until_done(store, "/c")
    assert store.keep_alive(lease) > 50
    fresh = store.watch("/c", revision)
    batch = fresh.next(5)
    assert batch is not None
    assert batch.events
    fresh.close()
    store.close()


def test_compaction_under_a_late_watch_and_under_a_live_one(own_etcd: EtcdCluster) -> None:
    """A live watch that has read everything goes on over a compaction; one that starts before it is told."""
    store = EtcdStore(own_etcd.endpoints)
    first = put(store, "/a")
    watch = store.watch("/a", first)
    batch = watch.next(5)
    assert batch is not None
    last = [put(store, "/a", str(n).encode()) for n in range(20)][-1]
    seen = 0
    while seen < 20:
        batch = watch.next(5)
        assert batch is not None
        seen += len(batch.events)
    store.compact(last)
    put(store, "/a", b"after")
    values: list[bytes] = []
    while not values:
        batch = watch.next(5)
        assert batch is not None
        values += [event.kv.value for event in batch.events]
    assert values == [b"after"]
    late = store.watch("/a", first)
    with pytest.raises(Compacted) as caught:
        late.next(5)
    assert caught.value.compact_revision == last
    watch.close()
    store.close()


# -- a store that is full, restored, replaced --------------------------------------------------------------


def fill(store: StateStore, key: str) -> None:
    """Write one key again and again until the quota stops it."""
    for _ in range(100):
        put(store, key, bytes(200_000))


def disarm(endpoint: str) -> None:
    """Give the space back and end the alarm of each member that raised it."""
    import grpc

    with grpc.insecure_channel(endpoint) as channel:
        stub = rpc.MaintenanceStub(channel)
        alarms = stub.Alarm(rpc.AlarmRequest(action=0), timeout=5).alarms
        stub.Defragment(rpc.DefragmentRequest(), timeout=10)
        for alarm in alarms:
            stub.Alarm(rpc.AlarmRequest(action=2, memberID=alarm.memberID, alarm=1), timeout=5)


def test_E7_full_store_is_named_and_recovers_after_disarming(tmp_path: Path) -> None:
    """Over the quota puts and grants are `NoSpace`, renewals and reads go on; after disarming writes work
    again.
    """
    with EtcdCluster(tmp_path, quota_bytes=4 * 1024 * 1024, unsafe_no_fsync=True) as cluster:
        store = EtcdStore(cluster.endpoints)
        lease = store.grant(60)
        with pytest.raises(NoSpace):
            fill(store, "/fill/x")
        for refused in (lambda: put(store, "/x", bytes(1000)), lambda: store.grant(10)):
            with pytest.raises(NoSpace):
                refused()
        assert store.keep_alive(lease) > 50
        assert store.range("/fill/").kvs
        assert store.get("/x") is None
        with pytest.raises(NoSpace):
            store.txn(Txn((), (Delete("/fill/", prefix=True),)))
        store.compact(store.revision())
        disarm(cluster.endpoints[0])
        store.txn(Txn((), (Delete("/fill/", prefix=True),)))
        put(store, "/x", bytes(1000), lease)
        store.close()


def test_E6_store_from_an_older_backup_is_noticed(tmp_path: Path) -> None:
    """The server comes back from an older copy of its data: every later call is `StoreRewound`."""
    import shutil

    with EtcdCluster(tmp_path, unsafe_no_fsync=True) as cluster:
        store = EtcdStore(cluster.endpoints)
        put(store, "/a", b"old")
        member = cluster.member(0)
        member.child.stop()
        data, backup = member.directory / "data", member.directory / "backup"
        shutil.copytree(data, backup)
        member.restart()
        for n in range(5):
            assert retry_until_done(store, f"/b/{n}")
        seen = store.revision()
        member.child.stop()
        shutil.rmtree(data)
        backup.rename(data)
        member.restart()
        with pytest.raises(StoreRewound):
            store.get("/a")
        with pytest.raises(StoreRewound):
            store.txn(Txn((Compare("/zz", "create", ">", 0),), ()))
        fresh = EtcdStore(cluster.endpoints)  # knows nothing yet, but its caller knows what it saw
        watch = fresh.watch("/", seen + 1)
        with pytest.raises(StoreRewound):
            watch.next(5)
        store.close()
        fresh.close()


def test_another_cluster_on_the_same_address_is_noticed(tmp_path: Path) -> None:
    """A server with fresh data on the old address is another cluster, whatever its revision."""
    import shutil

    with EtcdCluster(tmp_path, unsafe_no_fsync=True) as cluster:
        store = EtcdStore(cluster.endpoints)
        put(store, "/a")
        member = cluster.member(0)
        member.child.stop()
        shutil.rmtree(member.directory / "data")
        other_token = [
            "--initial-cluster-token=other" if item.startswith("--initial-cluster-token") else item
            for item in member.child.argv
        ]
        member.child.argv = tuple(other_token)
        member.restart()
        writer = EtcdStore(cluster.endpoints)
        for n in range(10):
            put(writer, f"/{n}")
        with pytest.raises(StoreRewound, match="cluster"):
            store.get("/a")
        store.close()
        writer.close()


# -- users and tokens --------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd with authentication on: root/rootpw, and alice/alicepw who may read and write /ours/ only."""
    import grpc

    cluster = EtcdCluster(tmp_path, unsafe_no_fsync=True, extra_arguments=["--auth-token-ttl=2"])
    cluster.start()
    with grpc.insecure_channel(cluster.endpoints[0]) as channel:
        auth = rpc.AuthStub(channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="rootpw"))
        auth.UserAdd(rpc.AuthUserAddRequest(name="alice", password="alicepw"))
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="ours"))
        permission = {"permType": 2, "key": b"/ours/", "range_end": b"/ours0"}
        auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="ours", perm=permission))
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="alice", role="ours"))
        auth.AuthEnable(rpc.AuthEnableRequest())
    yield cluster
    cluster.kill()


def test_users_passwords_permissions_and_expired_tokens(locked: EtcdCluster) -> None:
    """Right user: everything works, also after the token expired. Wrong password, none, or a forbidden key:
    named.
    """
    alice = EtcdStore(locked.endpoints, user="alice", password="alicepw")
    revision = put(alice, "/ours/a", b"1")
    lease = alice.grant(60)
    with pytest.raises(AuthFailed):
        put(alice, "/theirs/a")
    with pytest.raises(AuthFailed):
        alice.range("/")
    forbidden = alice.watch("/theirs/", 1)
    with pytest.raises(AuthFailed):
        forbidden.next(5)
    allowed = alice.watch("/ours/", revision)
    batch = allowed.next(5)
    assert batch is not None
    assert batch.events[0].kv.value == b"1"
    allowed.close()

    threading.Event().wait(3.5)  # the token's life is 2 s
    put(alice, "/ours/a", b"2")
    assert alice.keep_alive(lease) > 50
    again = alice.watch("/ours/", revision)
    batch = again.next(5)
    assert batch is not None
    assert batch.events
    again.close()
    alice.close()

    for arguments in ({"user": "alice", "password": "wrong"}, {"user": "nobody", "password": "x"}, {}):
        stranger = EtcdStore(locked.endpoints, **arguments)  # type: ignore[arg-type]
        with pytest.raises(AuthFailed):
            stranger.get("/ours/a")
        watch = stranger.watch("/ours/", 1)
        with pytest.raises(AuthFailed):
            watch.next(5)
        stranger.close()


def test_restarted_server_forgets_tokens(locked: EtcdCluster) -> None:
    """The token that a restarted server does not know is replaced without a word, watches included."""
    alice = EtcdStore(locked.endpoints, user="alice", password="alicepw")
    revision = put(alice, "/ours/a", b"1")
    locked.member(0).kill()
    locked.member(0).restart()
    watch = alice.watch("/ours/", revision)
    batch = watch.next(10)
    assert batch is not None
    assert batch.events
    watch.close()
    put(alice, "/ours/a", b"2")
    alice.close()


def test_user_on_an_open_server_is_let_in(etcd: EtcdCluster) -> None:
    """Credentials that the server does not ask for are no obstacle."""
    store = EtcdStore(etcd.endpoints, user="alice", password="x")
    assert store.cluster_id() != 0
    store.close()


# -- every error has a place in the tree -------------------------------------------------------------------


def test_every_grpc_code_is_mapped() -> None:
    """No code of the layer below escapes: each becomes an error of ours, and only known refusals are
    definite.
    """
    import grpc

    from slackwater.backends.etcd_errors import translate

    class Fault(grpc.RpcError):
        def __init__(self, code: grpc.StatusCode) -> None:
            self._code = code

        def code(self) -> grpc.StatusCode:
            return self._code

        def details(self) -> str:
            return "etcdserver: something"

    unknown = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED", "OK"}
    for code in grpc.StatusCode:
        error = translate(Fault(code), "call")
        assert isinstance(error, SlackwaterError)
        assert isinstance(error, Unavailable) == (code.name in unknown), code
