"""Real servers for the tests, and the list of what was left out."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.backends.child import free_ports
from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.backends.etcd import EtcdStore


def etcd34_binary() -> Path | None:
    """Debian's etcd 3.4 (or the one that SLACKWATER_ETCD34 names), None when it is not installed."""
    path = Path(os.environ.get("SLACKWATER_ETCD34", "/usr/bin/etcd"))
    return path if path.is_file() else None


def sglang_python() -> Path | None:
    """The interpreter of the SGLang environment that `make sglang-env` builds, None when it is not there."""
    default = Path(__file__).parent.parent / ".venv-sglang" / "bin" / "python"
    path = Path(os.environ.get("SLACKWATER_SGLANG_PYTHON", str(default)))
    return path if path.is_file() else None


# -- what is left out ---------------------------------------------------------------------------------------

_PARTS = {
    "etcd34": (etcd34_binary, "Debian's etcd 3.4 is not installed (apt-get install etcd-server)"),
    "sglang": (sglang_python, "the SGLang environment is not there (make sglang-env)"),
}


# What asks for one of these starts a server, so it is `real` without saying so.
_SERVERS = {"etcd", "etcd34", "s3", "store", "own_etcd", "etcd3members", "keyed_s3"}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a server, and skip what needs a part that is not installed here."""
    for item in items:
        if _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)
    for marker, (find, reason) in _PARTS.items():
        if find() is not None:
            continue
        for item in items:
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _left_out(config: pytest.Config) -> dict[str, list[str]]:
    """The skipped tests by missing part, read from the reports so that parallel workers' count too."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found: dict[str, list[str]] = {}
    for report in reporter.stats.get("skipped", ()) if reporter is not None else ():
        for _, reason in _PARTS.values():
            if reason in str(report.longrepr):
                found.setdefault(reason, []).append(report.nodeid)
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List by name what this run has not shown."""
    left_out = _left_out(config)
    if not left_out:
        return
    terminalreporter.section("left out: not installed here")
    for reason, names in sorted(left_out.items()):
        terminalreporter.write_line(f"{reason}: {len(names)} tests")
        for name in sorted(names):
            terminalreporter.write_line(f"  {name}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI nothing is left out: a missing part fails the run."""
    on_worker = hasattr(session.config, "workerinput")
    if os.environ.get("CI") == "true" and not on_worker and exitstatus == 0 and _left_out(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# -- servers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd 3.5 member shared by the run (one for each xdist worker). Use a random job name; leave it
    running.
    """
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), unsafe_no_fsync=True)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd34(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd 3.4 member shared by the run; mark its tests `etcd34`."""
    binary = etcd34_binary()
    if binary is None:
        pytest.skip("etcd 3.4 is not installed")
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd34"), binary=binary)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """One etcd member of this test alone: kill it, pause it, fill it."""
    cluster = EtcdCluster(tmp_path / "etcd", unsafe_no_fsync=True)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def etcd3members(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members of this test alone."""
    cluster = EtcdCluster(tmp_path / "etcd3", members=3, unsafe_no_fsync=True)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server shared by the run. Use a random prefix; leave it running."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def keyed_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The object store, with its keys in the environment of this test and its children."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    return s3


@pytest.fixture
def store(etcd: EtcdCluster) -> Iterator[EtcdStore]:
    """A store on the shared etcd."""
    opened = EtcdStore(etcd.endpoints)
    yield opened
    opened.close()


@pytest.fixture
def job() -> str:
    """A job name that no other test uses."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def free_port() -> int:
    """A loopback port that is free at this moment."""
    return free_ports(1)[0]
