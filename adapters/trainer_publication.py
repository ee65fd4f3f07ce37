"""Publication of the current weights: exported by every rank, offered to the job by rank 0 in one transaction."""

from __future__ import annotations

import time
from pathlib import Path

from ..engine.boundary import Directive
from ..engine.errors import DeadlineExceeded, LeaseLost, NoSpace, SlackwaterError, Unavailable
from ..engine.image import ImageRecord
from .trainer_gang import Command
from .trainer_images import Images
from .trainer_seat import HOLD_S, Seat
from .trainer_steward import Steward

__all__ = ["Publication"]


class Publication:
    """Publishes for one gang, by way of `images`."""

    def __init__(self, seat: Seat, images: Images) -> None:
        self._seat, self._images = seat, images

    def publish(self, cut: Directive | None = None, path: str = "") -> bool:
        """Export and publish, with `cut` as the cut of a round whose attempt is at `path`; called by every rank.

        Returns whether it was accepted, the same on every rank. Blocks, also for as long as the outcome is unknown.
        """
        seat, started = self._seat, time.perf_counter()
        plan = seat.ask(lambda steward: self._plan(steward, cut))
        record, directory, attempt = None, Path(), ""
        error: SlackwaterError | None = None
        if plan.kind == "publish":
            try:
                record, directory, attempt = self._images.export(plan.payload.decode(), seat.step)
            except SlackwaterError as found:
                error = found

        def offer(steward: Steward) -> Command:
            if error is not None:
                steward.role.refused_step = seat.step
                seat.log.error("the weights could not be published", error=str(error))
                return Command("done", round=0)
            return Command("done", round=int(self._offer(steward, cut, path, record, directory, attempt)))

        accepted = bool(seat.ask(offer).round)
        if accepted and plan.kind == "publish":
            seat.figures["publish_blocked_s"] = round(time.perf_counter() - started, 4)
        return accepted

    def _plan(self, steward: Steward, cut: Directive | None) -> Command:
        """A cut of the very weights that were published last needs no second image."""
        head, timeline = steward.view.head, steward.role.membership.timeline
        if cut is not None and head is not None and (head.timeline, head.step) == (timeline, self._seat.step):
            return Command("done")
        folder = f"{self._seat.config.job}/{steward.job_uid}/t{timeline}"
        return Command("publish", payload=folder.encode())

    def _offer(
        self,
        steward: Steward,
        cut: Directive | None,
        path: str,
        record: ImageRecord | None,
        directory: Path,
        attempt: str,
    ) -> bool:
        seat, role = self._seat, steward.role
        role.step = seat.step
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
        except (
            Unavailable,
            NoSpace,
        ):  # a lost reply, or a try before it that etcd took while it still had space
            accepted = self.settle(steward)
        except (LeaseLost, DeadlineExceeded) as error:
            seat.log.warning("not published", reason=str(error))
            role.refused_step = seat.step
            accepted = False
        if accepted:
            self._images.prune(steward.view, seat.config.weights.keep_versions)
        elif record is not None and not role.unsettled:
            seat.log.info("publication refused", step=seat.step)
            self._images.drop(directory)
        return accepted

    def settle(self, steward: Steward) -> bool:
        """Rank 0: wait until the outcome of our last publication is known; the other ranks stand in a broadcast.

        Nothing is trained before. False when it was refused, or when this life ended before etcd could be read.
        """
        while not steward.role.membership.beat.lost:
            try:
                return steward.role.settle()
            except Unavailable as error:
                self._seat.say(f"the outcome of a publication is unknown: {error}")
                steward.wait_news(HOLD_S)
        return False
