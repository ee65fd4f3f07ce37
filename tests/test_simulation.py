"""The protocol under simulated faults: the sound one keeps every promise, each broken one is found."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from tests.simulation.faults import Schedule, draw, run
from tests.simulation.mutants import MUTANTS, mutated

EVENTS = 200_000
SEEDS: dict[str, int] = json.loads(Path(__file__).with_name("simulation").joinpath("seeds.json").read_text())


def test_no_promise_breaks_under_random_faults() -> None:
    """200,000 events of random schedules break no invariant, and the job comes back after each."""
    events, seed, begun = 0, 20_000, time.monotonic()
    commits = recoveries = 0
    while events < EVENTS or recoveries < 20:
        schedule = draw(seed)
        world = run(schedule)
        assert not world.kernel.problems, (
            f"{world.kernel.problems[0]}\nreplay: {msgspec.json.encode(schedule).decode()}"
        )
        events += world.kernel.events
        commits += world.invariants.commits
        recoveries += world.invariants.recoveries
        seed += 1
    assert commits > 20
    assert events / (time.monotonic() - begun) > 2_000


def test_a_schedule_replays_to_the_same_events() -> None:
    """The seed is the whole run: two replays do the same number of events and write the same revisions."""
    first, second = run(draw(7)), run(draw(7))
    assert (first.kernel.events, first.store.revision) == (second.kernel.events, second.store.revision)
    assert first.invariants.steps == second.invariants.steps


def test_a_sunny_job_trains_and_commits() -> None:
    """Without faults the job is born, trains, and commits a checkpoint at each multiple of six steps."""
    world = run(Schedule(seed=1, faults=(), seconds=40.0))
    assert not world.kernel.problems
    assert world.invariants.recoveries == 1
    assert world.invariants.commits >= world.invariants.steps // 6 - 2


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_a_broken_protocol_is_found(name: str) -> None:
    """The mutant breaks a promise at its recorded seed, and the sound protocol does not."""
    with mutated(name):
        assert run(draw(SEEDS[name])).kernel.problems, f"{name} goes unnoticed"


def test_at_least_twenty_mutants_are_recorded() -> None:
    """Enough of the protocol's rules are broken on purpose, and each recorded one exists."""
    assert set(SEEDS) <= set(MUTANTS)
    assert len(SEEDS) >= 20
