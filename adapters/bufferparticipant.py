"""Runs an experience buffer as the participant `buffer` of a job: a registration, a beat and one thread."""

from __future__ import annotations

import os
import socket
import threading

import structlog

from ..engine.beatport import BeatPort
from ..engine.bufferport import Buffer
from ..engine.bufferrole import BufferRole
from ..engine.config import JobConfig, Site
from ..engine.errors import Fenced, LeaseLost, NoSpace, SlackwaterError, Unavailable
from ..engine.follow import Follower
from ..engine.keys import BUFFER, Keys
from ..engine.membership import Membership
from ..engine.model import Alive, Participant, Record
from ..engine.ports import StateStore
from ..engine.settings import bootstrap
from ..engine.view import View
from .bufferparts import TieredParts
from .joining import join_when_free
from .services import Services, default_services

__all__ = ["BufferParticipant"]

_POLL_S = 0.5
_BUSY_POLL_S = 0.05
_RETRY_S = 0.5


class BufferParticipant:
    """`start` registers and begins to serve rounds and recoveries of `buffer`; `close` leaves the job.

    The buffer stays the caller's: it is neither opened nor closed here. `endpoint` is where others reach it, if
    anywhere. `crashed` is why the thread ended before `close`.
    """

    def __init__(
        self,
        buffer: Buffer,
        config: JobConfig,
        site: Site,
        *,
        endpoint: str = "",
        services: Services | None = None,
    ) -> None:
        self._buffer, self._config, self._site = buffer, config, site
        self._endpoint = endpoint
        self._services = services or default_services()
        self._keys = Keys(config.job)
        self._cache: dict[str, tuple[int, Record]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat: BeatPort | None = None
        self._store: StateStore | None = None
        self.crashed: BaseException | None = None
        self._log = structlog.get_logger().bind(participant=BUFFER, job=config.job)

    def start(self) -> None:
        """Register and start the thread. Blocks for a few calls, or for a lease when the slot is taken.

        Raises `SlotOccupied`, `Refused`, `AuthFailed`, `ConfigError`, `Unavailable`.
        """
        self._store = store = self._services.store(self._site)
        bootstrap(store, self._config)
        tier = self._services.tier(self._site, None)
        tier.prepare()
        objects = self._services.objects(self._site)
        self._beat = self._services.beat(self._config, self._site, BUFFER)
        template = Participant(
            name=BUFFER,
            role="buffer",
            incarnation="",
            timeline=0,
            endpoint=self._endpoint,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        membership = Membership(store, self._keys, template, self._beat)
        join_when_free(
            store,
            membership,
            self._config.timers.lease_s,
            lambda: Alive(incarnation="", buffer_version=self._buffer.version),
            covers_step=lambda: int(self._buffer.statistics().get("step", -1)),
        )
        role = BufferRole(membership, self._buffer, self._config, TieredParts(tier, objects))
        self._thread = threading.Thread(
            target=self._run, args=(store, role), name="slackwater-buffer", daemon=True
        )
        self._thread.start()

    def _run(self, store: StateStore, role: BufferRole) -> None:
        follower = Follower(store, self._keys.root)
        try:
            while not self._stopping.is_set():
                try:
                    view = View(self._keys, follower.kvs, follower.revision, self._cache)
                    follower.poll(_BUSY_POLL_S if view.round is not None else _POLL_S)
                    for key in follower.changed_keys:
                        if key not in follower.kvs:
                            self._cache.pop(key, None)
                    view = View(self._keys, follower.kvs, follower.revision, self._cache)
                    if view.revision >= role.membership.written_revision:
                        role.step(view)
                        role.report()
                except (Unavailable, LeaseLost, NoSpace) as error:
                    self._log.warning("etcd does not answer", error=str(error))
                    self._stopping.wait(_RETRY_S)
                except Fenced as error:
                    standing = role.membership.standing(view)
                    if standing == "replaced" or role.membership.beat.lost:
                        raise
                    self._log.info("the recovery moved on", reason=str(error))
        except BaseException as error:  # noqa: BLE001  # kept for the owner, which raises it
            self.crashed = error
            self._log.error("the buffer's participant ended", error=repr(error))
        finally:
            follower.close()
            self._role = role

    def close(self, ended: str = "left") -> None:
        """Stop the thread and say goodbye; errors of etcd are only logged. Idempotent."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(30.0)
            try:
                if ended and not thread.is_alive():
                    self._role.membership.end(ended)
            except SlackwaterError as error:
                self._log.warning("could not say goodbye; the lease will run out", error=str(error))
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()
