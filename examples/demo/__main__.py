"""The demo: python -m examples.demo --rollout sglang|reference."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from slackwater.adapters.stores import open_store
from slackwater.backends.child import wait_until
from slackwater.engine.config import load_config
from slackwater.engine.errors import ConfigError, SlackwaterError, Unavailable

from .events import Event, EventTail
from .faults import KillLeader, KillRollout, KillTrainer, Measured, Schedule
from .narrator import Narrator
from .report import make_report, table, unmet
from .stack import Stack
from .watch import FreezeClock, Observer

__all__ = ["main"]

ENGINES = {"sglang": "sglang 0.5.23", "reference": "reference"}
LOOK_SECONDS = 0.05
BIRTH_SECONDS = 60.0
LIMIT_SECONDS = 540.0
STEP_SECONDS = {"sglang": 0.5, "reference": 0.3}
KILL_LEADER_AT, KILL_ROLLOUT_AT, KILL_TRAINER_AT = 15, 30, 45
RESTART_AFTER_SECONDS = 10.0  # a killed process is started again once the job has noticed, or after this


def main() -> int:
    """Run it; 0 when everything was shown, 1 when not, 2 for a bad argument or a missing part, 130 after Ctrl-C."""
    arguments = _arguments()
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            folder = tempfile.TemporaryDirectory(prefix="slackwater-demo-", ignore_cleanup_errors=True)
            work = Path(stack.enter_context(folder))
        else:
            work = arguments.keep.absolute()
        try:
            return Demo(arguments, work, console).run()
        except KeyboardInterrupt:
            console.print("stopped: nothing is left running")
            return 130
        except SlackwaterError as error:
            sys.stderr.write(f"demo: {error}\n")
            return 2 if isinstance(error, ConfigError) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="one RL job that is killed three times"
    )
    parser.add_argument("--rollout", choices=sorted(ENGINES), default="sglang")
    parser.add_argument("--steps", type=int, default=90, help="training steps at least (60 or more)")
    parser.add_argument("--json", type=Path, default=Path("demo-report.json"), help="where the report goes")
    parser.add_argument("--keep", type=Path, help="a new directory for data and logs, kept at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--etcd-members", type=int, choices=(1, 3), default=1)
    arguments = parser.parse_args()
    if arguments.steps < 60:
        parser.error("--steps must be at least 60: the faults need that long")
    if arguments.keep is not None and arguments.keep.exists() and any(arguments.keep.iterdir()):
        parser.error(f"--keep {arguments.keep}: the directory is not empty")
    return arguments


class Demo:
    """One run in one directory."""

    def __init__(self, arguments: argparse.Namespace, work: Path, console: Console) -> None:
        self._arguments, self._work, self._console = arguments, work, console
        self._narrator = Narrator(console, arguments.steps)
        self._began = time.monotonic()

    def run(self) -> int:
        """Everything from the first process to the report; the exit code."""
        arguments = self._arguments
        job = Stack(
            self._work,
            rollout=arguments.rollout,
            steps=arguments.steps,
            step_seconds=STEP_SECONDS[arguments.rollout],
            seed=arguments.seed,
            etcd_members=arguments.etcd_members,
        )
        with self._narrator, job:
            self._narrator.say("start", "etcd and S3")
            job.prepare()
            self._narrator.say("look", f"in another terminal: {etcdctl(job)} --keys-only")
            config, site = load_config(job.config)
            store = open_store(site)
            observer = Observer(store, config.job, EventTail(job.events))
            clock = FreezeClock(store, observer.keys.freeze)
            try:
                clock.start()
                self._narrator.say(
                    "start",
                    f"3 coordinators, 2 rollout servers ({ENGINES[arguments.rollout]}), a trainer of 2 ranks",
                )
                job.start_job()
                wait_until(
                    lambda: store.get(observer.keys.config) is not None, BIRTH_SECONDS, "the job is born"
                )
                job.start_sidecars()
                schedule = self._train(job, observer)
                report = make_report(
                    observer,
                    schedule.done,
                    clock.seconds,
                    engine=ENGINES[arguments.rollout],
                    seconds=time.monotonic() - self._began,
                )
            finally:
                clock.close()
                observer.close()
                store.close()
            return self._finish(report, job)

    def _train(self, job: Stack, observer: Observer) -> Schedule:
        """Watch, kill, revive and tell until the trainer has ended by itself."""
        schedule = Schedule(
            [
                (KILL_LEADER_AT, KillLeader(job, observer)),
                (KILL_ROLLOUT_AT, KillRollout(job, observer, "rollout-1")),
                (KILL_TRAINER_AT, KillTrainer(job, observer)),
            ]
        )
        while True:
            entries, events = observer.look(LOOK_SECONDS)
            for entry in entries:
                self._narrator.entry(entry)
            self._tell(events, observer)
            if any(event.kind == "end" for event in events):
                job.finished = True
            if job.finished and job.gang.over():
                observer.look(LOOK_SECONDS)
                return schedule
            whole = observer.view.go is not None and len(observer.view.routes()) == len(job.urls)
            for what, fault in schedule.act(observer.step, whole):
                self._tell_fault(what, fault.measured)
            if schedule.over:
                (self._work / "finish").touch()
            if not _undetected(schedule):
                for name in job.revive():
                    self._narrator.say("restart", f"{name} died; the demo's supervisor starts it again")
            if time.monotonic() - self._began > LIMIT_SECONDS:
                raise Unavailable(f"not finished within {LIMIT_SECONDS:g} s; logs: {job.logs}")

    def _tell(self, events: list[Event], observer: Observer) -> None:
        for event in events:
            fields = event.fields
            if event.kind == "step":
                self._narrator.progress(fields["step"], fields["reward"], len(observer.view.routes()))
            elif event.kind == "digest":
                kind = "saved" if fields["when"] == "checkpoint" else "restored"
                self._narrator.say(kind, f"state of step {fields['step']} is {fields['digest'][:16]}")

    def _tell_fault(self, what: str, seen: Measured) -> None:
        if what == "struck":
            self._narrator.say("kill", f"kill -9: {seen.kind} ({seen.victim})")
        elif what == "detected":
            self._narrator.say("noticed", f"{seen.kind}: after {seen.detected_at - seen.at:.1f} s")
        else:
            seconds = seen.recovered_at - seen.at
            self._narrator.say("healed", f"{seen.kind}: after {seconds:.1f} s; {seen.detail}")

    def _finish(self, report: dict[str, Any], job: Stack) -> int:
        self._arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        self._narrator.table(table(report))
        self._console.print(
            "What shows the job's state while a demo runs (it says its endpoint when it begins):"
        )
        for key in ("", "checkpoints/", "routes/", "alive/", "leader/", "hold/", "log/"):
            self._console.print(f"  {etcdctl(job)}{key}", soft_wrap=True)
        self._console.print(f"Report: {self._arguments.json}")
        missing = unmet(report)
        for promise in missing:
            self._console.print(f"NOT SHOWN: {promise}", style="bold red")
        return 1 if missing else 0


def etcdctl(job: Stack) -> str:
    """The command that shows the job's whole state; more of a key may be added to it."""
    beside = Path(sys.executable).parent / "etcdctl"
    program = os.path.relpath(beside) if beside.exists() else "etcdctl"
    return f"{program} --endpoints={','.join(job.etcd.endpoints)} get --prefix /slackwater/demo/"


def _undetected(schedule: Schedule) -> bool:
    struck = schedule.struck
    if struck is None or struck.measured.detected_at:
        return False
    return time.monotonic() - struck.measured.at < RESTART_AFTER_SECONDS


if __name__ == "__main__":
    sys.exit(main())
