"""Attach a training script to a job.

    sw = attach(model, optimizer, scheduler, config="job.toml")
    step = sw.restore()
    while step < steps:
        train_one_step(step)
        step = sw.end_step()
    sw.close()

Every rank runs these lines. A script turns `ConfigError`, `Refused`, `AuthFailed` and `StateMismatch` into exit code 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from ..engine.bufferport import Buffer
from ..engine.config import JobConfig, Site, load_config
from ..engine.errors import DeadlineExceeded, Fenced, SlackwaterError
from ..engine.samples import Caller
from ..engine.snapshot import Snapshotter
from ..engine.tensorfile import FileSystem
from .bufferparticipant import BufferParticipant
from .export import read_hf_files
from .rng import RngState
from .services import RankBeat, Services, default_services
from .torchstate import TrainState
from .trainer_beats import make_beat
from .trainer_boundary import Boundary
from .trainer_cut import Cutter
from .trainer_gang import Command, Gang, as_error
from .trainer_images import Images
from .trainer_link import PartLink
from .trainer_publication import Publication
from .trainer_recovery import Recovery
from .trainer_seat import Seat
from .trainer_steward import Steward
from .trainer_writer import PartWriter

__all__ = ["Trainer", "attach"]


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    *,
    config: str | Path | tuple[JobConfig, Site],
    extras: Mapping[str, Any] | None = None,
    rank_extras: Mapping[str, Any] | None = None,
    buffer: Buffer | None = None,
    hf_files: Path | None = None,
    publish_dtype: torch.dtype | None = None,
    services: Services | None = None,
    files: FileSystem | None = None,
) -> Trainer:
    """Attach a model and what belongs to it; called by every rank, after `fully_shard` or DDP. No network.

    `config` is a TOML file or what `load_config` returned. `extras` and `rank_extras` are objects with a state_dict
    or plain dicts that are saved too, the same on all ranks or each rank's own; the random generators always are.
    With `buffer` (rank 0) its participant runs in this process. `hf_files` is a directory whose configuration and
    tokenizer files go into every published image, `publish_dtype` the dtype of published weights.
    """
    job, site = load_config(Path(config)) if isinstance(config, (str, Path)) else config
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ()
    schedulers = (
        () if scheduler is None else scheduler if isinstance(scheduler, (list, tuple)) else (scheduler,)
    )
    return Trainer(
        model,
        tuple(optimizers),
        tuple(schedulers),
        config=job,
        site=site,
        extras=extras,
        rank_extras=rank_extras,
        buffer=buffer,
        hf_files=hf_files,
        publish_dtype=publish_dtype,
        services=services,
        files=files,
    )


class Trainer:
    """One gang's attachment. Use `restore`, then `end_step` after each optimizer update, then `close`.

    All methods are collective: every rank calls them in the same order. Not thread-safe.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        *,
        config: JobConfig,
        site: Site,
        extras: Mapping[str, Any] | None,
        rank_extras: Mapping[str, Any] | None,
        buffer: Buffer | None,
        hf_files: Path | None,
        publish_dtype: torch.dtype | None,
        services: Services | None,
        files: FileSystem | None,
    ) -> None:
        self.config, self.site = config, site
        self.blocked_s = 0.0
        self._services = services or default_services()
        self._gang = gang = Gang()
        self._seat = seat = Seat(config, gang)
        self._tier = self._services.tier(site, files)
        own = {"rng": RngState(), **(rank_extras or {})}
        place = {"rank": gang.rank, "world_size": gang.world_size}
        state = TrainState(model, optimizers, schedulers, extras, own, **place)
        small = read_hf_files(hf_files) if hf_files is not None and gang.rank == 0 else {}
        images = Images(model, site.images_dir.absolute(), small, publish_dtype, gang)
        self._snapshotter = Snapshotter(f"r{gang.rank:05d}", files=files)
        self._recovery = Recovery(seat, state, self._tier)
        self._publication = Publication(seat, images)
        self._boundary = Boundary(seat, self._publication)
        self._cutter = Cutter(seat, state, self._snapshotter, self._publication)
        self._buffer = buffer
        self._participant: BufferParticipant | None = None
        self._beat: RankBeat | None = None
        self._link: PartLink | None = None
        self._writer: PartWriter | None = None
        self._opened = self._closed = False

    # -- what a script calls -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._gang.rank

    @property
    def step(self) -> int:
        """Optimizer updates done, on the lineage that this state is of."""
        return self._seat.step

    @property
    def timeline(self) -> int:
        """The timeline of the last grant to train; 0 before it."""
        return self._seat.timeline

    @property
    def incarnation(self) -> str:
        """The id of this life of the trainer; empty before the first grant."""
        return self._seat.incarnation

    @property
    def caller(self) -> Caller:
        """What calls to the experience buffer must carry; valid after `restore`, changes with a recovery."""
        return Caller(timeline=self.timeline, incarnation=self.incarnation)

    @property
    def restored_from(self) -> int:
        """The checkpoint that the state was restored from last; 0 for the job's beginning."""
        return self._recovery.restored_from

    @property
    def remarks(self) -> list[str]:
        """What people should know of the last restore; empty when everything came back as it was."""
        return self._recovery.remarks

    def restore(self) -> int:
        """Join the job, take part in its recovery, and return the training step to go on from (0 at a birth).

        Blocks until the coordinator grants training. Raises `SlotOccupied`, `Refused`, `AuthFailed`, `ConfigError`,
        `Unavailable` (etcd or the object store at the start), `StateMismatch` (the checkpoint is of another model),
        on every rank.
        """
        if not self._opened:
            self._together(self._link_parts)
            self._together(self._link_beats)
            self._together(self._join)
            self._opened = True
        return self._recover()

    def end_step(self) -> int:
        """Call after each optimizer update, by every rank; returns the training step to go on from.

        That is one more than before, or the restored step when a recovery took the gang back. Publishes, takes the
        snapshot of a checkpoint, or stands when the protocol wants it. Raises `Fenced` when this life is over.
        """
        self._seat.step += 1
        self._seat.is_new = False
        return self.idle()

    def idle(self) -> int:
        """What `end_step` does, without a step having been done: when there is nothing to train on just now.

        Call it by every rank; publishes, saves, stands and goes back like `end_step`.
        """
        self._raise_crashed()
        started = time.perf_counter()
        while True:
            command = self._seat.ask(self._boundary.judge)
            if command.kind == "go":
                self.blocked_s = time.perf_counter() - started
                return self.step
            if command.kind == "rewind":
                return self._recover()
            self._obey(command)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the open save and its upload, then leave the job; idempotent, collective.

        Raises what kept the newest save from becoming a checkpoint, or a checkpoint from becoming durable, and
        `DeadlineExceeded` after `timeout_s` (default: the deadlines of a save). Nothing is left running either way.
        """
        if self._opened and not self._closed:
            timers = self.config.timers
            patience_s = (
                timeout_s if timeout_s is not None else timers.ready_deadline_s + timers.save_deadline_s
            )
            self._together(lambda: self._drain(patience_s), "left")
        self._release("left")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        beat, self._beat = (self._beat, None) if self.rank > 0 else (None, self._beat)
        if beat is not None:
            beat.abandon()  # so rank 0's beat hears that this rank ended, not that it left
        self._release("exited", repr(error)[:200])

    # -- opening -------------------------------------------------------------------------------------------

    def _together(self, call: Callable[[], None], ended: str = "exited") -> None:
        """Run a call on every rank; when it fails on one, all let go and raise."""
        try:
            self._gang.together(call)
        except (SlackwaterError, OSError) as error:
            self._release(ended, f"{type(error).__name__}: {error}"[:200])
            raise

    def _link_parts(self) -> None:
        self._link = PartLink(self._gang)

    def _link_beats(self) -> None:
        self._beat = make_beat(self._gang, self._services, self.config, self.site)

    def _join(self) -> None:
        link, beat, rank = self._link, self._beat, self._gang.rank
        if link is None or beat is None:
            raise RuntimeError("the ranks are not linked")
        self._tier.prepare()
        if rank == 0:
            steward = Steward(self.config, self.site, self._services, self._tier, link, self._gang.world_size)
            self._seat.steward = steward
            steward.open(beat)
            self._recovery.objects = steward.objects
        else:
            beat.open()
            self._recovery.objects = self._services.objects(self.site)
        timers = self.config.timers
        wait_s = 60.0 + timers.ready_deadline_s + 2 * timers.save_deadline_s
        self._writer = PartWriter(self._tier, link, rank, wait_s)
        if self._buffer is not None and rank == 0:
            self._participant = BufferParticipant(
                self._buffer, self.config, self.site, services=self._services
            )
            self._participant.start()

    # -- what rank 0 says ----------------------------------------------------------------------------------

    def _recover(self) -> int:
        """Follow the recovery until training may begin; the step to go on from."""
        seat = self._seat
        while True:
            command = seat.ask(self._recovery.next_task)
            if command.kind == "go":
                seat.step, seat.timeline = command.step, command.timeline
                seat.incarnation = str(command.decoded()["incarnation"])
                if seat.steward is not None:
                    seat.steward.role.state = "training"
                    seat.steward.adopt_local(seat.steward.view)
                seat.log.info("training may begin", step=seat.step, timeline=seat.timeline)
                return seat.step
            self._obey(command)

    def _obey(self, command: Command) -> None:
        """What every rank does for a command that does not end the step."""
        if command.kind == "restore":
            self._restore(command)
        elif command.kind == "publish":
            self._publication.publish()
        elif command.kind == "cut":
            if self._writer is None:
                raise RuntimeError("the trainer is not open")
            self._cutter.cut(command, self._writer)
        elif command.kind == "stop":
            self._release("")
            raise Fenced(f"the trainer's life is over: {command.payload.decode()}")
        elif command.kind == "error":
            name, text = msgspec.json.decode(command.payload)
            self._release("exited", text[:200])
            raise as_error([(0, name, text)])

    def _restore(self, command: Command) -> None:
        try:
            self._recovery.restore(command)
        except SlackwaterError as error:
            self._release("exited", f"{type(error).__name__}: {error}"[:200])
            raise

    # -- the end -------------------------------------------------------------------------------------------

    def _raise_crashed(self) -> None:
        """Raise what ended a thread of this process, or that another rank is gone."""
        steward, beat = self._seat.steward, self._beat
        uploader = steward.uploader if steward is not None else None
        for holder in (steward, self._writer, self._participant, uploader):
            if holder is not None and holder.crashed is not None:
                raise holder.crashed
        if beat is not None and self.rank > 0 and beat.lost:
            raise Fenced(f"the gang is over: {beat.lost}")

    def _drain(self, patience_s: float) -> None:
        writer, steward = self._writer, self._seat.steward
        if writer is None:
            return
        deadline = time.monotonic() + patience_s
        if not writer.drain(patience_s):
            raise DeadlineExceeded(f"the last save did not end within {patience_s:g} s")
        uploader = steward.uploader if steward is not None else None
        if steward is not None:
            steward.rounds.wait_closed(max(1.0, deadline - time.monotonic()))
        if uploader is not None and not uploader.drain(max(1.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"uploads did not end within {patience_s:g} s")
        self._raise_crashed()
        if writer.last_error:
            raise SlackwaterError(f"the last save is no checkpoint: {writer.last_error}")
        if uploader is not None and uploader.error is not None:
            raise uploader.error

    def _release(self, ended: str, reason: str = "") -> None:
        """Let go of everything; never raises for etcd. Idempotent."""
        self._closed = True
        participant, self._participant = self._participant, None
        if participant is not None:
            participant.close(ended)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        steward, self._seat.steward = self._seat.steward, None
        if steward is not None:
            steward.close(ended, reason)
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.close()
        self._snapshotter.close()
