"""What the trainer does at the end of a step: go on, publish, cut, hold, rewind or stop. Pure.

A hold that is not there is no grant: without a `go` for this very incarnation on this very timeline the trainer stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import JobConfig
from .view import View

__all__ = ["Directive", "TrainerState", "direct"]


@dataclass(frozen=True, slots=True)
class Directive:
    """One small record that rank 0 broadcasts. `reason` says why a hold holds; `token` is the round of a cut."""

    kind: Literal["go", "publish", "cut", "hold", "rewind", "stop"]
    reason: str = ""
    round: int = 0
    token: int = 0


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer knows about itself: steps are optimizer updates done.

    `published_step` is the step of the last version that was accepted on this timeline (-1: none yet);
    `refused` counts publications refused at this very step, so that a refusal is retried at the next boundary.
    """

    incarnation: str
    timeline: int
    step: int
    published_step: int
    session_alive: bool
    standing: str = "ours"
    refused: bool = False


def direct(view: View, me: TrainerState, config: JobConfig) -> Directive:
    """The directive for the end of step `me.step`; asked again after each publication and while holding."""
    if me.standing == "replaced":
        return Directive("stop", "another incarnation took over, or this one was declared failed")
    limit = config.weights.max_lag_steps
    if not me.session_alive:
        # Without etcd nothing outside may change; steps may go on for a while.
        if me.step - max(me.published_step, 0) >= limit:
            return Directive("hold", f"etcd is away and {limit} steps were done without it")
        return Directive("go")
    if me.standing == "fenced" or view.timeline != me.timeline:
        return Directive("rewind", "a recovery began")
    go = view.go
    if go is None or go.incarnation != me.incarnation or go.timeline != me.timeline:
        return Directive("hold", "no grant")
    return _boundary(view, me, config, limit)


def _boundary(view: View, me: TrainerState, config: JobConfig, limit: int) -> Directive:
    freeze, round_ = view.freeze, view.round
    if freeze is not None:
        if round_ is not None and round_.mode == "strict":
            return Directive("hold", f"round {freeze.round} (strict)")
        if me.step - freeze.step >= limit:
            return Directive("hold", f"round {freeze.round} is frozen since step {freeze.step}")
        return _lag(view, me, limit, frozen=True) or _holds(view)
    announced = round_ is not None and round_.phase == "prepare" and round_.timeline == me.timeline
    if announced and round_ is not None and me.step >= round_.not_before_step and not me.refused:
        return Directive("cut", round=round_.round, token=view.create(view.keys.round))
    due = me.step - me.published_step >= config.weights.publish_every_steps
    if due and me.step > me.published_step and not me.refused:
        return Directive("publish")
    return _lag(view, me, limit, frozen=False) or _holds(view)


def _lag(view: View, me: TrainerState, limit: int, *, frozen: bool) -> Directive | None:
    routes = view.routes()
    if not routes:
        return None  # min_rollouts governs
    name, route = min(routes.items(), key=lambda item: item[1].version)
    record = view.weight_version(route.version)
    step = record.step if record is not None else 0
    lag = me.step - step
    if lag <= limit:
        return None
    if not frozen and me.published_step < me.step and not me.refused:
        return Directive("publish", "lag")
    return Directive("hold", f"lag: {name} serves version {route.version} of step {step}, {lag} steps behind")


def _holds(view: View) -> Directive:
    for reason, hold in view.holds().items():
        return Directive("hold", f"{reason}: {hold.text}" if hold.text else reason)
    return Directive("go")
