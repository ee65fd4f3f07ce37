"""One rank's seat in the job: where training stands, and how rank 0's word reaches every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from ..engine.config import JobConfig
from .trainer_gang import Command, Gang
from .trainer_steward import Steward

__all__ = ["HOLD_S", "Seat"]

HOLD_S = 1.0
"""How often a standing gang hears from rank 0."""


class Seat:
    """What all parts of a `Trainer` share. `steward` is rank 0's alone, and there only while the job is joined.

    `step` counts optimizer updates; `is_new` says that nothing was trained or restored since the script made its state.
    `figures` go into `alive/trainer` as its metrics: the newest of each, units in their names.
    """

    def __init__(self, config: JobConfig, gang: Gang) -> None:
        self.config, self.gang = config, gang
        self.steward: Steward | None = None
        self.step = 0
        self.timeline = 0
        self.incarnation = ""
        self.is_new = True
        self.figures: dict[str, float] = {}
        self.log: Any = structlog.get_logger().bind(participant="trainer", rank=gang.rank)
        self._said = ""

    def ask(self, answer: Callable[[Steward], Command]) -> Command:
        """Rank 0's answer, on every rank; only rank 0 calls `answer`. Blocks until it has one."""
        return self.gang.broadcast(answer(self.steward) if self.steward is not None else None)

    def say(self, reason: str) -> None:
        """Tell people once why the trainer stands; "" when it goes on."""
        if reason != self._said:
            if reason:
                self.log.warning("the trainer stands", reason=reason, step=self.step)
            else:
                self.log.info("the trainer goes on", step=self.step)
            self._said = reason
