"""`slackwater explain` and `top` on a live job, and the sentences on made-up records."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from slackwater.adapters.explain import explain_checkpoint, explain_now, explain_recovery, explain_round
from slackwater.backends.embedded import EtcdCluster
from slackwater.engine.errors import NotFound
from slackwater.engine.keys import TRAINER, Keys
from slackwater.engine.model import (
    Alive,
    Checkpoint,
    Go,
    Health,
    LogEntry,
    Participant,
    Record,
    Recovery,
    Timeline,
    encode,
)
from slackwater.engine.ports import KV
from slackwater.engine.view import View
from tests.test_bad_input import refused, slackwater
from tests.test_cli import Live, live, stack, start, wait_for

__all__ = ["live", "stack"]  # fixtures


# -- a live job --------------------------------------------------------------------------------------------


@pytest.mark.real
def test_explain_says_why_the_trainer_waits_and_why_a_round_aborted(live: Live) -> None:
    """In sentences and as JSON: nothing waits, an operator's hold, a round that was given up, one that committed."""
    assert "Nothing keeps the trainer waiting" in live.done("explain")
    live.done("hold", "--reason", "tea")
    live.running.until(lambda v: (a := v.alive(TRAINER)) is not None and bool(a.waits_for), "standing")
    assert "An operator holds the trainer: tea." in live.done("explain").splitlines()
    live.done("release")
    assert live.done("checkpoint", "--wait").strip() == "checkpoint 1"
    live.running.parts[TRAINER].refuse.add("saved")
    assert live.ask("checkpoint", "--wait").returncode != 0
    live.running.parts[TRAINER].refuse.clear()
    assert "It became checkpoint 1 (committed)." in live.done("explain", "round", "1")
    assert "round 2 aborted in save: not saved within 3 s: trainer." in live.done("explain", "round", "2")
    assert "A recovery may take it." in live.done("explain", "checkpoint", "1")
    told = live.json("explain", "recovery", "1")
    assert told["about"] == "recovery 1"
    assert any("recovery 1 done: step 0 from nothing" in sentence for sentence in told["sentences"])
    assert "rollout-0 is alive" in live.done("explain", "participant", "rollout-0")
    refused(live.ask("explain", "round", "77"), "round 77", "goes back to")
    refused(live.ask("explain", "participant", "nobody"), "'nobody'")


@pytest.mark.real
def test_top_goes_on_until_ctrl_c(live: Live, etcd: EtcdCluster, tmp_path: Path, stack: ExitStack) -> None:
    """`top` shows the job again and again with its newest history, and ends with 0 at Ctrl-C."""
    out = tmp_path / "top.log"
    where = ("--job", live.running.config.job, "--etcd", etcd.endpoints[0])
    showing = start(stack, out, "top", "--every", "0.2", *where)
    wait_for(lambda: out.read_text().count("leader c0") >= 2, "two pictures")
    live.done("hold", "--reason", "tea")
    wait_for(lambda: "waits: an operator holds the trainer: tea" in out.read_text(), "news")
    showing.send_signal(signal.SIGINT)
    assert showing.wait(10) == 0
    assert "Traceback" not in out.read_text()


def test_explain_wants_to_know_what() -> None:
    """A missing or impossible number is refused before etcd is asked."""
    refused(slackwater("explain", "round", "--job", "some"), "which round", "number")
    refused(slackwater("explain", "checkpoint", "0", "--job", "some"), "'0'")
    refused(slackwater("explain", "checkpoint", "x", "--job", "some"), "'x'")
    refused(slackwater("explain", "participant", "--job", "some"), "name")
    refused(slackwater("top", "--every", "0", "--job", "some"), "--every")


# -- made-up records ---------------------------------------------------------------------------------------

KEYS = Keys("some")


def view(records: dict[str, Record], *entries: LogEntry) -> View:
    """A view of these records and this history, each written at its own revision."""
    everything = {KEYS.timeline: Timeline(timeline=2), **records}
    everything |= {KEYS.log(number): entry for number, entry in enumerate(entries, 1)}
    kvs = {
        key: KV(key, encode(record), revision, revision)
        for revision, (key, record) in enumerate(everything.items(), 1)
    }
    return View(KEYS, kvs, len(kvs), {})


def participant(name: str, role: str) -> Participant:
    """A registration on host h1."""
    return Participant(name=name, role=role, incarnation=f"{name}-1", timeline=2, host="h1")  # type: ignore[arg-type]


def test_without_a_leader_that_is_said_first() -> None:
    """Nobody leads, a rollout is failed and another has no route: each has its sentence, the leader's first."""
    told = explain_now(
        view(
            {
                KEYS.participant(TRAINER): participant(TRAINER, "trainer"),
                KEYS.participant("r0"): participant("r0", "rollout"),
                KEYS.participant("r1"): participant("r1", "rollout"),
                KEYS.alive(TRAINER): Alive(incarnation="trainer-1", training_step=7),
                KEYS.alive("r1"): Alive(incarnation="r1-1", state="loading"),
                KEYS.health("r0"): Health(incarnation="r0-1", state="failed", evidence="silent"),
                KEYS.go: Go(timeline=2, incarnation="trainer-1"),
            }
        )
    )
    assert told[0].startswith("No coordinator leads")
    assert "Nothing keeps the trainer waiting: it is at step 7 on timeline 2." in told
    assert "r0 on h1 is failed: silent." in told
    assert "r1 serves nobody: it has no route (loading)." in told


def test_a_recovery_that_needs_an_operator_says_what_to_do() -> None:
    """The cause, the note and the two commands that help."""
    stuck = Recovery(recovery=2, phase="needs_operator", cause="the trainer failed", note="3 attempts failed")
    told = "\n".join(explain_now(view({KEYS.recovery: stuck})))
    assert "3 attempts failed" in told
    assert "slackwater retry" in told


def test_a_skipped_checkpoint_names_the_recovery_and_the_reason() -> None:
    """The history's reason is told for the checkpoint and for the recovery; what is off the lineage says so."""
    record = Checkpoint(
        checkpoint=7,
        timeline=1,
        round=9,
        training_step=70,
        weight_version=30,
        buffer_version=0,
        path="p",
        manifest_digest="d",
    )
    done = LogEntry(
        kind="recovery",
        text="recovery 2 done: step 60 from checkpoint 6",
        fields={"recovery": 2, "phase": "resume", "checkpoint": 6, "skipped": {"7": "trainer: bad digest"}},
        at="T1",
    )
    aborted = LogEntry(kind="abort", text="round 8 aborted in save: disk full", fields={"round": 8}, at="T0")
    found = view({KEYS.checkpoint(7): record}, aborted, done)
    told = explain_checkpoint(found, 7)
    assert "Recovery 2 went past it: trainer: bad digest." in told
    assert told[-1].endswith("so it is not on the lineage.")
    assert explain_round(found, 8) == ["T0: round 8 aborted in save: disk full."]
    assert explain_round(found, 9) == ["It became checkpoint 7 (committed)."]
    assert explain_recovery(found, 2) == ["T1: recovery 2 done: step 60 from checkpoint 6."]
    with pytest.raises(NotFound, match="goes back to T0"):
        explain_round(found, 3)
