"""`slackwater advise` on a live job, and its arithmetic on made-up histories."""

from __future__ import annotations

import datetime
import math

import pytest

from slackwater.adapters.advice import best_interval_s, loss, measure, propose, warnings
from slackwater.engine.config import CheckpointSettings, JobConfig, Timers, WeightSettings
from slackwater.engine.model import LogEntry
from tests.test_cli import Live, live, stack

__all__ = ["live", "stack"]  # fixtures

BIRTH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def entry(at_s: float, kind: str, text: str = "", timeline: int = 1, **fields: object) -> LogEntry:
    """A history line so many seconds after the job's birth."""
    at = (BIRTH + datetime.timedelta(seconds=at_s)).isoformat()
    return LogEntry(kind=kind, text=text, fields=fields, timeline=timeline, at=at)


def a_day() -> list[LogEntry]:
    """A day with a checkpoint every 100 steps of 2 s that blocks for half a second, and four failures of 60 s."""
    found = [entry(0, "recovery", "recovery 1: select", recovery=1, phase="select")]
    found += [
        entry(200.0 * n, "commit", "", n // 108 + 1, checkpoint=n, step=100 * n, blocked_s=0.5)
        for n in range(1, 432)
    ]
    for k in range(2, 6):
        begun = 21600.0 * (k - 1) - 100
        found += [
            entry(
                begun, "recovery", f"recovery {k} begins: the trainer failed: x", recovery=k, phase="fence"
            ),
            entry(begun + 60, "recovery", f"recovery {k} done", recovery=k, phase="resume"),
        ]
    asked = "recovery 6 begins: an operator asked to go back to checkpoint 3"
    found.append(entry(86000, "recovery", asked, recovery=6, phase="fence"))
    found.append(entry(86400, "hold"))
    return sorted(found, key=lambda e: e.at)


def test_the_best_interval_is_the_least_of_the_loss() -> None:
    """Young's interval has the least loss of all; the loss never exceeds 1."""
    for blocked, between in ((0.5, 21600.0), (30.0, 3600.0), (0.01, 1e6)):
        best = best_interval_s(blocked, between)
        assert best == pytest.approx(math.sqrt(2 * blocked * between))
        least = loss(best, blocked, between)
        assert all(loss(best * factor, blocked, between) > least for factor in (0.3, 0.9, 1.1, 3))
    assert loss(1e9, 1.0, 10.0) == 1.0
    assert loss(0, 1.0, 10.0) == 1.0


def test_a_history_gives_its_figures() -> None:
    """Step time, blocked time, failures and recovery time; what an operator asked for is no failure."""
    found = measure(a_day(), publish_s=0.1)
    assert found.span_s == 86400
    assert found.failures == 4
    assert found.between_failures_s == 21600
    assert found.step_s == pytest.approx(2.0)
    assert (found.blocked_s, found.recovery_s) == (0.5, 60.0)
    interval, publication, _lag = propose(JobConfig(job="j"), found)
    assert interval.setting == "checkpoint.every_steps"
    # sqrt(2 x 0.5 x 21600) = 147 s = 73 steps, but not below 100
    assert (interval.now, interval.proposed) == (100, 100)
    assert interval.loss_now == pytest.approx(0.5 / 200 + (100 + 60) / 21600)
    assert publication.setting == "weights.publish_every_steps"
    # 0.1 s of 2 s is 5 % at every step and 1 % at every fifth
    assert publication.proposed == 5
    assert publication.loss_proposed == pytest.approx(0.01)


def test_pauses_that_ended_propose_a_longer_window() -> None:
    """Twice the longest pause that ended by itself; a real failure is none; never a shorter window."""
    history = [
        entry(0, "verdict", participant="r0", state="suspected"),
        entry(40, "verdict", participant="r0", state="alive"),
        entry(50, "verdict", participant="r1", state="suspected"),
        entry(110, "verdict", participant="r1", state="failed"),
        entry(200, "verdict", participant="r1", state="alive"),
    ]
    found = measure(history)
    assert found.pauses_s == (40.0,)
    window = propose(JobConfig(job="j"), found)[0]
    assert (window.setting, window.now, window.proposed) == ("timers.window_s", 60.0, 80)
    calm = measure([*history[:1], entry(5, "verdict", participant="r0", state="alive")])
    assert propose(JobConfig(job="j"), calm)[0].proposed == 60.0


def test_an_empty_history_proposes_only_what_the_settings_say() -> None:
    """Nothing measured, nothing proposed from it; too tight a lag is proposed away all the same."""
    found = measure([])
    (lag,) = propose(
        JobConfig(job="j", weights=WeightSettings(publish_every_steps=4, max_lag_steps=4)), found
    )
    assert (lag.setting, lag.proposed) == ("weights.max_lag_steps", 7)
    assert warnings(JobConfig(job="j"), found) == []


def test_warnings_name_the_setting() -> None:
    """Checkpoints below 100 steps, steps above 5 s, batches that stretch the cut, limits that see no hang."""
    history = [entry(40.0 * n, "commit", step=2 * n, checkpoint=n) for n in (1, 2, 3)]
    found = measure([*history, *[entry(130, "abort")] * 4])
    config = JobConfig(
        job="j", checkpoint=CheckpointSettings(every_steps=2), timers=Timers(ready_deadline_s=30.0)
    )
    told = "\n".join(warnings(config, found))
    for words in ("every_steps = 2 is below 100", "a step takes 20.0 s", "ready_deadline_s = 30", "4 rounds"):
        assert words in told


@pytest.mark.real
def test_advise_reads_a_live_job(live: Live) -> None:
    """The command measures the job's own checkpoints, in words and as JSON."""
    for number in (1, 2):
        assert live.done("checkpoint", "--wait").strip() == f"checkpoint {number}"
    told = live.json("advise")
    assert told["measured"]["checkpoints"] == 2
    assert told["measured"]["step_s"] > 0
    assert {one["setting"] for one in told["proposals"]} >= {"weights.max_lag_steps"}
    assert "2 checkpoints, 0 rounds given up, 0 failures" in live.done("advise")
