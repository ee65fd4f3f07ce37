"""The leader's judgement as a pure function: given what etcd holds, which transactions are due."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slackwater.engine import model
from slackwater.engine.config import CheckpointSettings, JobConfig, Timers, WeightSettings
from slackwater.engine.decide import decide
from slackwater.engine.keys import Keys
from slackwater.engine.model import (
    Ack,
    Alive,
    Checkpoint,
    CheckpointHead,
    ConfigRecord,
    Freeze,
    Go,
    Health,
    Lineage,
    Participant,
    Recovery,
    Request,
    Round,
    RoundHead,
    Route,
    Timeline,
    Vote,
    WeightHead,
)
from slackwater.engine.ports import KV, Put
from slackwater.engine.view import FirstSeen, View

KEYS = Keys("job")
CONFIG = JobConfig(job="job", timers=Timers(window_s=60), weights=WeightSettings(min_rollouts=1))


class Board:
    """A job's keys, put one after the other, as etcd would number them."""

    def __init__(self) -> None:
        self.kvs: dict[str, KV] = {}
        self.revision = 0
        self.times: dict[str, tuple[int, float]] = {}

    def put(self, key: str, record: model.Record, at: float = 0.0) -> None:
        """Write one record, first seen by the leader at `at`."""
        self.revision += 1
        created = self.kvs[key].create_revision if key in self.kvs else self.revision
        self.kvs[key] = KV(key, model.encode(record), created, self.revision)
        self.times[key] = (self.revision, at)

    def drop(self, key: str, at: float = 0.0) -> None:
        """Delete one key; its absence was first seen at `at`."""
        self.revision += 1
        del self.kvs[key]
        self.times[key] = (0, at)

    def decide(self, now: float = 0.0, config: JobConfig = CONFIG) -> Mapping[str, Put | None]:
        """Names of the actions that are due, with the first record that each writes."""
        view = View(KEYS, self.kvs, self.revision, {})
        found: dict[str, Put | None] = {}
        for action in decide(view, FirstSeen(self.times), now, config):
            puts = [op for op in action.ops if isinstance(op, Put)]
            found[action.name] = puts[0] if puts else None
        return found


def running() -> Board:
    """A job that trains: one trainer, one buffer, two rollouts with routes at version 4 of step 9."""
    board = Board()
    board.put(KEYS.config, ConfigRecord(job_uid="u", settings={"job": "job"}))
    board.put(KEYS.timeline, Timeline(timeline=2))
    board.put(KEYS.timeline_record(1), Lineage(timeline=1, parent=0, selected=True))
    board.put(
        KEYS.timeline_record(2),
        Lineage(timeline=2, parent=1, selected=True, from_checkpoint=3, from_version=2),
    )
    for name, role in (("trainer", "trainer"), ("buffer", "buffer"), ("r0", "rollout"), ("r1", "rollout")):
        board.put(
            KEYS.participant(name),
            Participant(name=name, role=role, incarnation=f"{name}-a", timeline=2),  # type: ignore[arg-type]
        )
        board.put(KEYS.alive(name), Alive(incarnation=f"{name}-a", state="idle", training_step=9))
        board.put(KEYS.health(name), Health(incarnation=f"{name}-a", state="alive"))
    board.put(KEYS.weight_head, WeightHead(version=4, step=9, timeline=2))
    for name in ("r0", "r1"):
        route = Route(name=name, url="http://h", version=4, timeline=2, incarnation=f"{name}-a")
        board.put(KEYS.route(name), route)
    board.put(KEYS.serving, model.Serving(version=4, timeline=2))
    board.put(KEYS.go, Go(timeline=2, incarnation="trainer-a", buffer="buffer-a"))
    return board


def checkpoint(number: int, timeline: int, state: str = "committed") -> Checkpoint:
    """A record of a checkpoint."""
    return Checkpoint(
        checkpoint=number,
        timeline=timeline,
        round=number,
        training_step=number * 10,
        weight_version=number,
        buffer_version=0,
        path=f"p{number}",
        manifest_digest="sha256:" + "0" * 64,
        state=state,  # type: ignore[arg-type]
    )


def voted(board: Board, phase: str, states: Mapping[str, str], incarnation: str = "a") -> None:
    """An open round 7 at the cut (9, 4) in `phase`, with votes."""
    voters = {name: f"{name}-a" for name in ("trainer", "buffer", "r0", "r1")}
    record = Round(round=7, timeline=2, phase=phase, step=9, version=4, voters=voters)  # type: ignore[arg-type]
    board.put(KEYS.round, record)
    token = board.kvs[KEYS.round].create_revision
    board.put(KEYS.freeze, Freeze(round=7, token=token, step=9, version=4))
    for name, state in states.items():
        vote = Vote(
            name=name,
            incarnation=f"{name}-{incarnation}",
            timeline=2,
            round=7,
            state=state,  # type: ignore[arg-type]
            step=9,
            version=4,
        )
        board.put(KEYS.vote(7, name), vote)


ALL_SAVED = {"trainer": "saved", "buffer": "saved", "r0": "saved", "r1": "saved"}


def test_a_running_job_needs_only_its_next_round() -> None:
    """Nothing is due but the announcement of the next checkpoint, which freezes nothing."""
    assert list(running().decide()) == ["prepare round 1"]


def test_silence_is_suspected_then_failed_after_the_window() -> None:
    """A missing liveness key is suspected at once, failed only after the whole window."""
    board = running()
    board.drop(KEYS.alive("r1"), at=100.0)
    assert "suspected r1" in board.decide(100.0)
    board.put(KEYS.health("r1"), Health(incarnation="r1-a", state="suspected"), at=100.0)
    assert "failed r1" not in board.decide(159.0)
    assert "failed r1" in board.decide(160.5)


def test_a_new_leader_goes_on_from_what_was_observed() -> None:
    """The window is neither started anew nor shortened when the leader changes."""
    board = running()
    board.drop(KEYS.alive("r1"), at=0.0)
    board.put(KEYS.health("r1"), Health(incarnation="r1-a", state="suspected", observed_s=50.0), at=1000.0)
    assert "failed r1" not in board.decide(1009.0)
    assert "failed r1" in board.decide(1010.5)


def test_hard_evidence_does_not_wait() -> None:
    """A process whose beat said that it exited is failed at once."""
    board = running()
    gone = Participant(name="r1", role="rollout", incarnation="r1-a", timeline=2, ended="exited")
    board.put(KEYS.participant("r1"), gone)
    assert "failed r1" in board.decide()


def test_most_hosts_silent_at_once_is_no_massacre() -> None:
    """With more than half of four hosts gone the window is longer; the hold is not delayed."""
    board = running()
    for number in range(4):
        name = f"h{number}"
        record = Participant(
            name=name, role="rollout", incarnation=f"{name}-a", timeline=2, host=f"host{number}"
        )
        board.put(KEYS.participant(name), record)
        board.put(KEYS.health(name), Health(incarnation=f"{name}-a", state="suspected"))
    assert not any(name.startswith("failed") for name in board.decide(100.0))


def test_a_stalled_trainer_is_failed_though_its_beat_goes_on() -> None:
    """A beat cannot hide a hang: no progress for longer than the state allows."""
    board = running()
    board.put(
        KEYS.alive("trainer"), Alive(incarnation="trainer-a", state="training", training_step=9), at=0.0
    )
    assert "failed trainer" not in board.decide(599.0)
    assert "failed trainer" in board.decide(601.0)


def test_a_new_trainer_begins_a_recovery() -> None:
    """A registration by another incarnation fences the old one, at once."""
    board = running()
    board.put(
        KEYS.participant("trainer"), Participant(name="trainer", role="trainer", incarnation="b", timeline=2)
    )
    assert "fence 3" in board.decide()


def test_lineage_ends_where_the_path_left_it() -> None:
    """I9: of timeline 1 only checkpoints up to 3 count after the job went back to 3."""
    board = running()
    for number, timeline in ((1, 1), (3, 1), (4, 1), (5, 2)):
        board.put(KEYS.checkpoint(number), checkpoint(number, timeline))
    view = View(KEYS, board.kvs, board.revision, {})
    assert [record.checkpoint for record in view.eligible()] == [5, 3, 1]


@pytest.mark.parametrize(("skipped", "chosen"), [({}, 5), ({"5": "bad"}, 3), ({"5": "bad", "3": "bad"}, 1)])
def test_recovery_takes_the_newest_that_verifies(skipped: dict[str, str], chosen: int) -> None:
    """I9: the newest on the lineage, else the next older; one that is being deleted is never taken."""
    board = running()
    board.drop(KEYS.go)
    for number, timeline, state in (
        (1, 1, "durable"),
        (3, 1, "committed"),
        (4, 1, "committed"),
        (5, 2, "committed"),
    ):
        board.put(KEYS.checkpoint(number), checkpoint(number, timeline, state))
    board.put(KEYS.checkpoint(6), checkpoint(6, 2, "deleting"))
    board.put(KEYS.recovery, Recovery(recovery=2, phase="select", trainer="trainer-a", skipped=skipped))
    assert f"select {chosen}" in board.decide()


def test_recovery_never_starts_from_nothing_while_there_is_something() -> None:
    """I9: records without one that verifies, or data without records, need an operator."""
    board = running()
    board.drop(KEYS.go)
    board.put(KEYS.checkpoint(1), checkpoint(1, 1))
    board.put(KEYS.recovery, Recovery(recovery=2, phase="select", trainer="trainer-a", skipped={"1": "bad"}))
    assert list(board.decide()) == ["needs operator"]
    board.drop(KEYS.checkpoint(1))
    board.put(KEYS.recovery, Recovery(recovery=2, phase="select", trainer="trainer-a"))
    ack = Ack(
        recovery=2,
        name="trainer",
        incarnation="trainer-a",
        phase="fence",
        found_data="s3://b/p/committed.json",
    )
    board.put(KEYS.ack(2, "trainer"), ack)
    assert list(board.decide()) == ["needs operator"]


def test_the_third_failure_on_one_checkpoint_needs_an_operator() -> None:
    """No livelock: two retries with growing waits, then a person is asked."""
    board = running()
    board.drop(KEYS.go)
    board.put(KEYS.checkpoint(3), checkpoint(3, 2))
    recovery = Recovery(recovery=2, phase="select", trainer="trainer-a", checkpoint=3, attempts=1)
    board.put(KEYS.recovery, recovery, at=0.0)
    assert list(board.decide(1.0)) == []
    assert "select 3" in board.decide(6.0)
    board.put(
        KEYS.recovery, Recovery(recovery=2, phase="select", trainer="trainer-a", checkpoint=3, attempts=3)
    )
    assert "needs operator" in board.decide()


def test_all_ready_clears_the_freeze_in_overlap() -> None:
    """I6: the freeze ends with the last ready vote, long before the files are written."""
    board = running()
    voted(board, "ready", {**ALL_SAVED, "trainer": "ready", "buffer": "ready"})
    assert "save round 7" in board.decide()


def test_one_slow_rollout_does_not_veto() -> None:
    """At half the deadline a rollout that is not on the cut loses route and vote; the others suffice."""
    board = running()
    board.put(KEYS.route("r1"), Route(name="r1", url="u", version=3, timeline=2, incarnation="r1-a"))
    voted(board, "ready", {"trainer": "saved", "buffer": "saved", "r0": "saved"})
    board.times[KEYS.round] = (board.kvs[KEYS.round].mod_revision, 0.0)
    assert "drop late" not in board.decide(14.0)
    assert "drop late" in board.decide(15.5)


def test_a_slow_rollout_that_is_needed_aborts_the_round_at_the_deadline() -> None:
    """Below `min_rollouts` nobody is dropped; the deadline aborts the round and releases everyone."""
    board = running()
    voted(board, "ready", {"trainer": "saved", "buffer": "saved"})
    board.times[KEYS.round] = (board.kvs[KEYS.round].mod_revision, 0.0)
    assert "abort 7" in board.decide(30.5)


def test_votes_of_another_incarnation_do_not_count() -> None:
    """I5: a vote by an older life is no vote."""
    board = running()
    voted(board, "save", ALL_SAVED, incarnation="old")
    assert "seal round 7" not in board.decide()


def test_commit_takes_the_next_id_and_an_abort_takes_none() -> None:
    """I1, I2: all saved and sealed for the same cut gives checkpoint head + 1."""
    board = running()
    board.put(KEYS.checkpoint_head, CheckpointHead(checkpoint=3))
    voted(board, "seal", {**ALL_SAVED, "trainer": "sealed"})
    assert "commit 4" in board.decide()
    board = running()
    voted(board, "save", {**ALL_SAVED, "buffer": "failed"})
    actions = board.decide()
    assert actions["abort 7"] is None  # deletes only


def test_an_orphan_freeze_is_cleared() -> None:
    """I6: the flag of a round that is gone does not outlive it."""
    board = running()
    board.put(KEYS.freeze, Freeze(round=7, token=1, step=9, version=4))
    assert "clear orphan freeze" in board.decide()


def test_too_few_rollouts_hold_the_trainer_aloud() -> None:
    """Fewer routes than `min_rollouts`: a hold with its reason; released when they are back."""
    board = running()
    board.drop(KEYS.route("r0"))
    assert "hold min_rollouts" not in board.decide()
    board.drop(KEYS.route("r1"))
    assert "hold min_rollouts" in board.decide()


def test_rounds_come_at_multiples_of_n() -> None:
    """The next multiple of `every_steps` after what was done or cut, announced ahead of time."""
    board = running()
    assert planned(board) == 100
    board.put(KEYS.alive("trainer"), Alive(incarnation="trainer-a", training_step=100))
    assert planned(board) == 200
    board.put(
        KEYS.alive("trainer"), Alive(incarnation="trainer-a", training_step=97)
    )  # a report that is late
    board.put(KEYS.checkpoint(1), checkpoint(10, 2))  # cut at step 100 on this timeline
    assert planned(board) == 200
    board = running()
    board.put(KEYS.round_head, RoundHead(round=1, not_before_step=100, timeline=2))  # given up at step 100
    assert planned(board) == 200
    board.put(KEYS.round_head, RoundHead(round=1, not_before_step=100, timeline=1))  # before a recovery
    assert planned(board) == 100


def test_rounds_come_by_time() -> None:
    """With `every_seconds` a round is due when the last checkpoint is older, at the end of the next step."""
    config = JobConfig(job="job", checkpoint=CheckpointSettings(every_steps=0, every_seconds=60))
    board = running()
    assert list(board.decide(59.0, config)) == []
    assert planned(board, 61.0, config) == 0
    board.put(KEYS.checkpoint_head, CheckpointHead(checkpoint=1), at=50.0)
    assert list(board.decide(100.0, config)) == []
    assert planned(board, 111.0, config) == 0


def test_rounds_come_by_request() -> None:
    """A request opens a round at once, or pulls the announced one forward; it is marked in the same transaction."""
    config = JobConfig(job="job", checkpoint=CheckpointSettings(every_steps=0))
    board = running()
    board.put(KEYS.request("x"), Request(kind="checkpoint"))
    assert planned(board, 0.0, config) == 0
    board.put(KEYS.round, Round(round=1, timeline=2, not_before_step=100))
    board.put(KEYS.round_head, RoundHead(round=1))
    forward = board.decide(0.0, config)["pull round 1 forward"]
    assert isinstance(forward, Put)
    assert model.decode(Round, forward.value).not_before_step == 0


def planned(board: Board, now: float = 0.0, config: JobConfig = CONFIG) -> int:
    """The step that the round which is due now is meant for."""
    action = next(found for name, found in board.decide(now, config).items() if name.startswith("prepare"))
    assert isinstance(action, Put)
    return model.decode(Round, action.value).not_before_step
