"""`slackwater coordinator`: one replica in a loop; it leads when it is the oldest, and leaves cleanly when asked."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType
from typing import Annotated

import structlog
import typer

from ..backends.etcd import EtcdStore
from ..engine.config import JobConfig
from ..engine.coordinator import Coordinator
from ..engine.errors import LeaseLost, Unavailable
from ..engine.keys import Keys
from ..engine.session import Session, SessionKeeper
from ..engine.settings import bootstrap
from .cli_place import ConfigOption, EtcdOption, JobOption, Place, find_place, read_job
from .stores import open_objects, open_store

__all__ = ["Replica", "coordinator"]

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 0.5
_CALL_SECONDS = 5.0

NameOption = Annotated[str, typer.Option("--name", help="What the log calls this replica [host-pid].")]


class Replica:
    """One candidate after another, each with a session of its own, until `stop`. The constructor does no I/O.

    The caller owns `store` and closes it when `run` has returned.
    """

    def __init__(self, store: EtcdStore, config: JobConfig, name: str) -> None:
        self._store = store
        self._keys = Keys(config.job)
        self._ttl_seconds = config.timers.lease_s
        self._name = name
        self._stopping = threading.Event()
        self._log = structlog.get_logger().bind(job=config.job, replica=name)

    def stop(self) -> None:
        """Ask `run` to resign and return. Fit for a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Serve until `stop`. Blocks; rides out an etcd that is away, raises what cannot be ridden out."""
        self._log.info("candidate", pid=os.getpid())
        while not self._stopping.is_set():
            try:
                self._serve_one_session()
            except LeaseLost as error:
                self._log.warning("lease lost; a candidate again with a new one", error=str(error))
            except Unavailable as error:
                self._log.warning("etcd does not answer", error=str(error))
                self._stopping.wait(_RETRY_SECONDS)
        self._log.info("resigned")

    def _serve_one_session(self) -> None:
        session = Session(self._store, self._ttl_seconds)
        session.open()
        keeper = SessionKeeper(session)
        keeper.start()
        identity: dict[str, object] = {"id": self._name, "host": socket.gethostname(), "pid": os.getpid()}
        replica = Coordinator(self._store, self._keys, session, identity)
        try:
            while not self._stopping.is_set():
                replica.step(_LOOK_SECONDS)
        finally:
            replica.close()
            keeper.stop()
            session.close()


def coordinator(
    config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None, name: NameOption = ""
) -> None:
    """Run one coordinator replica until Ctrl-C or SIGTERM; any number may run, the oldest leads.

    With --config it creates the job when it is not there yet, and otherwise compares the settings.
    With --job and --etcd alone it joins a job that exists.
    """
    place = find_place(config, job, etcd)
    store = open_store(place.site)
    try:
        settings = _settle(store, place)
        # Calls must give up early enough for a lease to be renewed by the next one.
        if settings.timers.lease_s < 3 * _CALL_SECONDS:
            store.close()
            store = open_store(place.site, call_timeout_seconds=settings.timers.lease_s / 4)
        replica = Replica(store, settings, name or f"{socket.gethostname()}-{os.getpid()}")
        _serve(replica)
    finally:
        store.close()


def _settle(store: EtcdStore, place: Place) -> JobConfig:
    """The job's settings: those in etcd, or ours as the first. Everything is checked before anything is written."""
    if place.config is None:
        return read_job(store, place)
    if store.get(place.keys.config) is None:
        objects = open_objects(place.site)  # a job is not born towards a bucket that it cannot use
        if objects is not None:
            objects.close()
    bootstrap(store, place.config)
    return read_job(store, place)


def _serve(replica: Replica) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        replica.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        replica.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
