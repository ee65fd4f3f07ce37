"""The demo as a person runs it, on the reference server: killed three times, healed, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.real, pytest.mark.alone, pytest.mark.timeout(400)]
MARK = "SLACKWATER_DEMO_TEST"


def start(report: Path, out: Path, mark: str) -> subprocess.Popen[bytes]:
    """One demo in a group of its own, its processes recognisable by an environment variable."""
    command = [
        sys.executable,
        "-m",
        "examples.demo",
        "--rollout",
        "reference",
        "--steps",
        "60",
        "--json",
        str(report),
    ]
    with out.open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )


def left(mark: str) -> list[str]:
    """Command lines of the processes that still carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def nothing_left(mark: str) -> None:
    """Every process of a demo is gone soon after it."""
    deadline = time.monotonic() + 15
    pause = threading.Event()
    while left(mark) and time.monotonic() < deadline:
        pause.wait(0.2)
    assert left(mark) == []


def check(report: Path, text: str) -> None:
    """The report has every promised figure, and they show a job that healed."""
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["steps"] >= 60
    assert figures["rollout_engine"] == "reference"
    assert [fault["kind"] for fault in figures["faults"]] == [
        "leading coordinator",
        "rollout server",
        "trainer",
    ]
    assert all(0 < fault["detected_s"] <= fault["recovered_s"] for fault in figures["faults"])
    assert figures["checkpoints_committed"] >= 5
    assert 1 <= figures["checkpoints_durable"] <= figures["checkpoints_committed"]
    assert figures["resumed_from"]["checkpoint"] >= 1
    assert 0 <= figures["steps_repeated"] <= 15
    assert figures["state_digest_at_checkpoint"] == figures["state_digest_after_restore"]
    assert len(figures["state_digest_after_restore"]) == 64
    assert 0 < figures["freeze_s"]["median"] <= figures["freeze_s"]["max"]
    assert figures["reward_last"] > figures["reward_first"]
    assert figures["mixed_version_samples_trained"] == 0
    assert figures["version_vector"]["training_step"] == figures["steps"]
    assert figures["version_vector"]["buffer_version"] > 0
    assert figures["mixed_version_samples_refused"] >= 0
    assert figures["faults"][2]["victim"].endswith("before its update")
    assert "\x1b[" not in text  # no colour where nobody looks at a terminal
    story = text[: text.index("What this run has shown")].splitlines()[:-1]
    assert [line for line in story if not re.match(r" *\d+\.\ds  [a-z_]+ +\S", line)] == []  # a line an event
    assert " look " in story[1] + story[2]  # how to look at the job while it runs
    assert text.count("etcdctl --endpoints=") > 5


def test_two_demos_side_by_side(tmp_path: Path) -> None:
    """Both end well with all figures, neither takes the other's ports or files, and nothing is left."""
    names = ("a", "b")
    marks = {name: f"{tmp_path.name}-{name}" for name in names}
    runs = {name: start(tmp_path / f"{name}.json", tmp_path / f"{name}.log", marks[name]) for name in names}
    try:
        for name, run in runs.items():
            assert run.wait(350) == 0, (tmp_path / f"{name}.log").read_text()[-6000:]
    finally:
        for run in runs.values():
            run.send_signal(signal.SIGINT) if run.poll() is None else None
            run.wait(60)
    for name in names:
        check(tmp_path / f"{name}.json", (tmp_path / f"{name}.log").read_text())
        nothing_left(marks[name])


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """An interrupt in the middle ends the whole demo soon, with exit code 130."""
    log = tmp_path / "log"
    mark = f"{tmp_path.name}-c"
    run = start(tmp_path / "json", log, mark)
    try:
        deadline = time.monotonic() + 240
        pause = threading.Event()
        while "step " not in log.read_text() and run.poll() is None and time.monotonic() < deadline:
            pause.wait(0.2)
        assert len(left(mark)) > 8
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, log.read_text()[-4000:]
    finally:
        run.kill() if run.poll() is None else None
        run.wait(30)
    nothing_left(mark)
