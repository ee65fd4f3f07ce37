"""The buffer's side of the protocol: fence, restore, freshness in a recovery; a cut in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from .action import put
from .bufferport import Buffer
from .config import JobConfig
from .errors import Conflict, CorruptCheckpoint, Fenced, NotFound, SlackwaterError
from .membership import Membership
from .model import Ack, Alive, Checkpoint, Recovery, Round, Vote
from .ports import Compare
from .samples import BufferPart
from .view import View

__all__ = ["BufferParts", "BufferRole"]


class BufferParts(Protocol):
    """Where a buffer's part of a checkpoint lies."""

    def directory(self, path: str) -> Path:
        """The (new or existing) directory for the buffer's files of the attempt at `path`."""
        ...

    def store(self, path: str, part: BufferPart) -> tuple[str, int, int]:
        """Write the part's list beside its files, durably; returns (digest, bytes, number of files)."""
        ...

    def load(self, checkpoint: Checkpoint) -> tuple[Path, BufferPart] | None:
        """The directory with the verified files of a checkpoint and their list; None: it has no buffer part.

        Raises `CorruptCheckpoint`, `NotFound` or `Unavailable`.
        """
        ...


class BufferRole:
    """One incarnation of the buffer. `step` is called on news and at every beat; it blocks while a cut is written."""

    def __init__(self, membership: Membership, buffer: Buffer, config: JobConfig, parts: BufferParts) -> None:
        self.membership = membership
        self.buffer = buffer
        self.config = config
        self._parts = parts
        self._voted = 0
        self._committed = 0
        self._known_head = (0, 0)
        self._log = structlog.get_logger().bind(participant=membership.name)

    def step(self, view: View) -> None:
        """Do what is due. Raises `Fenced` when this life is over."""
        me = self.membership
        standing = me.standing(view)
        if standing == "replaced" or me.beat.lost:
            raise Fenced(f"{me.name}: this life is over: {me.beat.lost or 'replaced or declared failed'}")
        if not me.beat.alive():
            return
        recovery = view.recovery
        if recovery is not None:
            self._recover(view, recovery)
        elif standing == "ours":
            self._follow_head(view)
            self._follow_commits(view)
            if view.round is not None:
                self._cut(view, view.round)

    def report(self, state: str = "idle") -> None:
        """Tell the beat where the log stands."""
        self.membership.report(
            Alive(
                incarnation=self.membership.incarnation,
                state="saving" if state == "saving" else "idle",
                buffer_version=self.buffer.version,
            )
        )

    # -- recovery ------------------------------------------------------------------------------------------

    def _recover(self, view: View, recovery: Recovery) -> None:
        me = self.membership
        ack = view.acks(recovery.recovery).get(me.name)
        if ack is not None and ack.incarnation != me.incarnation:
            ack = None
        if ack is None or me.timeline != recovery.recovery:
            # The timeline is made durable in the buffer before it is answered for: from here older calls are refused.
            self.buffer.fence(recovery.recovery)
            self._voted = 0
            me.acknowledge(view, Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence"))
        elif recovery.phase == "restore" and (ack.phase == "fence" or ack.checkpoint != recovery.checkpoint):
            self._restore(view, recovery)
        elif recovery.phase == "freshness" and ack.phase == "restore":
            self._freshen(view, ack)

    def _restore(self, view: View, recovery: Recovery) -> None:
        me = self.membership
        base = Ack(
            recovery=recovery.recovery,
            name="",
            incarnation="",
            phase="restore",
            checkpoint=recovery.checkpoint,
        )
        try:
            self._restore_part(view, recovery)
        except (CorruptCheckpoint, NotFound) as error:
            me.acknowledge_phase(
                msgspec.structs.replace(base, ok=False, unverified=True, error=str(error)[:1000])
            )
            return
        except SlackwaterError as error:
            if isinstance(error, Fenced):
                raise
            me.acknowledge_phase(msgspec.structs.replace(base, ok=False, error=str(error)[:1000]))
            return
        me.acknowledge_phase(base)

    def _restore_part(self, view: View, recovery: Recovery) -> None:
        # The trainer of this recovery is known now: from here only its calls are taken.
        self.buffer.fence(recovery.recovery, recovery.trainer)
        record = view.checkpoints().get(recovery.checkpoint) if recovery.checkpoint else None
        found = self._parts.load(record) if record is not None else None
        if recovery.checkpoint and found is None:
            raise NotFound(f"checkpoint {recovery.checkpoint} has no buffer part")
        if found is None:
            self.buffer.restore(Path(), None, recovery.recovery)
        else:
            self.buffer.restore(found[0], found[1], recovery.recovery)

    def _freshen(self, view: View, ack: Ack) -> None:
        head = view.head
        step = head.step if head is not None else 0
        report = self.buffer.apply_freshness(view.step_map(), step)
        self._log.info("freshness", action=report.action, stale=report.stale, dead=report.dead)
        done = msgspec.structs.replace(ack, phase="freshness", report=msgspec.to_builtins(report))
        self.membership.acknowledge_phase(done)

    # -- while the job runs --------------------------------------------------------------------------------

    def _follow_head(self, view: View) -> None:
        head = view.head
        if head is None or (head.timeline, head.version) == self._known_head:
            return
        self.buffer.apply_freshness(view.step_map(), head.step)
        self._known_head = (head.timeline, head.version)

    def _follow_commits(self, view: View) -> None:
        number = view.last_checkpoint
        if number <= self._committed:
            return
        record = view.checkpoints().get(number)
        if record is not None and record.timeline == self.membership.timeline:
            self.buffer.committed(record.training_step)
        self._committed = number

    def _cut(self, view: View, round_: Round) -> None:
        me = self.membership
        if round_.phase not in ("ready", "save") or self._voted == round_.round:
            return
        if round_.voters.get(me.name) != me.incarnation or round_.timeline != me.timeline:
            return
        self.report("saving")
        vote = Vote(
            name=me.name,
            incarnation=me.incarnation,
            timeline=me.timeline,
            round=round_.round,
            state="saved",
            step=round_.step,
            version=round_.version,
            host=me.record.host,
            path=round_.path,
        )
        try:
            part = self.buffer.cut(round_.step, self._parts.directory(round_.path))
            digest, size_bytes, files = self._parts.store(round_.path, part)
            vote = msgspec.structs.replace(
                vote, digest=digest, size_bytes=size_bytes, files=files, buffer_version=part.version
            )
        except Conflict as error:
            if isinstance(error, Fenced):
                raise
            # The step is not done yet in the log: the trainer's last call is still on its way.
            self._log.info("cut not possible yet", reason=str(error))
            return
        except SlackwaterError as error:
            vote = msgspec.structs.replace(vote, state="failed", error=str(error)[:1000])
        token = Compare(me.keys.round, "create", "=", view.create(me.keys.round))
        if me.write([put(me.keys.vote(round_.round, me.name), vote)], [token]):
            self._voted = round_.round
        self.report()
