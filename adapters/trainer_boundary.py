"""The end of a step, as rank 0 judges it."""

from __future__ import annotations

import time

from ..engine.errors import DeadlineExceeded
from .trainer_gang import Command
from .trainer_publication import Publication
from .trainer_seat import HOLD_S, Seat
from .trainer_steward import Steward

__all__ = ["Boundary"]

_REPEAT_S = 2.0  # how often a standing trainer tries a refused publication again


class Boundary:
    """Rank 0's judgement at the ends of steps."""

    def __init__(self, seat: Seat, publication: Publication) -> None:
        self._seat, self._publication = seat, publication
        self._retried_at = 0.0

    def judge(self, steward: Steward) -> Command:
        """What all ranks do now, from a view that has seen all that we wrote. A `hold` comes after a second at most."""
        role, beat = steward.role, steward.role.membership.beat
        role.step = self._seat.step
        beat.tick()
        if role.unsettled:
            self._publication.settle(steward)
        view = steward.view
        if beat.alive():
            try:
                view = steward.caught_up(HOLD_S)
            except DeadlineExceeded:
                return Command("hold", payload=b"etcd does not show our own write yet")
        directive = role.directive(view)
        role.state = "held" if directive.kind == "hold" else "training"
        role.report(view, waits_for=directive.reason, metrics=dict(self._seat.figures))
        if directive.kind == "go":
            self._seat.say("")
            return Command("go")
        if directive.kind == "hold":
            self._seat.say(directive.reason)
            if time.monotonic() - self._retried_at >= _REPEAT_S:
                self._retried_at, role.refused_step = time.monotonic(), -1
            steward.wait_news(HOLD_S)
        payload = directive.reason.encode()
        return Command(directive.kind, round=directive.round, token=directive.token, payload=payload)
