"""The protocol under simulated faults: the sound one keeps every promise, each broken one is found."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.simulation.directed import DIRECTED
from tests.simulation.faults import Schedule, draw, minimise, run
from tests.simulation.mutants import EQUIVALENT, MUTANTS, mutated, schedule_of
from tests.simulation.strikes import Fault

EVENTS = 200_000
SEEDS: dict[str, int] = json.loads(Path(__file__).with_name("simulation").joinpath("seeds.json").read_text())


def replay(schedule: Schedule) -> str:
    """What a person types to see a failure again."""
    return f"python -m tests.simulation --replay '{msgspec.json.encode(schedule).decode()}'"


def test_no_promise_breaks_under_random_faults() -> None:
    """200,000 effective events of random schedules break no invariant, and the job comes back after each."""
    events, seed = 0, 20_000
    commits = recoveries = 0
    while events < EVENTS or recoveries < 20:
        schedule = draw(seed)
        world = run(schedule)
        assert not world.kernel.problems, f"{world.kernel.problems[0]}\n{replay(schedule)}"
        events += world.kernel.events
        commits += world.invariants.commits
        recoveries += world.invariants.recoveries
        seed += 1
    assert commits > 20


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


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_protocol_is_found(name: str) -> None:
    """The mutant breaks a promise at its recorded seed, and the sound protocol does not."""
    schedule = schedule_of(name, SEEDS[name])
    with mutated(name):
        assert run(schedule).kernel.problems, f"{name} goes unnoticed\n{replay(schedule)}"
    problems = run(schedule).kernel.problems
    assert not problems, f"{problems[0]}\n{replay(schedule)}"


def test_every_mutant_has_a_seed_and_every_made_schedule_a_mutant() -> None:
    """The recorded seeds, the mutants and the schedules made for them belong together."""
    assert set(SEEDS) == set(MUTANTS)
    assert set(DIRECTED) <= set(MUTANTS)
    assert not set(EQUIVALENT) & set(MUTANTS)


def test_a_violation_is_made_smaller_and_replays_from_its_text() -> None:
    """The faults that a violation does not need are left out, and what is printed shows the same rule broken."""
    noise = tuple(
        Fault(at, kind, "rollout-0", 1.0, 0.3)
        for at, kind in ((11.0, "slow"), (13.0, "lost"), (16.0, "compact"))
    )
    needed = schedule_of("no_timeline_fence", SEEDS["no_timeline_fence"])
    whole = msgspec.structs.replace(needed, faults=tuple(sorted(needed.faults + noise, key=lambda f: f.at)))
    with mutated("no_timeline_fence"):
        problem = run(whole).kernel.problems[0]
        small = minimise(whole, problem)
        assert 0 < len(small.faults) < len(needed.faults)
        again = msgspec.json.decode(msgspec.json.encode(small), type=Schedule)
        assert run(again).kernel.problems[0].split(": ")[1] == problem.split(": ")[1]
    assert not run(small).kernel.problems


def simulate(*options: str) -> tuple[int, dict[str, Any]]:
    """Run `python -m tests.simulation --json`; its exit code and what it printed."""
    command = [sys.executable, "-m", "tests.simulation", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


@pytest.mark.real
def test_the_command_fails_below_the_rate_asked_for() -> None:
    """Too few events a second is a failure of the run, like a violation is; the figures are printed all the same."""
    code, found = simulate("--seconds", "1", "--no-mutants", "--least-rate", "1e9")
    assert code == 1
    assert found["violations"] == []
    assert found["events"] > 0
    code, found = simulate("--seconds", "1", "--no-mutants")
    assert (code, found["violations"]) == (0, [])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_half_an_hour_of_schedules_and_every_mutant() -> None:
    """No promise breaks in 30 minutes of fresh schedules; each mutant is found within a minute, all within ten."""
    seed = str(random.SystemRandom().randrange(1 << 40))
    code, found = simulate("--seconds", "1800", "--seed", seed, "--least-rate", "2000")
    assert found["violations"] == []
    assert found["mutants_missed"] == []
    assert found["mutants_caught"] == f"{len(MUTANTS)}/{len(MUTANTS)}"
    assert found["mutants_seconds"] <= 600
    assert code == 0, f"{found['events_per_second']} events/s"
