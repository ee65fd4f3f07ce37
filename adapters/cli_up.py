"""`slackwater up`: etcd and an S3 server on loopback in one directory, for development."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ..backends.embedded import EtcdCluster, S3Server
from ..engine.errors import ConfigError

__all__ = ["up"]


def up(
    directory: Annotated[Path, typer.Argument(help="A new or empty directory.")] = Path("slackwater-dev"),
    members: Annotated[int, typer.Option("--members", help="etcd members: 1 or 3.")] = 1,
) -> None:
    """Run etcd and S3 for development until Ctrl-C, and print how to reach them.

    Not for production: everything is on this machine, without TLS or passwords for etcd.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        used = any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error
    if used:
        raise ConfigError(f"{directory} is not empty: servers of an earlier run cannot be taken up again")
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with EtcdCluster(directory / "etcd", members) as etcd, S3Server(directory / "s3") as s3:
            typer.echo(_describe(directory, etcd, s3))
            stopping.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(directory: Path, etcd: EtcdCluster, s3: S3Server) -> str:
    members = ",".join(etcd.endpoints)
    listed = ", ".join(f'"{member}"' for member in etcd.endpoints)
    local = (directory / "local").absolute()
    return f"""\
# for every shell that takes part
export SLACKWATER_ETCD={members}
export ETCDCTL_ENDPOINTS={members}
export AWS_ACCESS_KEY_ID={s3.access_key}
export AWS_SECRET_ACCESS_KEY={s3.secret_key}

# for the configuration file
[site]
etcd = [{listed}]
local = "{local}"
s3_bucket = "{s3.bucket}"
s3_endpoint = "{s3.url}"
s3_region = "{s3.region}"

# running; Ctrl-C ends both"""
