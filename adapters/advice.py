"""What a job's own history says about its settings: checkpoint interval, window, lag and publication. Pure.

The interval is Young's and Daly's: a checkpoint that blocks for C seconds, taken every W seconds of a job that fails
every M seconds on average, costs C / W + W / 2M of the throughput, which is least at W = sqrt(2 C M)
(J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006). Each failure also costs R / M, whatever the interval.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.config import JobConfig
from ..engine.model import LogEntry

__all__ = ["Measured", "Proposal", "best_interval_s", "loss", "measure", "propose", "warnings"]

LEAST_STEPS = 100
LONG_STEP_S = 5.0
PUBLICATION_SHARE = 0.01
_NOT_FAILURES = ("birth", "an operator asked", "adopt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the history tells; None where it tells nothing. Times in seconds."""

    span_s: float
    checkpoints: int
    aborted: int
    failures: int
    step_s: float | None
    blocked_s: float | None
    recovery_s: float | None
    publish_s: float | None
    suspected: int
    pauses_s: tuple[float, ...]

    @property
    def between_failures_s(self) -> float:
        """Mean time between failures. Without any yet: as if the next one came right now."""
        return self.span_s / max(1, self.failures)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """One setting: what it is, what it could be, what either costs as a share of the throughput, and why."""

    setting: str
    now: float
    proposed: float
    loss_now: float | None
    loss_proposed: float | None
    reason: str


def best_interval_s(blocked_s: float, between_failures_s: float) -> float:
    """Young's interval, sqrt(2 C M), in seconds of training between two checkpoints."""
    return math.sqrt(2 * blocked_s * between_failures_s)


def loss(interval_s: float, blocked_s: float, between_failures_s: float, recovery_s: float = 0.0) -> float:
    """The share of the throughput that checkpoints, repeated steps and recoveries cost together, at most 1."""
    if interval_s <= 0:
        return 1.0
    repeated = (interval_s / 2 + recovery_s) / between_failures_s
    return min(1.0, blocked_s / interval_s + repeated)


# -- measuring ---------------------------------------------------------------------------------------------


def measure(entries: Sequence[LogEntry], publish_s: float | None = None) -> Measured:
    """Figures from a job's history; medians, so that one pause does not bend them.

    `publish_s` is how long the trainer stood for its last publication, from `alive/trainer`.
    """
    times = [_time(entry) for entry in entries]
    commits = [entry for entry in entries if entry.kind == "commit"]
    blocked = [float(b) for entry in commits if isinstance(b := entry.fields.get("blocked_s"), int | float)]
    verdicts = [entry for entry in entries if entry.kind == "verdict"]
    return Measured(
        span_s=max(times) - min(times) if times else 0.0,
        checkpoints=len(commits),
        aborted=sum(entry.kind == "abort" for entry in entries),
        failures=len(_failures(entries)),
        step_s=_step_seconds(commits),
        blocked_s=statistics.median(blocked) if blocked else None,
        recovery_s=_recovery_seconds(entries),
        publish_s=publish_s,
        suspected=sum(entry.fields.get("state") == "suspected" for entry in verdicts),
        pauses_s=_pauses(verdicts),
    )


def _pauses(verdicts: Sequence[LogEntry]) -> tuple[float, ...]:
    """How long each participant was suspected that came back by itself."""
    since: dict[object, float] = {}
    found = []
    for entry in verdicts:
        name, state = entry.fields.get("participant"), entry.fields.get("state")
        if state == "suspected":
            since[name] = _time(entry)
        elif state == "alive" and name in since:
            found.append(_time(entry) - since.pop(name))
        else:
            since.pop(name, None)
    return tuple(found)


def _failures(entries: Sequence[LogEntry]) -> list[LogEntry]:
    begun = [e for e in entries if e.kind == "recovery" and e.fields.get("phase") == "fence"]
    causes = [(e, e.text.partition("begins: ")[2]) for e in begun]
    return [entry for entry, cause in causes if not cause.startswith(_NOT_FAILURES)]


def _step_seconds(commits: Sequence[LogEntry]) -> float | None:
    """Between two checkpoints of one timeline: their times over their steps."""
    found = []
    for older, newer in itertools.pairwise(commits):
        steps = int(newer.fields.get("step", 0)) - int(older.fields.get("step", 0))
        if older.timeline == newer.timeline and steps > 0:
            found.append((_time(newer) - _time(older)) / steps)
    return statistics.median(found) if found else None


def _recovery_seconds(entries: Sequence[LogEntry]) -> float | None:
    begun = {e.fields.get("recovery"): _time(e) for e in _failures(entries)}
    ends = [e for e in entries if e.kind == "recovery" and e.fields.get("phase") == "resume"]
    took = [_time(e) - begun[n] for e in ends if (n := e.fields.get("recovery")) in begun]
    return statistics.median(took) if took else None


def _time(entry: LogEntry) -> float:
    try:
        return datetime.datetime.fromisoformat(entry.at).timestamp()
    except ValueError:
        return 0.0


# -- proposing ---------------------------------------------------------------------------------------------


def propose(config: JobConfig, found: Measured) -> list[Proposal]:
    """A proposal for every setting that the history says something about; empty when it says nothing."""
    proposals = []
    if found.step_s and found.blocked_s is not None:
        proposals.append(_interval(config, found, found.step_s, max(found.blocked_s, 1e-3)))
    if found.pauses_s:
        proposals.append(_window(config, found))
    if found.step_s and found.publish_s is not None:
        proposals.append(_publication(config, found.step_s, found.publish_s))
    return [*proposals, _lag(config)]


def _window(config: JobConfig, found: Measured) -> Proposal:
    window, longest = config.timers.window_s, max(found.pauses_s)
    proposed = max(window, math.ceil(2 * longest))
    return Proposal(
        setting="timers.window_s",
        now=window,
        proposed=proposed,
        loss_now=min(1.0, window / found.between_failures_s) if found.between_failures_s else None,
        loss_proposed=min(1.0, proposed / found.between_failures_s) if found.between_failures_s else None,
        reason=f"{len(found.pauses_s)} of {found.suspected} suspicions ended by themselves, the longest after "
        f"{longest:.0f} s; twice that forgives it, and a real death is confirmed that much later",
    )


def _publication(config: JobConfig, step_s: float, publish_s: float) -> Proposal:
    """The smallest interval that costs at most one percent: fresher samples are worth no more than that."""
    now = config.weights.publish_every_steps
    proposed = min(10, max(1, math.ceil(publish_s / (PUBLICATION_SHARE * step_s))))
    costs = ", ".join(f"{every}: {publish_s / (every * step_s):.1%}" for every in (1, 3, 5))
    return Proposal(
        setting="weights.publish_every_steps",
        now=now,
        proposed=proposed,
        loss_now=publish_s / (now * step_s),
        loss_proposed=publish_s / (proposed * step_s),
        reason=f"a publication blocks for {publish_s:.3g} s of steps of {step_s:.3g} s (every {costs}); rarer ones "
        "make staler samples and a longer way back after a recovery",
    )


def _lag(config: JobConfig) -> Proposal:
    w = config.weights
    proposed = max(w.max_lag_steps, 2 * w.publish_every_steps - 1)
    return Proposal(
        setting="weights.max_lag_steps",
        now=w.max_lag_steps,
        proposed=proposed,
        loss_now=None,
        loss_proposed=None,
        reason="two publication intervals less one: below it the trainer stands as soon as one rollout needs "
        "longer for a load than the steps between two publications",
    )


def _interval(config: JobConfig, found: Measured, step_s: float, blocked_s: float) -> Proposal:
    between, recovery = found.between_failures_s, found.recovery_s or 0.0
    best = best_interval_s(blocked_s, between) / step_s
    steps = max(LEAST_STEPS, round(best))
    every = config.checkpoint.every_steps
    known = f"{found.failures} failures" if found.failures else "no failure yet, taken as one"
    text = (
        f"sqrt(2 x {blocked_s:.3g} s blocked x {between:.3g} s between failures) is {best:.0f} steps of {step_s:.3g} s"
        f" ({known} in {found.span_s:.3g} s)"
    )
    if best < LEAST_STEPS:
        text += f"; not below {LEAST_STEPS}, where rounds begin to overlap"
    return Proposal(
        setting="checkpoint.every_steps",
        now=every,
        proposed=steps,
        loss_now=loss(every * step_s, blocked_s, between, recovery),
        loss_proposed=loss(steps * step_s, blocked_s, between, recovery),
        reason=text,
    )


def warnings(config: JobConfig, found: Measured) -> list[str]:
    """What deserves a second look, whatever the figures propose."""
    told = []
    every = config.checkpoint.every_steps
    if 0 < every < LEAST_STEPS:
        told.append(
            f"checkpoint.every_steps = {every} is below {LEAST_STEPS}: rounds begin to overlap, and each is a boundary"
        )
    if found.step_s is not None and found.step_s > LONG_STEP_S:
        told.append(
            f"a step takes {found.step_s:.1f} s, more than {LONG_STEP_S:g}: the wait for a boundary, and so a round, "
            f"stretches by as much; timers.prepare_deadline_s = {config.timers.prepare_deadline_s:g} must cover it"
        )
    if found.step_s is not None and found.step_s > config.timers.ready_deadline_s / 2:
        told.append(
            f"timers.ready_deadline_s = {config.timers.ready_deadline_s:g} is less than two steps of "
            f"{found.step_s:.1f} s: a rollout in a long batch of generations is late "
            "at every cut; take shorter batches or a longer deadline"
        )
    if found.aborted > found.checkpoints > 0:
        told.append(
            f"{found.aborted} rounds were given up and {found.checkpoints} committed: see `slackwater explain`"
        )
    if not config.timers.stall_s.training or (
        found.step_s is not None and 0 < config.timers.stall_s.training < 10 * found.step_s
    ):
        told.append(
            f"timers.stall_s.training = {config.timers.stall_s.training:g} should be at least ten steps, and not 0: "
            "less takes a slow step for a hang, 0 never sees one"
        )
    return told
