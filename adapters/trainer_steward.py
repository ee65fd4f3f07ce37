"""Rank 0's side towards etcd: the store, the registration, and a thread that follows the job and serves its rounds."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import structlog

from ..engine.beatport import BeatPort
from ..engine.config import JobConfig, Site
from ..engine.errors import DeadlineExceeded, NotFound, SlackwaterError, Unavailable
from ..engine.filetier import FileTier
from ..engine.follow import Follower
from ..engine.keys import TRAINER, Keys
from ..engine.manifest import COMMITTED_NAME, MANIFEST_NAME, Header, VersionVector
from ..engine.membership import Membership
from ..engine.model import Alive, Checkpoint, Participant, Record
from ..engine.ports import StateStore
from ..engine.settings import bootstrap
from ..engine.trainerrole import TrainerRole
from ..engine.upload import UploadStore
from ..engine.view import View
from .joining import join_when_free
from .retention import Janitor
from .services import Services
from .trainer_link import PartLink
from .trainer_rounds import RoundDriver, committed_bytes
from .trainer_uploads import Uploader

__all__ = ["Steward"]

_POLL_S = 0.5
_SAVING_POLL_S = 0.05
_RETRY_S = 0.5
_REPAIR_S = (
    60.0  # how often an upload that was given up, or a `committed.json` that is missing, is tried again
)


class Steward:
    """Everything of the trainer that only rank 0 has. `open` before use; methods are for the training thread."""

    def __init__(
        self,
        config: JobConfig,
        site: Site,
        services: Services,
        tier: FileTier,
        link: PartLink,
        world_size: int,
    ) -> None:
        self.config, self._site, self._services = config, site, services
        self._tier, self._link, self._world_size = tier, link, world_size
        self.keys = Keys(config.job)
        self.host = socket.gethostname()
        self.job_uid = ""
        self.objects: UploadStore | None = None
        self.uploader: Uploader | None = None
        self._store: StateStore | None = None
        self._janitor: Janitor | None = None
        self._cache: dict[str, tuple[int, Record]] = {}
        self._news = threading.Condition()
        self._view = View(self.keys, {}, 0, self._cache)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.crashed: BaseException | None = None
        self._log = structlog.get_logger().bind(participant=TRAINER, job=config.job)
        self.role: TrainerRole
        self.rounds: RoundDriver

    # -- life ----------------------------------------------------------------------------------------------

    def open(self, beat: BeatPort) -> None:
        """Reach the stores, register under `beat` (the caller closes it), begin to follow.

        Blocks for a few calls, or for a lease when the slot is taken.
        Raises `SlotOccupied`, `Refused`, `AuthFailed`, `ConfigError`, `Unavailable`, `NotFound`.
        """
        self._store = store = self._services.store(self._site)
        self.job_uid = bootstrap(store, self.config).job_uid
        self.objects = self._services.objects(self._site)
        template = Participant(
            name=TRAINER,
            role="trainer",
            incarnation="",
            timeline=0,
            host=self.host,
            pid=os.getpid(),
            world_size=self._world_size,
        )
        membership = Membership(store, self.keys, template, beat)
        start = Alive(incarnation="", state="idle")
        join_when_free(store, membership, self.config.timers.lease_s, lambda: start)
        self.role = TrainerRole(store, membership, self.config)
        if self.objects is not None:
            self.uploader = Uploader(self.role, self._tier, self.objects, self._site.remote_address)
        self.rounds = RoundDriver(self.role, self._tier, self._link, self._world_size, self._upload)
        self._janitor = Janitor(self.role, self.host, self._tier, self.objects)
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="slackwater-follow", daemon=True
        )
        self._thread.start()

    def close(self, ended: str, reason: str = "") -> None:
        """Say goodbye and let go of everything; errors of etcd are only logged. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if self.uploader is not None:
            self.uploader.close()
        if self._thread is not None and ended:
            try:
                self.role.membership.end(ended, reason)
            except SlackwaterError as error:
                self._log.warning("could not say goodbye; the lease will run out", error=str(error))
        self._thread = None
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # -- the view ------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest state of the job that was seen."""
        return self._view

    def wait_news(self, timeout_seconds: float) -> View:
        """The next state, or the same one when nothing came in time."""
        with self._news:
            revision = self._view.revision
            self._news.wait_for(
                lambda: self._view.revision != revision or self._stopping.is_set(), timeout_seconds
            )
            return self._view

    def caught_up(self, timeout_seconds: float = 30.0) -> View:
        """A view that is not older than our own last write. `DeadlineExceeded` when etcd stays silent."""
        wanted = max(self.role.membership.written_revision, self.role.membership.registration_mod)
        with self._news:
            done = self._news.wait_for(
                lambda: self._view.revision >= wanted or self.crashed is not None, timeout_seconds
            )
            if not done:
                raise DeadlineExceeded(f"etcd did not show revision {wanted} within {timeout_seconds:g} s")
            return self._view

    def _run(self, store: StateStore) -> None:
        follower = Follower(store, self.keys.root)
        swept, repaired = 0.0, time.monotonic()
        try:
            while not self._stopping.is_set():
                try:
                    follower.poll(_SAVING_POLL_S if self.rounds.open else _POLL_S)
                except SlackwaterError as error:
                    if not isinstance(error, Unavailable):
                        raise
                    self._log.warning("etcd does not answer", error=str(error))
                    self._stopping.wait(_RETRY_S)
                    continue
                if follower.revision != self._view.revision or follower.changed_keys:
                    self._show(follower)
                self.rounds.step(self._view)
                if self._janitor is not None and time.monotonic() - swept > 2.0:
                    swept = time.monotonic()
                    self._janitor.sweep(self._view)
                go = self._view.go
                if time.monotonic() - repaired > _REPAIR_S and go is not None:
                    repaired = time.monotonic()
                    if go.incarnation == self.role.membership.incarnation:
                        self._repair(self._view)
        except BaseException as error:  # noqa: BLE001  # kept for the training thread, which raises it
            self.crashed = error
            self._log.error("following etcd failed", error=repr(error))
        finally:
            follower.close()
            with self._news:
                self._news.notify_all()

    def _show(self, follower: Follower) -> None:
        for key in follower.changed_keys:
            if key not in follower.kvs:
                self._cache.pop(key, None)
        view = View(self.keys, dict(follower.kvs), follower.revision, self._cache)
        with self._news:
            self._view = view
            self._news.notify_all()

    # -- checkpoints ---------------------------------------------------------------------------------------

    def header(self, *, round_: int, attempt: str, step: int) -> Header:
        """The header of an attempt, as far as it is known at the cut."""
        return Header(
            job=self.config.job,
            job_uid=self.job_uid,
            timeline=self.role.membership.timeline,
            round=round_,
            attempt=attempt,
            vector=VersionVector(training_step=step, weight_version=0, buffer_version=0),
            world_size=self._world_size,
            identity=dict(self.config.identity),
        )

    def found_data(self, view: View) -> str:
        """Where a `committed.json` of this job lies although etcd has no checkpoint; "" when there is none."""
        if view.checkpoints():
            return ""
        for path, _ in self._tier.committed(self.config.job):
            return f"{self._tier.root}/{path}/{COMMITTED_NAME}"
        if self.objects is not None:
            for found in self.objects.list(f"{self.config.job}/"):
                if found.key.endswith(f"/{COMMITTED_NAME}"):
                    return self._site.remote_address(found.key)
        return ""

    def adopt_local(self, view: View) -> None:
        """Repair a missing `committed.json` of this host and upload what is committed but not durable."""
        self._repair(view)
        self._sweep(view)

    def _repair(self, view: View) -> None:
        """As far as this host can: an error is for the log and the next time, not for the training."""
        try:
            self._put_right(view)
        except SlackwaterError as error:
            self._log.warning("not repaired yet", reason=str(error))

    def _put_right(self, view: View) -> None:
        for record in view.eligible():
            if record.host != self.host or not (Path(self._tier.root) / record.path).is_dir():
                continue
            try:
                self._tier.read_json(f"{record.path}/{COMMITTED_NAME}")
            except NotFound:
                header = self.header(round_=record.round, attempt="", step=record.training_step)
                self._tier.write_json(
                    f"{record.path}/{COMMITTED_NAME}", committed_bytes(view, header, record)
                )
            if record.state == "committed":
                self._upload(record)

    def _sweep(self, view: View) -> None:
        """Remove what rounds of earlier lives left half written on this host; no record names it.

        An attempt with a manifest stays: after a loss of etcd a person may want to look at it.
        """
        kept = {record.path for record in view.checkpoints().values()}
        kept |= {holder.path for holder in (view.freeze, view.round) if holder is not None}
        for path in list(self._tier.leftovers(f"{self.config.job}/{self.job_uid}")):
            if path in kept or (self._tier.root / path / MANIFEST_NAME).exists():
                continue
            try:
                self._tier.remove(path)
                self._log.info("removed a leftover", path=path)
            except SlackwaterError as error:
                self._log.warning("a leftover stays", path=path, reason=str(error))

    def _upload(self, record: Checkpoint) -> None:
        if self.uploader is not None:
            self.uploader.submit(record)
