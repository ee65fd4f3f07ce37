"""Schedules of faults: drawn from a seed, replayed from JSON, made smaller by leaving faults out."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from slackwater.engine.config import JobConfig
from slackwater.engine.model import Request

from .strikes import WEATHER, Fault, arm, ask
from .world import World, default_config

__all__ = ["Fault", "Schedule", "draw", "minimise", "run"]

STORMY = 100_000  # from this seed on, faults also come in pairs that belong together
QUIET_SECONDS = 200.0


class Schedule(msgspec.Struct, frozen=True):
    """A whole run: replaying it gives the same events."""

    seed: int
    faults: tuple[Fault, ...]
    rollouts: int = 2
    coordinators: int = 2
    mode: str = "overlap"
    seconds: float = 60.0
    stall_s: float = 0.0  # progress limit of a training trainer; 0 is the default

    def config(self) -> JobConfig:
        """The job that runs under this schedule."""
        return default_config(self.mode, stall_s=self.stall_s)


_KINDS = (
    ("kill", 6),
    ("exit", 3),
    ("pause", 5),
    ("worker", 2),
    ("beat", 2),
    ("echo", 1),
    ("drop", 3),
    ("lost", 4),
    ("late", 4),
    ("slow", 3),
    ("watch", 4),
    ("duplicate", 2),
    ("compact", 3),
    ("engine_death", 2),
    ("engine_silent", 1),
    ("engine_restart", 2),
    ("flush", 1),
    ("checkpoint", 3),
    ("rollback", 2),
    ("hold", 1),
    ("release", 2),
    ("corrupt", 1),
    ("leave", 1),
)


def draw(seed: int, seconds: float = 60.0) -> Schedule:
    """A random schedule."""
    rng = Random(f"schedule/{seed}")
    rollouts, coordinators = rng.randint(1, 3), rng.randint(1, 3)
    names = ["trainer", "trainer", "buffer", "leader", "leader"]
    names += [f"rollout-{n}" for n in range(rollouts)] + [f"coordinator-{n}" for n in range(coordinators)]
    kinds = [kind for kind, weight in _KINDS for _ in range(weight)]
    faults = []
    for _ in range(rng.randint(3, 25)):
        kind = rng.choice(kinds)
        who = rng.choice(names)
        if kind.startswith(("engine", "flush", "leave")):
            who = f"rollout-{rng.randrange(rollouts)}"
        if kind in WEATHER and rng.random() < 0.2:
            who = ""
        lasts = rng.choice((rng.uniform(0.2, 3), rng.uniform(2, 8), rng.uniform(8, 22)))
        faults.append(
            Fault(
                round(rng.uniform(0.1, seconds), 3),
                kind,
                who,
                round(min(lasts, 12.0) if kind in WEATHER else lasts, 3),
                rng.choice((0.1, 0.3, 0.6, 1.0)),
            )
        )
    if seed >= STORMY:
        for _ in range(rng.randint(1, 4)):
            at, who = rng.uniform(1.0, seconds), rng.choice(names)
            spell = rng.choice(("late", "late", "lost", "watch"))
            faults.append(Fault(round(at, 3), spell, who, 4.0, 1.0))
            hit = rng.choice(("kill", "pause", "pause", "exit"))
            faults.append(
                Fault(round(at + rng.uniform(0.0, 3.0), 3), hit, who, round(rng.uniform(3.5, 9.0), 3))
            )
            if rng.random() < 0.5:
                faults.append(Fault(round(at + rng.uniform(0.0, 9.0), 3), "older", who))
    if rng.random() < 0.3:
        faults.append(
            Fault(round(rng.uniform(1.0, seconds), 3), "full", seconds=round(rng.uniform(1, 12), 3))
        )
    faults.sort(key=lambda fault: fault.at)
    return Schedule(
        seed, tuple(faults), rollouts, coordinators, rng.choice(("overlap", "overlap", "strict")), seconds
    )


def run(schedule: Schedule) -> World:
    """Run a schedule, then a quiet time in which everything must come back."""
    world = World(
        schedule.seed,
        rollouts=schedule.rollouts,
        coordinators=schedule.coordinators,
        config=schedule.config(),
    )
    kernel = world.kernel
    for fault in schedule.faults:
        arm(world, fault)
    world.start()
    kernel.run(schedule.seconds)
    if not kernel.problems:
        world.network.weather.clear()
        world.network.dams.clear()
        world.network.traps.clear()
        ask(world, Request(kind="release"))
        _settle(world)
    world.stop()
    return world


def _settle(world: World) -> None:
    """Let everything come back; the job must be running within a bounded time."""
    kernel, seen = world.kernel, world.invariants
    kernel.run(5.0)
    for _ in range(int(QUIET_SECONDS / 10)):
        steps, commits = seen.steps, seen.commits
        kernel.run(10.0)
        if kernel.problems or (
            seen.steps > steps + 2 and seen.commits > commits and "recovery/current" not in seen.now
        ):
            break
    else:
        seen.quiet(seen.steps)
    if not kernel.problems:
        seen.quiet(steps)


def minimise(schedule: Schedule, problem: str, tries: int = 60) -> Schedule:
    """Leave out faults while the same rule stays broken."""
    rule = _rule(problem)
    kept = list(schedule.faults)
    index = 0
    while index < len(kept) and tries > 0:
        fewer = kept[:index] + kept[index + 1 :]
        tries -= 1
        found = run(msgspec.structs.replace(schedule, faults=tuple(fewer))).kernel.problems
        if found and _rule(found[0]) == rule:
            kept = fewer
        else:
            index += 1
    return msgspec.structs.replace(schedule, faults=tuple(kept))


def _rule(problem: str) -> str:
    """The rule that a problem names, without its time and its words."""
    return problem.split(": ", 2)[1]


def to_json(schedule: Schedule) -> Any:
    """The schedule as plain data."""
    return msgspec.to_builtins(schedule)
