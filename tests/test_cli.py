"""Every command of the command line, on a live job: a real coordinator process and scripted participants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.config import JobConfig
from slackwater.engine.keys import TRAINER, Keys
from slackwater.engine.settings import bootstrap
from tests.test_bad_input import refused, slackwater
from tests.test_coordinator import Job, settings

pytestmark = pytest.mark.real

TIMERS = """
[timers]
heartbeat_s = 0.5
lease_s = 3
window_s = 2.0
persist_s = 1.0
ready_deadline_s = 3.0
save_deadline_s = 3.0
resync_deadline_s = 5.0
[timers.stall_s]
training = 60.0
[checkpoint]
every_steps = 0
keep_last = -1
[weights]
publish_every_steps = 2
max_lag_steps = 4
"""


def start(stack: ExitStack, out: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """Run a command in the background; both of its streams go to `out`. It ends with the test."""
    dropped = ("SLACKWATER_", "AWS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    argv = [sys.executable, "-m", "slackwater.adapters.cli", *map(str, arguments)]
    with out.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, env=kept)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait until something outside this process has come about."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)


class Live:
    """A job that trains, and the commands on it."""

    def __init__(self, running: Job, etcd: EtcdCluster) -> None:
        self.running = running
        self._where = ("--job", running.config.job, "--etcd", ",".join(etcd.endpoints))

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command whatever its exit code."""
        return slackwater(*arguments, *self._where)

    def done(self, *arguments: str) -> str:
        """Run a command that must succeed; what it printed."""
        found = self.ask(*arguments)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def json(self, *arguments: str) -> Any:
        """Run a command with --json and parse it."""
        return msgspec.json.decode(self.done(*arguments, "--json"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever a test starts ends with it."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def live(etcd: EtcdCluster, store: EtcdStore, job: str, tmp_path: Path, stack: ExitStack) -> Live:
    """A coordinator process that made the job from its file, and a trainer, a buffer and a rollout that go."""
    site = f'[site]\netcd = ["{etcd.endpoints[0]}"]\nlocal = "{tmp_path / "local"}"\n'
    file = tmp_path / "job.toml"
    file.write_text(f'job = "{job}"\n{TIMERS}{site}')
    start(stack, tmp_path / "c0.log", "coordinator", "--config", file, "--name", "c0")
    keys = Keys(job)
    wait_for(lambda: bool(store.range(keys.leaders).kvs), "a coordinator")
    running = Job(store, settings(job), stack)
    running.add_all()
    running.until(lambda v: v.go is not None, "go")
    return Live(running, etcd)


# -- a job that runs ---------------------------------------------------------------------------------------


def test_the_commands_look_at_a_live_job(
    live: Live, etcd: EtcdCluster, tmp_path: Path, stack: ExitStack
) -> None:
    """status, checkpoints ls and log show the job, in words and as JSON; log -f goes on until Ctrl-C."""
    assert live.done("checkpoint", "--wait").strip() == "checkpoint 1"
    found = live.json("status")
    assert found["leader"]["id"] == "c0"
    assert found["leader"]["candidates"] == 1
    assert (found["timeline"], found["checkpoint"], found["training"]) == (1, 1, True)
    assert found["vector"]["weight_version"] > 0
    assert {one["name"]: one["health"] for one in found["participants"]} == dict.fromkeys(
        ("buffer", "rollout-0", TRAINER), "alive"
    )
    words = live.done("status")
    assert "leader c0" in words
    assert "rollout-0" in words
    (row,) = live.json("checkpoints", "ls")
    assert (row["checkpoint"], row["state"], row["on_lineage"]) == (1, "committed", True)
    assert "committed" in live.done("checkpoints", "ls")
    entries = [msgspec.json.decode(line) for line in live.done("log", "--json").splitlines()]
    assert [entry["number"] for entry in entries] == list(range(1, len(entries) + 1))
    assert any(entry["text"].startswith("recovery 1 done") for entry in entries)
    out = tmp_path / "follow.log"
    where = ("--job", live.running.config.job, "--etcd", etcd.endpoints[0])
    following = start(stack, out, "log", "-f", *where)
    wait_for(lambda: "checkpoint 1 committed" in out.read_text(), "the history so far")
    live.done("checkpoint", "--wait")
    wait_for(lambda: "checkpoint 2 committed" in out.read_text(), "a new entry")
    following.send_signal(signal.SIGINT)
    assert following.wait(10) == 0
    assert "Traceback" not in out.read_text()


def test_hold_shows_who_holds_whom_until_release(live: Live) -> None:
    """An operator's hold stands the trainer, says so with its reason, and ends with release."""
    trainer = live.running.parts[TRAINER]
    assert live.done("hold", "--reason", "tea").strip() == "hold"
    live.running.until(lambda v: (a := v.alive(TRAINER)) is not None and bool(a.waits_for), "standing")
    step = trainer.trained
    assert live.json("status")["holds"] == {"operator": "tea"}
    words = live.done("status")
    assert "an operator holds the trainer: tea" in words
    assert "trainer stands: operator: tea" in words
    assert trainer.trained == step
    assert live.done("release").strip() == "release"
    live.running.until(lambda _: trainer.trained > step, "training again")
    assert live.json("status")["holds"] == {}


def test_rollback_goes_back_and_refuses_what_is_not_there(live: Live) -> None:
    """rollback --to --wait ends on a new timeline at that checkpoint; an unknown one is refused and changes nothing."""
    for number in (1, 2):
        assert live.done("checkpoint", "--wait").strip() == f"checkpoint {number}"
    first = live.running.view().checkpoints()[1]
    refused(live.ask("rollback", "--to", "99", "--wait"), "99", "lineage")
    assert live.running.view().timeline == 1
    said = live.done("rollback", "--to", "1", "--wait")
    assert f"checkpoint 1, step {first.training_step}" in said
    assert live.json("status")["timeline"] == 2
    assert [row["on_lineage"] for row in live.json("checkpoints", "ls")] == [True, False]
    refused(live.ask("rollback", "--to", "2", "--wait"), "lineage")
    refused(live.ask("retry"), "no recovery waits")


def test_remove_forgets_a_rollout(live: Live) -> None:
    """A rollout that is gone is forgotten; a name that is no rollout's is refused."""
    live.running.add("rollout-1", "rollout")
    live.running.until(lambda v: "rollout-1" in v.routes(), "a second route")
    live.running.parts["rollout-1"].stop()
    assert live.done("remove", "rollout-1").strip() == "removed"
    assert "rollout-1" not in live.running.view().participants()
    refused(live.ask("remove", "rollout-9"), "rollout-9")
    refused(live.ask("remove", TRAINER), TRAINER)
    assert TRAINER in live.running.view().participants()


def test_a_refused_checkpoint_says_why(live: Live) -> None:
    """checkpoint --wait on a round that is aborted fails with the abort's own reason; without --wait it only asks."""
    live.running.parts[TRAINER].refuse.add("saved")
    refused(live.ask("checkpoint", "--wait"), "aborted in save", "not saved within 3 s: trainer")
    live.running.parts[TRAINER].refuse.clear()
    assert live.done("checkpoint").startswith("asked: request ")
    live.running.until(lambda v: v.last_checkpoint == 1, "a checkpoint without waiting")


def test_a_replica_joins_by_name_alone(
    live: Live, etcd: EtcdCluster, tmp_path: Path, stack: ExitStack
) -> None:
    """--job and --etcd are enough for a second coordinator; SIGTERM ends it with 0 and its candidacy at once."""
    where = ("--job", live.running.config.job, "--etcd", etcd.endpoints[0])
    second = start(stack, tmp_path / "c1.log", "coordinator", "--name", "c1", *where)

    def candidates() -> int:
        return int(live.json("status")["leader"]["candidates"])

    wait_for(lambda: candidates() == 2, "two candidates")
    assert live.json("status")["leader"]["id"] == "c0"
    second.send_signal(signal.SIGTERM)
    assert second.wait(15) == 0, (tmp_path / "c1.log").read_text()
    assert candidates() == 1


def test_attach_sglang_refuses(live: Live, tmp_path: Path, free_port: int) -> None:
    """A bad name, a key file that is not there, another job: refused before anything is registered."""
    url = ("--url", f"http://127.0.0.1:{free_port}")
    refused(live.ask("attach", "sglang", *url, "--name", "No Name"), "rollout name")
    missing = str(tmp_path / "none.key")
    refused(live.ask("attach", "sglang", *url, "--name", "r1", "--api-key-file", missing), missing)
    before = live.running.view().participants().keys()
    where = ("--job", "not-there", *live._where[2:])
    refused(slackwater("attach", "sglang", *url, "--name", "r1", *where), "not-there")
    assert live.running.view().participants().keys() == before


# -- without a coordinator, and without a job --------------------------------------------------------------


def test_nobody_takes_a_request_up(etcd: EtcdCluster, store: EtcdStore, job: str) -> None:
    """Without a coordinator --wait gives up at its deadline with code 1 and says that nobody took it up."""
    bootstrap(store, JobConfig(job=job).checked())
    where = ("--job", job, "--etcd", etcd.endpoints[0])
    done = slackwater("checkpoint", "--wait", "--timeout", "1", *where)
    assert done.returncode == 1
    assert "no coordinator took it up" in done.stderr
    status = msgspec.json.decode(slackwater("status", "--json", *where).stdout)
    assert status["leader"] is None
    assert "leader nobody" in slackwater("status", *where).stdout


def test_up_runs_until_ctrl_c_and_leaves_nothing(tmp_path: Path, stack: ExitStack) -> None:
    """The servers of `up` are usable by what it prints; after Ctrl-C none is left; no directory is reused."""
    out = tmp_path / "up.log"
    process = start(stack, out, "up", tmp_path / "dev")
    wait_for(lambda: "running; Ctrl-C" in out.read_text(), "the servers", 60.0)
    text = out.read_text()
    exports = dict(
        line.removeprefix("export ").split("=", 1) for line in text.splitlines() if "export" in line
    )
    keys = {name: value for name, value in exports.items() if name.startswith("AWS_")}
    file = tmp_path / "job.toml"
    file.write_text('job = "j"\n' + text[text.index("[site]") :])
    done = slackwater("config", "check", "--site", file, **keys)
    assert done.returncode == 0, done.stderr
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0, out.read_text()
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert "Traceback" not in out.read_text()
    refused(slackwater("up", tmp_path / "dev"), "not empty")
