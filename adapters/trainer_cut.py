"""The cut of a round: a snapshot on every rank, then the one transaction that publishes and freezes."""

from __future__ import annotations

import secrets
import time

from ..engine.boundary import Directive
from ..engine.errors import SlackwaterError
from ..engine.manifest import attempt_path
from ..engine.snapshot import Snapshotter, Staged
from .torchstate import Capture, TrainState
from .trainer_gang import Command, first_failure
from .trainer_publication import Publication
from .trainer_rounds import OpenSave
from .trainer_seat import Seat
from .trainer_writer import PartWriter, SaveJob

__all__ = ["Cutter"]


class Cutter:
    """Cuts one rank's state. The snapshot comes first, so that nothing is frozen for a state that cannot be taken."""

    def __init__(
        self, seat: Seat, state: TrainState, snapshotter: Snapshotter, publication: Publication
    ) -> None:
        self._seat, self._state, self._snapshotter = seat, state, snapshotter
        self._publication = publication

    def cut(self, command: Command, writer: PartWriter) -> None:
        """Take the cut that `command` asks for, by every rank; `writer` writes it while training goes on.

        Blocks for the copies and the publication. When it fails or is refused nothing is left of it.
        """
        seat = self._seat
        started = time.perf_counter()
        taken = self._snapshot(command)
        if taken is None:
            return
        snapshot_s = time.perf_counter() - started
        capture, staged = taken
        header = None
        if seat.steward is not None:
            attempt = secrets.token_hex(6)
            header = seat.steward.header(round_=command.round, attempt=attempt, step=seat.step)
        told = Command("done", payload=attempt_path(header).encode()) if header is not None else None
        path = seat.gang.broadcast(told).payload.decode()
        if not self._publication.publish(Directive("cut", round=command.round, token=command.token), path):
            staged.release()
            return
        job = SaveJob(
            round=command.round,
            step=seat.step,
            path=path,
            staged=staged,
            objects=capture.objects,
            rank_objects=capture.rank_objects,
        )
        writer.submit(job)
        if seat.steward is not None and header is not None:
            blocked_s = time.perf_counter() - started
            save = OpenSave(header=header, token=command.token, path=path, blocked_s=blocked_s)
            seat.steward.rounds.begin(save)
        seat.log.info("cut", round=command.round, step=seat.step, snapshot_s=round(snapshot_s, 4))

    def _snapshot(self, command: Command) -> tuple[Capture, Staged] | None:
        """A snapshot on every rank, or on none."""
        seat = self._seat
        error: SlackwaterError | None = None
        staged: Staged | None = None
        capture: Capture | None = None
        try:
            capture = self._state.capture()
            staged = self._snapshotter.stage(capture.pieces, capture.aliases)
        except SlackwaterError as found:
            error = found
        failures = seat.gang.failures(error)
        if not failures and capture is not None and staged is not None:
            return capture, staged
        if staged is not None:
            staged.release()
        if seat.steward is not None:
            seat.steward.role.refused_step = seat.step
        seat.log.error("no snapshot", round=command.round, error=first_failure(failures))
        return None
