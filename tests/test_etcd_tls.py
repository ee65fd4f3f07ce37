"""The store over TLS with client certificates."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.backends.child import ChildProcess, free_ports
from slackwater.backends.embedded import find_etcd
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.errors import ConfigError, Unavailable

pytestmark = pytest.mark.real


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server certificate for 127.0.0.1 and localhost, a client certificate, and a stranger's CA."""
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(folder, "req", "-x509", *new_key, "-subj", f"/CN={name}", "-days", "2", *files)
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(folder, "req", *new_key, "-subj", f"/CN={name}", *files)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def tls_port(certificates: Path) -> Iterator[int]:
    """The port of an etcd that speaks TLS only and wants a client certificate."""
    port, peer = free_ports(2)
    argv = [
        str(find_etcd()),
        f"--data-dir={certificates / 'data'}",
        f"--initial-cluster-token={secrets.token_hex(4)}",
        f"--listen-client-urls=https://127.0.0.1:{port}",
        f"--advertise-client-urls=https://127.0.0.1:{port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
        f"--cert-file={certificates / 'server.pem'}",
        f"--key-file={certificates / 'server.key'}",
        f"--trusted-ca-file={certificates / 'ca.pem'}",
        "--client-cert-auth",
    ]
    child = ChildProcess(argv, certificates / "etcd.log")
    child.start()
    yield port
    child.kill()


def test_client_certificate_opens_the_store(certificates: Path, tls_port: int) -> None:
    """CA, certificate and key from files, by address, by name, and with several members behind one name."""
    pem = {
        "ca": certificates / "ca.pem",
        "cert": certificates / "client.pem",
        "key": certificates / "client.key",
    }
    address, name = f"https://127.0.0.1:{tls_port}", f"https://localhost:{tls_port}"
    for endpoints in ([address], [name], [address, address]):
        store = EtcdStore(endpoints, **pem, call_timeout_seconds=20)
        assert store.cluster_id() != 0
        store.close()


def test_strangers_are_kept_out(certificates: Path, tls_port: int) -> None:
    """Without a certificate, or when the server's CA is not ours, nothing is sent."""
    address = f"https://127.0.0.1:{tls_port}"
    for ca in ("ca.pem", "stranger.pem"):
        store = EtcdStore([address], ca=certificates / ca, call_timeout_seconds=1)
        with pytest.raises(Unavailable, match=str(tls_port)):
            store.get("/x")
        store.close()


def test_unreadable_certificate_is_named(certificates: Path, tls_port: int) -> None:
    """A missing file is a configuration error with its path."""
    store = EtcdStore([f"https://127.0.0.1:{tls_port}"], ca=certificates / "nowhere.pem")
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        store.get("/x")
    store.close()
