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

_LEFT_OUT = pytest.StashKey[dict[str, str]]()


def etcd34_binary() -> Path | None:
    """Debian's etcd 3.4 (or the one that SLACKWATER_ETCD34 names), None when it is not installed."""
    path = Path(os.environ.get("SLACKWATER_ETCD34", "/usr/bin/etcd"))
    return path if path.is_file() else None


def sglang_python() -> Path | None:
    """The interpreter of the SGLang environment that `make sglang-env` builds, None when it is not there."""
    default = Path(__file__).parent.parent / ".venv-sglang" / "bin" / "python"
    path = Path(os.environ.get("SLACKWATER_SGLANG_PYTHON", str(default)))
    return path if path.is_file() else None


# -- what is left out
# --------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a part that is not installed, and remember it by name."""
    missing = {}
    if etcd34_binary() is None:
        missing["etcd34"] = "Debian's etcd 3.4 is not installed (apt-get install etcd-server)"
    if sglang_python() is None:
        missing["sglang"] = "the SGLang environment is not there (make sglang-env)"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
                config.stash[_LEFT_OUT][item.nodeid] = reason


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[_LEFT_OUT]
    if not left_out:
        return
    terminalreporter.section("left out: not installed here")
    for reason in sorted(set(left_out.values())):
        names = [name for name, why in left_out.items() if why == reason]
        terminalreporter.write_line(f"{reason}: {len(names)} tests")
        for name in names:
            terminalreporter.write_line(f"  {name}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI nothing is left out: a missing part fails the run."""
    if session.config.stash[_LEFT_OUT] and os.environ.get("CI") == "true" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# -- servers
# -------------------------------------------------------------------------------------------------------


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
