"""`python -m tests.simulation --seconds N --seed S --json`: random schedules, then the mutants."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec

from .faults import Schedule, draw, minimise, run, to_json


def main() -> int:
    """Run; exit 1 when an invariant broke or a mutant went unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=30.0, help="bound of the sound run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--replay", default="", help="a schedule as JSON, as printed with a violation")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    parser.add_argument("--least-rate", type=float, default=0.0, help="fail below so many events a second")
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--no-minimise", action="store_true")
    parser.add_argument("--record", action="store_true", help="hunt every mutant and record its seed")
    options = parser.parse_args()
    if options.record:
        return _record(60.0)
    if options.replay:
        world = run(msgspec.json.decode(options.replay, type=Schedule))
        print("\n".join(world.kernel.problems) or "no violation")
        return int(bool(world.kernel.problems))
    begun = time.monotonic()
    events = schedules = 0
    totals = {"steps": 0, "commits": 0, "recoveries": 0}
    violations = []
    seed = options.seed
    while time.monotonic() - begun < options.seconds:
        schedule = draw(seed)
        world = run(schedule)
        events += world.kernel.events
        schedules += 1
        for name in totals:
            totals[name] += getattr(world.invariants, name)
        if world.kernel.problems:
            problem = world.kernel.problems[0]
            small = schedule if options.no_minimise else minimise(schedule, problem)
            violations.append({"problem": problem, "schedule": to_json(small)})
            if not options.keep_going:
                break
        seed += 1
    took = time.monotonic() - begun
    result = {
        "events": events,
        "schedules": schedules,
        "events_per_second": round(events / took),
        **totals,
        "violations": violations,
    }
    missed: list[str] = []
    if not options.no_mutants:
        from .mutants import MUTANTS, hunt_all

        missed, hunted = hunt_all()
        result["mutants_caught"] = f"{len(MUTANTS) - len(missed)}/{len(MUTANTS)}"
        result |= {"mutants_missed": missed, "mutants_seconds": round(hunted, 1)}
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return int(bool(violations) or bool(missed) or events / took < options.least_rate)


def _record(seconds_each: float) -> int:
    """Hunt for every mutant and write the seeds down; needed anew when the protocol's timing changes."""
    from .directed import DIRECTED
    from .mutants import MUTANTS, hunt

    seeds = {}
    for name in sorted(MUTANTS):
        found = hunt(name, seconds_each, first_seed=1 if name in DIRECTED else 100_000)
        print(name, found[1].splitlines()[-1] if found else "NOT FOUND", file=sys.stderr, flush=True)
        if found:
            seeds[name] = found[0].seed
    Path(__file__).with_name("seeds.json").write_text(json.dumps(seeds, indent=1) + "\n")
    return int(len(seeds) < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
