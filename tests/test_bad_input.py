"""Bad input gets one clear line on stderr and exit code 2, and nothing is half done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.backends.etcd import EtcdStore
from slackwater.backends.etcd_stubs import rpc
from slackwater.engine.config import JobConfig, load_config
from slackwater.engine.errors import ConfigError
from slackwater.engine.keys import Keys
from slackwater.engine.settings import bootstrap

ROOT = Path(__file__).parent.parent

RULES = [
    ("[timers]\nheartbeat_s = 0", "timers.heartbeat_s"),
    ("[timers]\nlease_s = 0", "timers.lease_s"),
    ("[timers]\nwindow_s = -1", "timers.window_s"),
    ("[timers]\nprepare_deadline_s = 0", "timers.prepare_deadline_s"),
    ("[timers]\nready_deadline_s = 0", "timers.ready_deadline_s"),
    ("[timers]\nsave_deadline_s = 0", "timers.save_deadline_s"),
    ("[timers]\nresync_deadline_s = 0", "timers.resync_deadline_s"),
    ("[timers]\npersist_s = 0", "timers.persist_s"),
    ("[timers]\nretry_wait_s = 0", "timers.retry_wait_s"),
    ("[weights]\npublish_every_steps = 0", "weights.publish_every_steps"),
    ("[weights]\nkeep_versions = 0", "weights.keep_versions"),
    ("[checkpoint]\nevery_steps = -1", "checkpoint.every_steps"),
    ("[checkpoint]\nevery_seconds = -1.0", "checkpoint.every_seconds"),
    ("[weights]\nmin_rollouts = -1", "weights.min_rollouts"),
    ("[buffer]\nmax_staleness_steps = -1", "buffer.max_staleness_steps"),
    *(
        (f"[timers.stall_s]\n{state} = -1", f"timers.stall_s.{state}")
        for state in (
            "training",
            "rollout_in_progress",
            "syncing",
            "loading",
            "compiling",
            "saving",
            "ready",
            "idle",
            "held",
        )
    ),
    ("[timers]\nlease_s = 5\nheartbeat_s = 2.0", "3 x timers.heartbeat_s"),
    ("[timers]\npersist_s = 61", "must not be above timers.window_s"),
    ("[timers.stall_s]\ntraining = 5", "must not be below timers.lease_s"),
    ("[weights]\nmax_lag_steps = 2", "at least weights.publish_every_steps"),
    ("[buffer]\nmax_staleness_steps = 1", "every sample would be stale"),
    ("[buffer]\nstale_fraction = 0.0", "buffer.stale_fraction"),
    ("[checkpoint]\nkeep_last = 0", "checkpoint.keep_last"),
]


def slackwater(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line without what the environment says of a job."""
    dropped = ("SLACKWATER_", "AWS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    argv = [sys.executable, "-m", "slackwater.adapters.cli", *map(str, arguments)]
    return subprocess.run(
        argv, env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The promise: exit code 2, one line, which names what is wrong."""
    assert done.returncode == 2, done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("slackwater: ")
    for word in words:
        assert word in lines[0]


def write(path: Path, text: str) -> Path:
    """A configuration file."""
    path.write_text(text)
    return path


def job_file(folder: Path, job: str, etcd: EtcdCluster, site: str = "") -> Path:
    """A valid job on the shared etcd, with more lines of [site]."""
    member = etcd.endpoints[0]
    local = f'local = "{folder / "local"}"\n' if "local =" not in site else ""
    return write(folder / "job.toml", f'job = "{job}"\n[site]\netcd = ["{member}"]\n{local}{site}\n')


def s3_lines(server: S3Server, bucket: str = "") -> str:
    """The [site] lines of an S3 server."""
    return f's3_bucket = "{bucket or server.bucket}"\ns3_endpoint = "{server.url}"'


def keys_of(server: S3Server) -> dict[str, str]:
    """The right S3 credentials."""
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}


def not_born(store: EtcdStore, job: str) -> None:
    """Nothing of the job was written."""
    assert store.range(Keys(job).root).kvs == ()


# -- the configuration file --------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rule"), RULES, ids=[rule for _, rule in RULES])
def test_each_impossible_setting_is_named(text: str, rule: str, tmp_path: Path) -> None:
    """Every rule of the configuration refuses what breaks it, by its name."""
    file = write(tmp_path / "job.toml", f'job = "j"\n{text}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('job = "j"\n[timers]\npersist_s = 61', "timers.window_s"),
        ('job = "j"\n[timers]\nlease = 3', "lease"),
        ('job = "j"\nsite = 3', "[site]"),
        ('job = "j"\n[site]\ns4_bucket = "x"', "s4_bucket"),
        ('job = "No Spaces"', "job name"),
        ("job = ", "TOML"),
        ("job = 3", "str"),
        ("seed = 3", "job"),
    ],
)
def test_config_check_refuses(text: str, word: str, tmp_path: Path) -> None:
    """A file that cannot be used is refused with the file's name and what is wrong."""
    file = write(tmp_path / "job.toml", text)
    refused(slackwater("config", "check", file), "job.toml", word)


def test_config_check_names_a_missing_file(tmp_path: Path) -> None:
    """A file that is not there is named."""
    refused(slackwater("config", "check", tmp_path / "none.toml"), "none.toml")


def test_the_example_is_valid() -> None:
    """The commented example passes every rule and shows the defaults."""
    config, _ = load_config(ROOT / "examples" / "job.toml")
    assert config == JobConfig(job="my-job")


def test_a_job_must_be_named() -> None:
    """Without argument, environment and file there is no job to look at."""
    refused(slackwater("status"), "--job")


# -- etcd --------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_etcd_unreachable(free_port: int) -> None:
    """An etcd that does not answer is named with its address."""
    refused(slackwater("coordinator", "--job", "j", "--etcd", f"127.0.0.1:{free_port}"), str(free_port))


@pytest.mark.real
@pytest.mark.parametrize("command", [("coordinator",), ("status",), ("checkpoint",), ("checkpoints", "ls")])
def test_unknown_job(command: tuple[str, ...], etcd: EtcdCluster, store: EtcdStore, job: str) -> None:
    """A job that is not there is neither shown nor made."""
    refused(slackwater(*command, "--job", job, "--etcd", etcd.endpoints[0]), job)
    not_born(store, job)


@pytest.mark.real
def test_other_settings_are_named(etcd: EtcdCluster, store: EtcdStore, job: str, tmp_path: Path) -> None:
    """A job that runs with other settings refuses ours and names those that differ."""
    config, _ = load_config(job_file(tmp_path, job, etcd))
    bootstrap(store, config)
    text = f'job = "{job}"\nseed = 7\n[weights]\nmax_lag_steps = 9\n[site]\netcd = ["{etcd.endpoints[0]}"]\n'
    done = slackwater("coordinator", "--config", write(tmp_path / "other.toml", text))
    refused(done, "seed", "weights.max_lag_steps")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd that asks for a password: root has `rootpw`."""
    cluster = EtcdCluster(tmp_path / "locked", unsafe_no_fsync=True)
    cluster.start()
    with grpc.insecure_channel(cluster.endpoints[0]) as channel:
        auth = rpc.AuthStub(channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="rootpw"))
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(rpc.AuthEnableRequest())
    yield cluster
    cluster.kill()


@pytest.mark.real
def test_etcd_wrong_user_and_password(locked: EtcdCluster, job: str, tmp_path: Path) -> None:
    """A wrong password, an unknown user, none at all, a user without a password: each is named, and no job is born."""
    member = locked.endpoints[0]

    def start(site: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return slackwater("coordinator", "--config", job_file(tmp_path, job, locked, site), **environment)

    refused(start('etcd_user = "root"', SLACKWATER_ETCD_PASSWORD="wrong"), member, "'root'")
    refused(start('etcd_user = "nobody"', SLACKWATER_ETCD_PASSWORD="rootpw"), member, "'nobody'")
    refused(start(""), member)
    refused(start('etcd_user = "root"'), "SLACKWATER_ETCD_PASSWORD")
    store = EtcdStore([member], user="root", password="rootpw")
    not_born(store, job)
    store.close()


# -- S3 and the local directory ----------------------------------------------------------------------------


@pytest.mark.real
def test_s3_unreachable(
    etcd: EtcdCluster, store: EtcdStore, job: str, tmp_path: Path, free_port: int
) -> None:
    """No job is born towards an S3 that does not answer."""
    site = f's3_bucket = "b"\ns3_endpoint = "http://127.0.0.1:{free_port}"'
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    refused(
        slackwater("coordinator", "--config", job_file(tmp_path, job, etcd, site), **keys), str(free_port)
    )
    not_born(store, job)


@pytest.mark.real
def test_s3_wrong_keys(etcd: EtcdCluster, s3: S3Server, store: EtcdStore, job: str, tmp_path: Path) -> None:
    """Wrong credentials are refused with the bucket's name."""
    file = job_file(tmp_path, job, etcd, s3_lines(s3))
    done = slackwater("coordinator", "--config", file, **{**keys_of(s3), "AWS_SECRET_ACCESS_KEY": "wrong"})
    refused(done, s3.bucket)
    not_born(store, job)


@pytest.mark.real
def test_missing_bucket(etcd: EtcdCluster, s3: S3Server, store: EtcdStore, job: str, tmp_path: Path) -> None:
    """A bucket that does not exist is named."""
    file = job_file(tmp_path, job, etcd, s3_lines(s3, "not-there"))
    refused(slackwater("coordinator", "--config", file, **keys_of(s3)), "not-there")
    not_born(store, job)


@pytest.mark.real
def test_local_directory_that_cannot_be_written(etcd: EtcdCluster, job: str, tmp_path: Path) -> None:
    """A local tier below a file (nobody, not even root, can write there) is named."""
    write(tmp_path / "file", "")
    site = f'local = "{tmp_path / "file" / "local"}"'
    file = job_file(tmp_path, job, etcd, site)
    refused(slackwater("config", "check", "--site", file), "site.local", "file/local")


class Forgetful(BaseHTTPRequestHandler):
    """An S3 server in memory that overwrites what is there, whatever If-None-Match says."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    puts: ClassVar[list[str | None]] = []

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.puts.append(self.headers["If-None-Match"])
        self._answer(200)

    def do_GET(self) -> None:
        found = self.objects.get(self.path.partition("?")[0])
        self._answer(404 if found is None else 200, found or b"")

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def forgetful() -> Iterator[str]:
    """The address of a store without conditional writes."""
    Forgetful.objects.clear()
    Forgetful.puts.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.real
def test_store_without_conditional_writes(
    etcd: EtcdCluster, store: EtcdStore, forgetful: str, job: str, tmp_path: Path
) -> None:
    """A store that would overwrite a commit is refused by name before the job is born; the probe is removed."""
    file = job_file(tmp_path, job, etcd, f's3_bucket = "bucket"\ns3_endpoint = "{forgetful}"')
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    refused(
        slackwater("coordinator", "--config", file, **keys), "'bucket'", "conditional writes", "If-None-Match"
    )
    not_born(store, job)
    assert Forgetful.puts[:2] == ["*", "*"]
    assert Forgetful.objects == {}


def small_disk(folder: Path) -> list[str]:
    """A command prefix that runs what follows with 16 KiB of disk at `folder`; empty where none can be mounted."""
    folder.mkdir()
    script = f'mount -t tmpfs -o size=16k tmpfs "{folder}" && exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=20)
    return prefix if tried.returncode == 0 else []


@pytest.mark.real
def test_full_local_directory(etcd: EtcdCluster, job: str, tmp_path: Path) -> None:
    """A local tier without room for a probe of 64 KiB is named as full."""
    prefix = small_disk(tmp_path / "small")
    if not prefix:
        pytest.skip("no file system can be mounted here (unshare -rm)")
    file = job_file(tmp_path, job, etcd, f'local = "{tmp_path / "small"}"')
    argv = [sys.executable, "-m", "slackwater.adapters.cli", "config", "check", "--site", str(file)]
    done = subprocess.run([*prefix, *argv], capture_output=True, text=True, check=False, timeout=60)
    refused(done, "site.local", str(tmp_path / "small"), "is full")
