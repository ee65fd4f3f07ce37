"""The trainer's part in a recovery: what rank 0 wants next, and every rank loading its share."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ..engine.errors import (
    CorruptCheckpoint,
    DeadlineExceeded,
    Fenced,
    LeaseLost,
    NoSpace,
    SlackwaterError,
    StateMismatch,
    Unavailable,
)
from ..engine.filetier import FileTier
from ..engine.model import Checkpoint
from ..engine.ports import ObjectStore
from ..engine.view import View
from .torchstate import TrainState
from .trainer_gang import Command, Failure, as_error, first_failure
from .trainer_restorer import restore_state
from .trainer_seat import HOLD_S, Seat
from .trainer_steward import Steward

__all__ = ["Recovery"]

_ANOTHER_MAY_DO = (
    CorruptCheckpoint.__name__,
    Unavailable.__name__,
)  # an older checkpoint, or the same one later


class Recovery:
    """Restores one rank's state. `objects` is the remote tier, once it is open.

    `restored_from` is the checkpoint that the state came from (0: the job's beginning), `remarks` what people should
    know of it.
    """

    def __init__(self, seat: Seat, state: TrainState, tier: FileTier) -> None:
        self._seat, self._state, self._tier = seat, state, tier
        self.objects: ObjectStore | None = None
        self.restored_from = 0
        self.remarks: list[str] = []

    def next_task(self, steward: Steward) -> Command:
        """Rank 0: what the open recovery wants next; `wait` after at most a second without news."""
        try:
            command = self._task(steward)
            if command is not None:
                return command
        except Fenced as error:
            self._seat.log.info("the recovery moved on", reason=str(error))
        except (Unavailable, LeaseLost, NoSpace, DeadlineExceeded) as error:
            lost = steward.role.membership.beat.lost
            if lost:
                return Command("stop", payload=lost.encode())
            self._seat.log.warning("waiting for etcd", error=str(error))
        except SlackwaterError as error:
            return Command("error", payload=msgspec.json.encode([type(error).__name__, str(error)]))
        steward.wait_news(HOLD_S)
        return Command("wait")

    def _task(self, steward: Steward) -> Command | None:
        view, role = steward.caught_up(HOLD_S), steward.role
        task = role.recovery_task(view)
        if task == "acknowledge":
            role.acknowledge(view, steward.found_data(view))
        elif task == "restore":
            role.state = "loading"
            role.report(view)
            return _restore_command(view)
        elif task == "publish":
            return Command("publish")
        elif task == "go":
            payload = msgspec.json.encode({"incarnation": role.membership.incarnation})
            return Command("go", step=role.step, timeline=role.membership.timeline, payload=payload)
        elif task == "over":
            return Command("stop", payload=b"another incarnation took over, or this one was declared failed")
        role.report(view, waits_for=_waits_for(view))
        return None

    def restore(self, command: Command) -> None:
        """Every rank loads its share; rank 0 answers for all.

        A checkpoint that cannot be read is answered for, and the recovery goes on to another one. What no other
        checkpoint would cure is raised on every rank: `StateMismatch`, or `Fenced` when a state that is not new any
        more is to go back to the job's beginning.
        """
        started = time.monotonic()
        error: SlackwaterError | None = None
        remarks: list[str] = []
        tiers = ""
        record = msgspec.json.decode(command.payload, type=Checkpoint) if command.payload else None
        try:
            remarks, tiers = self._load(record, command.token)
        except SlackwaterError as found:
            error = found
        failures = self._seat.gang.failures(error)
        step = record.training_step if record is not None else 0
        if not failures:
            self._seat.step, self._seat.is_new = step, record is None
            self.restored_from, self.remarks = command.round, remarks
            if record is not None:
                self._seat.log.info(
                    "restored", checkpoint=command.round, step=step, tiers=tiers, remarks=remarks
                )
        if self._seat.steward is not None:
            report = {
                "tiers": tiers,
                "seconds": round(time.monotonic() - started, 3),
                "remarks": self.remarks,
            }
            self._answer(self._seat.steward, command, failures, step, report)
        fatal = [one for one in failures if one[1] not in _ANOTHER_MAY_DO]
        if fatal:
            raise error if error is not None and type(error).__name__ == fatal[0][1] else as_error(fatal)

    def _load(self, record: Checkpoint | None, recovery: int) -> tuple[list[str], str]:
        if record is not None:
            return restore_state(self._state, record, self._tier, self.objects, self._seat.config.seed)
        if not self._seat.is_new:
            raise Fenced(
                f"recovery {recovery} goes back to the job's beginning, and this state is not new any more: "
                "start the trainer again"
            )
        return [], ""  # the script has just made this state, and nothing was trained since

    def _answer(
        self, steward: Steward, command: Command, failures: list[Failure], step: int, report: dict[str, Any]
    ) -> None:
        role, recovery, checkpoint = steward.role, command.token, command.round
        try:
            if not failures:
                role.restored(recovery, checkpoint, step, report)
                return
            if any(name == StateMismatch.__name__ for _, name, _ in failures):
                return  # this script's fault, not the checkpoint's: the recovery waits for another trainer
            text = first_failure(failures)
            skip = all(name == CorruptCheckpoint.__name__ for _, name, _ in failures)
            self._seat.log.error("could not restore", checkpoint=checkpoint, error=text)
            role.restore_failed(recovery, checkpoint, text, unverified=skip)
        except (Fenced, LeaseLost, NoSpace, Unavailable) as error:
            self._seat.log.warning("the recovery moved on", reason=str(error))


def _restore_command(view: View) -> Command | None:
    recovery = view.recovery
    number = recovery.checkpoint if recovery is not None else 0
    record = view.checkpoints().get(number) if number else None
    if recovery is None or (number and record is None):
        return None
    payload = msgspec.json.encode(record) if record is not None else b""
    return Command("restore", round=number, token=recovery.recovery, payload=payload)


def _waits_for(view: View) -> str:
    recovery = view.recovery
    if recovery is None:
        return "the grant to train"
    return f"recovery {recovery.recovery}: {recovery.phase} {recovery.note}".strip()
