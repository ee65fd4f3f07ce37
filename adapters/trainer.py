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

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import structlog
import torch

from ..engine import errors
from ..engine.boundary import Directive
from ..engine.bufferport import Buffer
from ..engine.config import JobConfig, Site, load_config
from ..engine.errors import (
    CorruptCheckpoint,
    DeadlineExceeded,
    Fenced,
    LeaseLost,
    SlackwaterError,
    StateMismatch,
    Unavailable,
)
from ..engine.manifest import attempt_path
from ..engine.model import Checkpoint
from ..engine.samples import Caller
from ..engine.snapshot import Snapshotter, Staged
from ..engine.tensorfile import FileSystem
from ..engine.upload import UploadStore
from .bufferparticipant import BufferParticipant
from .export import read_hf_files
from .rng import RngState
from .services import Services, default_services
from .torchstate import Capture, TrainState
from .trainer_gang import Command, Gang, PartLink, first_failure
from .trainer_publisher import Publisher
from .trainer_restorer import restore_state
from .trainer_rounds import OpenSave
from .trainer_steward import Steward
from .trainer_writer import PartWriter, SaveJob

__all__ = ["Trainer", "attach"]

_HOLD_S = 1.0  # how often a standing gang hears from rank 0
_REPEAT_S = 2.0  # how often a standing trainer tries a refused publication again


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
        self._services = services or default_services()
        self._gang = Gang()
        self._tier = self._services.tier(site, files)
        own = {"rng": RngState(), **(rank_extras or {})}
        place = {"rank": self._gang.rank, "world_size": self._gang.world_size}
        self._state = TrainState(model, optimizers, schedulers, extras, own, **place)
        self._snapshotter = Snapshotter(f"r{self._gang.rank:05d}", files=files)
        small = read_hf_files(hf_files) if hf_files is not None and self._gang.rank == 0 else {}
        self._publisher = Publisher(model, site.images_dir.absolute(), small, publish_dtype, self._gang)
        self._buffer = buffer
        self._participant: BufferParticipant | None = None
        self._steward: Steward | None = None
        self._writer: PartWriter | None = None
        self._objects: UploadStore | None = None
        self._opened = self._closed = self._born = False
        self._said = ""
        self._retried_at = 0.0
        self.step = 0
        self.timeline = 0
        self.incarnation = ""
        self.restored_from = 0
        self.blocked_s = 0.0
        self.remarks: list[str] = []
        self._log = structlog.get_logger().bind(participant="trainer", rank=self._gang.rank)

    # -- what a script calls -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._gang.rank

    @property
    def caller(self) -> Caller:
        """What calls to the experience buffer must carry; valid after `restore`, changes with a recovery."""
        return Caller(timeline=self.timeline, incarnation=self.incarnation)

    def restore(self) -> int:
        """Join the job, take part in its recovery, and return the training step to go on from (0 at a birth).

        Blocks until the coordinator grants training. Raises `SlotOccupied`, `Refused`, `AuthFailed`, `ConfigError`,
        `Unavailable` (etcd or the object store at the start), `StateMismatch` (the checkpoint is of another model),
        on every rank.
        """
        if not self._opened:
            self._together(self._open)
            self._opened = True
        return self._recover()

    def end_step(self) -> int:
        """Call after each optimizer update, by every rank; returns the training step to go on from.

        That is one more than before, or the restored step when a recovery took the gang back. Publishes, takes the
        snapshot of a checkpoint, or stands when the protocol wants it. Raises `Fenced` when this life is over.
        """
        self.step += 1
        return self.idle()

    def idle(self) -> int:
        """What `end_step` does, without a step having been done: when there is nothing to train on just now.

        Call it by every rank; publishes, saves, stands and goes back like `end_step`.
        """
        self._raise_crashed()
        started = time.perf_counter()
        while True:
            command = self._gang.broadcast(self._judge() if self._steward is not None else None)
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
        if self._closed or not self._opened:
            self._release("left")
            return
        self._closed = True
        timers = self.config.timers
        patience = timeout_s if timeout_s is not None else timers.ready_deadline_s + timers.save_deadline_s
        error: BaseException | None = None
        try:
            self._drain(patience)
        except (SlackwaterError, OSError) as found:
            error = found
        failures = self._gang.failures(error)
        if failures:
            self._release("left", first_failure(failures)[:200])
            raise error if error is not None else _as_error(failures)
        self._release("left")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release("exited", repr(error)[:200])

    # -- opening -------------------------------------------------------------------------------------------

    def _together(self, call: Any) -> None:
        """Run a call on every rank; when one fails all raise, each its own error or the first one's."""
        error: BaseException | None = None
        try:
            call()
        except (SlackwaterError, OSError) as found:
            error = found
        failures = self._gang.failures(error)
        if failures:
            self._release("exited", first_failure(failures)[:200])
            raise error if error is not None else _as_error(failures)

    def _open(self) -> None:
        link = PartLink(self._gang)
        self._tier.prepare()
        timers = self.config.timers
        wait = 60.0 + timers.ready_deadline_s + 2 * timers.save_deadline_s
        if self._gang.rank == 0:
            self._steward = Steward(
                self.config, self.site, self._services, self._tier, link, self._gang.world_size
            )
            self._steward.open()
            self._objects = self._steward.objects
        else:
            self._objects = self._services.objects(self.site)
        self._writer = PartWriter(self._tier, link, self._gang.rank, wait)
        if self._buffer is not None and self._gang.rank == 0:
            self._participant = BufferParticipant(
                self._buffer, self.config, self.site, services=self._services
            )
            self._participant.start()

    # -- recovery ------------------------------------------------------------------------------------------

    def _recover(self) -> int:
        while True:
            command = self._gang.broadcast(self._next_task() if self._steward is not None else None)
            if command.kind == "go":
                self.step, self.timeline = command.step, command.timeline
                self.incarnation = str(command.decoded()["incarnation"])
                if self._steward is not None:
                    self._steward.role.state = "training"
                    self._steward.adopt_local(self._steward.view)
                self._log.info("training may begin", step=self.step, timeline=self.timeline)
                return self.step
            if command.kind == "restore":
                self._restore(command)
            else:
                self._obey(command)

    def _next_task(self) -> Command:
        """Rank 0: what the open recovery wants next; `wait` after at most a second without news."""
        steward = self._steward
        if steward is None:
            raise RuntimeError("only rank 0 asks for tasks")
        try:
            view = steward.caught_up(_HOLD_S)
            role = steward.role
            task = role.recovery_task(view)
            if task == "acknowledge":
                role.acknowledge(view, steward.found_data(view))
            elif task == "restore":
                role.state = "loading"
                role.report(view)
                recovery = view.recovery
                number = recovery.checkpoint if recovery is not None else 0
                record = view.checkpoints().get(number) if number else None
                if recovery is not None and (record is not None or not number):
                    payload = msgspec.json.encode(record) if record is not None else b""
                    return Command("restore", round=number, token=recovery.recovery, payload=payload)
            elif task == "publish":
                return Command("publish")
            elif task == "go":
                step = role.step
                payload = msgspec.json.encode({"incarnation": role.membership.incarnation})
                return Command("go", step=step, timeline=role.membership.timeline, payload=payload)
            elif task == "over":
                return Command(
                    "stop", payload=b"another incarnation took over, or this one was declared failed"
                )
            role.report(view, waits_for=_waits_for(view))
        except Fenced as error:
            self._log.info("the recovery moved on", reason=str(error))
        except (Unavailable, LeaseLost, DeadlineExceeded) as error:
            if steward.role.membership.beat.lost:
                return Command("stop", payload=steward.role.membership.beat.lost.encode())
            self._log.warning("waiting for etcd", error=str(error))
        except SlackwaterError as error:
            return Command("error", payload=msgspec.json.encode([type(error).__name__, str(error)]))
        steward.wait_news(_HOLD_S)
        return Command("wait")

    def _restore(self, command: Command) -> None:
        """Every rank loads its share; rank 0 answers for all."""
        started = time.monotonic()
        error: SlackwaterError | None = None
        record = msgspec.json.decode(command.payload, type=Checkpoint) if command.payload else None
        remarks: list[str] = []
        tiers = ""
        step = 0
        if record is None:
            if self._born:
                error = Fenced(
                    f"recovery {command.token} goes back to the job's beginning, and this state is not new any more: "
                    "start the trainer again"
                )
        else:
            try:
                remarks, tiers = restore_state(
                    self._state, record, self._tier, self._objects, self.config.seed
                )
                step = record.training_step
            except SlackwaterError as found:
                error = found
        failures = self._gang.failures(error)
        if not failures:
            self._born = True
            self.step, self.restored_from, self.remarks = step, command.round, remarks
            if record is not None:
                self._log.info("restored", checkpoint=command.round, step=step, tiers=tiers, remarks=remarks)
        self._answer_restore(command, failures, step, tiers, time.monotonic() - started)
        fatal = [one for one in failures if one[1] not in (CorruptCheckpoint.__name__, Unavailable.__name__)]
        if fatal:
            self._release("exited", first_failure(fatal)[:200])
            raise error if error is not None and type(error).__name__ == fatal[0][1] else _as_error(fatal)

    def _answer_restore(
        self, command: Command, failures: list[tuple[int, str, str]], step: int, tiers: str, seconds: float
    ) -> None:
        steward = self._steward
        if steward is None:
            return
        role, number, checkpoint = steward.role, command.token, command.round
        try:
            if not failures:
                report = {"tiers": tiers, "seconds": round(seconds, 3), "remarks": self.remarks}
                role.restored(number, checkpoint, step, report)
                return
            text = first_failure(failures)
            if any(name == StateMismatch.__name__ for _, name, _ in failures):
                return  # this script's fault, not the checkpoint's: the recovery waits for another trainer
            skip = all(name == CorruptCheckpoint.__name__ for _, name, _ in failures)
            self._log.error("could not restore", checkpoint=checkpoint, error=text)
            role.restore_failed(number, checkpoint, text, unverified=skip)
        except (Fenced, LeaseLost, Unavailable) as error:
            self._log.warning("the recovery moved on", reason=str(error))

    # -- the end of a step ---------------------------------------------------------------------------------

    def _judge(self) -> Command:
        """Rank 0: the directive for the end of this step, from a view that has seen all that we wrote."""
        steward = self._steward
        if steward is None:
            raise RuntimeError("only rank 0 judges")
        role = steward.role
        role.step = self.step
        role.membership.beat.tick()
        if role.unsettled:
            return self._settle(steward)
        if role.membership.beat.alive():
            try:
                view = steward.caught_up(_HOLD_S)
            except DeadlineExceeded:
                return Command("hold", payload=b"etcd does not show our own write yet")
        else:
            view = steward.view
        directive = role.directive(view)
        role.state = "held" if directive.kind == "hold" else "training"
        role.report(view, waits_for=directive.reason)
        if directive.kind == "hold":
            self._say(directive.reason)
            if time.monotonic() - self._retried_at >= _REPEAT_S:
                self._retried_at, role.refused_step = time.monotonic(), -1
            steward.wait_news(_HOLD_S)
        elif directive.kind == "go":
            self._say("")
        return Command(
            directive.kind, round=directive.round, token=directive.token, payload=directive.reason.encode()
        )

    def _settle(self, steward: Steward) -> Command:
        """A publication's reply was lost: nothing is trained before it is known."""
        try:
            steward.role.settle()
            return Command("wait")
        except (SlackwaterError, OSError) as error:
            self._say(f"the outcome of a publication is unknown: {error}")
            steward.wait_news(_HOLD_S)
            return Command("hold")

    def _say(self, reason: str) -> None:
        if reason != self._said:
            if reason:
                self._log.warning("the trainer stands", reason=reason, step=self.step)
            elif self._said:
                self._log.info("the trainer goes on", step=self.step)
            self._said = reason

    def _obey(self, command: Command) -> None:
        """What every rank does for a command that does not end the step."""
        if command.kind == "publish":
            self._publish(None)
        elif command.kind == "cut":
            self._cut(command)
        elif command.kind == "stop":
            self._release("")
            raise Fenced(f"the trainer's life is over: {command.payload.decode()}")
        elif command.kind == "error":
            name, text = msgspec.json.decode(command.payload)
            self._release("exited", text[:200])
            raise _as_error([(0, name, text)])

    def _publish(self, cut: Directive | None, path: str = "") -> bool:
        """Export on every rank, publish by rank 0; returns whether it was accepted, the same on every rank."""
        steward, gang = self._steward, self._gang
        answer: Command | None = None
        role = steward.role if steward is not None else None
        head = steward.view.head if steward is not None else None
        bare = (
            role is not None
            and cut is not None
            and head is not None
            and (head.timeline, head.step) == (role.membership.timeline, role.step)
        )
        # A cut of the very weights that were published last needs no second image.
        plan = gang.broadcast(
            Command("done", round=int(bare), payload=self._folder()) if steward is not None else None
        )
        record, directory, attempt = None, Path(), secrets.token_hex(6)
        error: SlackwaterError | None = None
        if not plan.round:
            try:
                record, directory, attempt = self._publisher.export(plan.payload.decode(), self.step)
            except SlackwaterError as found:
                error = found
        if steward is not None and role is not None:
            accepted = False
            if error is not None:
                role.refused_step = self.step
                self._log.error("the weights could not be published", error=str(error))
            else:
                accepted = self._send(steward, cut, path, record, directory, attempt)
            answer = Command("done", round=int(accepted))
        return bool(gang.broadcast(answer).round)

    def _folder(self) -> bytes:
        steward = self._steward
        if steward is None:
            return b""
        return f"{self.config.job}/{steward.job_uid}/t{steward.role.membership.timeline}".encode()

    def _send(
        self, steward: Steward, cut: Directive | None, path: str, record: Any, directory: Path, attempt: str
    ) -> bool:
        role = steward.role
        role.step = self.step
        try:
            done = role.publish(
                steward.caught_up(),
                location=directory.resolve().as_uri() if record is not None else "",
                digest=record.digest if record is not None else "",
                size_bytes=record.size_bytes if record is not None else 0,
                attempt=attempt,
                cut=cut,
                path=path,
            )
            accepted = done is not None
        except Unavailable:
            accepted = self._settled(steward)
        except (LeaseLost, DeadlineExceeded) as error:
            self._log.warning("not published", reason=str(error))
            role.refused_step = self.step
            accepted = False
        if accepted:
            self._publisher.prune(steward.caught_up(), self.config.weights.keep_versions)
        elif record is not None:
            self._log.info("publication refused", step=self.step)
            self._publisher.drop(directory)
        return accepted

    def _settled(self, steward: Steward) -> bool:
        """Wait until the outcome of our transaction can be read back; the other ranks stand in a broadcast."""
        while True:
            try:
                return steward.role.settle()
            except Unavailable as error:
                self._say(f"the outcome of a publication is unknown: {error}")
                steward.wait_news(_HOLD_S)

    def _cut(self, command: Command) -> None:
        """Snapshot first on every rank, then the one transaction that publishes and freezes; then go on."""
        steward, gang = self._steward, self._gang
        started = time.perf_counter()
        error: SlackwaterError | None = None
        staged: Staged | None = None
        capture: Capture | None = None
        try:
            capture = self._state.capture()
            staged = self._snapshotter.stage(capture.pieces, capture.aliases)
        except SlackwaterError as found:
            error = found
        failures = gang.failures(error)
        snapshot_s = time.perf_counter() - started
        if failures or staged is None or capture is None:
            if staged is not None:
                staged.release()
            if steward is not None:
                steward.role.refused_step = self.step
            self._log.error("no snapshot", round=command.round, error=first_failure(failures))
            return
        header = None
        path = ""
        if steward is not None:
            header = steward.header(round_=command.round, attempt=secrets.token_hex(6), step=self.step)
            path = attempt_path(header)
        told = gang.broadcast(Command("done", payload=path.encode()) if steward is not None else None)
        path = told.payload.decode()
        cut = Directive("cut", round=command.round, token=command.token)
        if not self._publish(cut, path):
            staged.release()
            return
        if self._writer is None:
            raise RuntimeError("the trainer is not open")
        self._writer.submit(
            SaveJob(
                round=command.round,
                step=self.step,
                path=path,
                staged=staged,
                objects=capture.objects,
                rank_objects=capture.rank_objects,
            )
        )
        if steward is not None and header is not None:
            steward.rounds.begin(OpenSave(header=header, token=command.token, path=path))
        self._log.info("cut", round=command.round, step=self.step, snapshot_s=round(snapshot_s, 4))

    # -- the end -------------------------------------------------------------------------------------------

    def _raise_crashed(self) -> None:
        for holder in (
            self._steward,
            self._writer,
            self._participant,
            getattr(self._steward, "uploader", None),
        ):
            crashed = holder.crashed if holder is not None else None
            if crashed is not None:
                raise crashed

    def _drain(self, patience_s: float) -> None:
        writer, steward = self._writer, self._steward
        if writer is None:
            return
        deadline = time.monotonic() + patience_s
        if not writer.drain(patience_s):
            raise DeadlineExceeded(f"the last save did not end within {patience_s:g} s")
        if steward is not None:
            steward.rounds.wait_closed(max(1.0, deadline - time.monotonic()))
            if steward.uploader is not None and not steward.uploader.drain(
                max(1.0, deadline - time.monotonic())
            ):
                raise DeadlineExceeded(f"uploads did not end within {patience_s:g} s")
        self._raise_crashed()
        if writer.last_error:
            raise SlackwaterError(f"the last save is no checkpoint: {writer.last_error}")
        if steward is not None and steward.uploader is not None and steward.uploader.error is not None:
            raise steward.uploader.error

    def _release(self, ended: str, reason: str = "") -> None:
        """Let go of everything; never raises for etcd."""
        self._closed = True
        participant, self._participant = self._participant, None
        if participant is not None:
            participant.close(ended)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        steward, self._steward = self._steward, None
        if steward is not None:
            steward.close(ended, reason)
        self._snapshotter.close()


def _as_error(failures: list[tuple[int, str, str]]) -> SlackwaterError:
    """Another rank's error as our own, of the same class where it is one of ours."""
    rank, name, message = failures[0]
    kind = getattr(errors, name, SlackwaterError)
    kind = kind if isinstance(kind, type) and issubclass(kind, SlackwaterError) else SlackwaterError
    made: SlackwaterError = kind(f"rank {rank}: {message}")
    return made


def _waits_for(view: Any) -> str:
    recovery = view.recovery
    if recovery is None:
        return "the grant to train"
    return f"recovery {recovery.recovery}: {recovery.phase} {recovery.note}".strip()
