"""Where a command finds its job: arguments beat the environment, and both beat the configuration file."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ..backends.etcd import EtcdStore
from ..engine.config import JobConfig, Site, load_config
from ..engine.errors import ConfigError, NoSpace, Refused
from ..engine.keys import Keys
from ..engine.model import ConfigRecord, decode
from ..engine.ports import StateStore
from ..engine.settings import read_config
from ..engine.view import View
from .stores import open_store

__all__ = [
    "ConfigOption",
    "EtcdOption",
    "JobOption",
    "JsonOption",
    "Place",
    "check_local",
    "console",
    "find_place",
    "look",
    "look_even_if_unborn",
    "opened",
    "print_json",
    "read_job",
]

_PIPE_COLUMNS = 400

JobOption = Annotated[
    str | None, typer.Option("--job", envvar="SLACKWATER_JOB", help="Name of the job.", show_default=False)
]
EtcdOption = Annotated[
    str | None,
    typer.Option("--etcd", envvar="SLACKWATER_ETCD", help="etcd members: host:port,host:port,…"),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The job's TOML file (settings and [site]).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A job and the way to it; `config` only when a file was named."""

    job: str
    site: Site
    config: JobConfig | None

    @property
    def keys(self) -> Keys:
        """The job's keys."""
        return Keys(self.job)


def find_place(config: Path | None, job: str | None, etcd: str | None) -> Place:
    """Put arguments, environment and file together; reads the file only. `ConfigError` says what is missing."""
    members = [member.strip() for member in etcd.split(",") if member.strip()] if etcd else []
    if config is not None:
        overrides: dict[str, Any] = {"job": job} if job else {}
        if members:
            overrides["site"] = {"etcd": members}
        settings, site = load_config(config, overrides)
        return Place(job=settings.job, site=site, config=settings)
    if not job:
        raise ConfigError("which job? give --job, SLACKWATER_JOB or --config")
    site = Site(etcd=tuple(members)) if members else Site()
    return Place(job=Keys(job).job, site=site, config=None)


@contextmanager
def opened(place: Place) -> Iterator[EtcdStore]:
    """The place's etcd, which answered once; closed at the end of the block."""
    store = open_store(place.site)
    try:
        yield store
    finally:
        store.close()


def look(store: StateStore, place: Place) -> View:
    """The whole job at one revision, read only. `Refused` when there is no such job."""
    view = look_even_if_unborn(store, place)
    if view.config is None:
        raise Refused(_unknown(place))
    return view


def look_even_if_unborn(store: StateStore, place: Place) -> View:
    """What etcd holds below the job's prefix at one revision, be it nothing."""
    found = store.range(place.keys.root)
    return View(place.keys, {kv.key: kv for kv in found.kvs}, found.revision, {})


def read_job(store: StateStore, place: Place) -> JobConfig:
    """The settings of a job that runs already. `Refused` when there is no such job."""
    kv = store.get(place.keys.config)
    if kv is None:
        raise Refused(_unknown(place))
    return read_config(decode(ConfigRecord, kv.value, kv.key))


def _unknown(place: Place) -> str:
    return f"there is no job {place.job!r} in etcd at {', '.join(place.site.etcd)}"


def check_local(site: Site) -> None:
    """Write, sync and remove a small file in the local tier's directory, which is made when missing.

    `ConfigError` when it cannot be written, `NoSpace` when it is full; each names the directory.
    """
    directory = Path(site.local)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"local directory {directory} (site.local) is full: {error.strerror}") from error
        raise ConfigError(
            f"local directory {directory} (site.local) cannot be written: {error.strerror}"
        ) from error


def console() -> Console:
    """Tables and lines on stdout: as wide as the terminal, and never folded for a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)


def print_json(value: object) -> None:
    """One JSON document on stdout, indented."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
