"""The rollout's side of the protocol, call by call, with a fake engine, a fake clock and the store in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slackwater.adapters.intents import FileIntents
from slackwater.backends.memory import MemoryStore
from slackwater.engine.action import delete, put
from slackwater.engine.beatport import Registered
from slackwater.engine.engineport import EngineGone, EngineStatus, PauseMode, Proof
from slackwater.engine.errors import CorruptCheckpoint, EngineFault, Fenced, SlackwaterError, Unavailable
from slackwater.engine.keys import Keys
from slackwater.engine.membership import Membership
from slackwater.engine.model import (
    Ack,
    Alive,
    Health,
    Participant,
    Recovery,
    Round,
    Route,
    Timeline,
    WeightHead,
    WeightVersion,
    decode,
)
from slackwater.engine.ports import Op, Txn, TxnResult
from slackwater.engine.rolloutrole import EngineLost, RolloutRole
from slackwater.engine.settings import bootstrap
from slackwater.engine.view import View

from .scripted_trainer import fast_config

NAME = "rollout-0"


class Store(MemoryStore):
    """The store in memory, away while `away`."""

    away = False

    def txn(self, txn: Txn) -> TxnResult:
        if self.away:
            raise Unavailable("away")
        return super().txn(txn)


class FakeEngine:
    """Does what it is told, notes the calls, fails where `fails` says so and calls `hook` before each."""

    def __init__(self) -> None:
        self.label, self.start_id, self.paused = "base", "start-1", False
        self.calls: list[str] = []
        self.fails: dict[str, SlackwaterError] = {}
        self.hook: Callable[[str], None] = lambda _call: None

    def _call(self, name: str) -> None:
        self.hook(name)
        if name != "status":
            self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def describe(self) -> str:
        self._call("describe")
        return "fake"

    def status(self) -> EngineStatus:
        self._call("status")
        return EngineStatus(self.label, self.start_id, "", self.paused, 0)

    def round_trip(self) -> None:
        self._call("round_trip")

    def check_image(self, image: Path) -> None:
        self._call("check_image")

    def pause(self, mode: PauseMode) -> None:
        self._call(f"pause {mode}")
        self.paused = True

    def resume(self) -> None:
        self._call("resume")
        self.paused = False

    def load(self, image: Path, label: str) -> None:
        self._call("load")
        self.label = label

    def flush(self, deadline_seconds: float) -> None:
        self._call("flush")

    def prove(self, label: str) -> Proof:
        self._call("prove")
        return Proof(label, 0, 0)

    def close(self) -> None:
        pass


class FakeBeat:
    """A beat that lives as long as the test wants; `regain` takes a new lease for the same life."""

    def __init__(self, store: MemoryStore, keys: Keys) -> None:
        self.store, self.keys = store, keys
        self.lease, self.alive_create, self.lost, self.up, self.ticks = 0, 0, "", True, 0
        self.reported = Alive(incarnation="")

    def open(self) -> int:
        self.lease = self.store.grant(1000)
        return self.lease

    def adopt(self, registered: Registered, alive: Alive) -> None:
        if not self.alive_create:
            self.alive_create = registered.alive_create

    def report(self, alive: Alive) -> None:
        self.reported = alive

    def tick(self) -> None:
        self.ticks += 1

    def alive(self) -> bool:
        return self.up

    def regain(self) -> None:
        self.store.revoke(self.lease)
        lease = self.open()
        key = self.keys.alive(NAME)
        self.alive_create = self.store.txn(Txn((), (put(key, self.reported, lease),))).revision

    def close(self) -> None:
        pass


class World:
    """A job with one rollout whose steps the test calls."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.store = Store(lambda: self.now)
        self.config = fast_config("job")
        self.keys = Keys("job")
        bootstrap(self.store, self.config)
        self.write(delete(self.keys.recovery))
        self.engine, self.beat = FakeEngine(), FakeBeat(self.store, self.keys)
        template = Participant(name=NAME, role="rollout", incarnation="", timeline=0)
        self.membership = Membership(self.store, self.keys, template, self.beat)
        self.membership.join(Alive(incarnation=""))
        self.intents = FileIntents(directory)
        self.fetch: Callable[[WeightVersion], Path] = lambda version: Path(f"/images/{version.version}")
        self.role = RolloutRole(
            self.membership,
            self.engine,
            self.config,
            self,
            self.intents,
            "http://here",
            clock=lambda: self.now,
        )

    def write(self, *ops: Op) -> None:
        assert self.store.txn(Txn((), ops)).succeeded

    def publish(self, version: int, timeline: int = 1) -> None:
        """The trainer's publication."""
        record = WeightVersion(version=version, step=version, timeline=timeline)
        head = WeightHead(version=version, step=version, timeline=timeline)
        self.write(put(self.keys.weight_version(version), record), put(self.keys.weight_head, head))

    @property
    def view(self) -> View:
        found = self.store.range(self.keys.root)
        return View(self.keys, {kv.key: kv for kv in found.kvs}, found.revision, {})

    def step(self, seconds: float = 1.0) -> list[str]:
        """Let time pass, take one step, return the engine's calls in it."""
        self.now += seconds
        self.engine.calls = []
        self.role.step(self.view)
        self.role.report()
        return self.engine.calls

    @property
    def route(self) -> Route | None:
        kv = self.store.get(self.keys.route(NAME))
        return decode(Route, kv.value) if kv is not None else None

    def routed(self) -> int:
        """The routed version, 0 for none."""
        return self.route.version if self.route is not None else 0


LOAD = ["check_image", "pause retract", "load", "flush", "resume", "prove"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A rollout that has joined and a job without weights."""
    return World(tmp_path)


@pytest.fixture
def serving(world: World) -> World:
    """A rollout that serves version 1."""
    world.publish(1)
    world.step()
    assert world.routed() == 1
    return world


def test_no_route_before_the_proof(world: World) -> None:
    """The first load goes through every call in order, and the route is there only after the proof."""
    assert world.step() == []
    routes: list[int] = []
    world.publish(1)
    world.engine.hook = lambda _call: routes.append(world.routed())
    assert world.step() == LOAD
    assert set(routes) == {0}
    assert world.route is not None
    assert world.route.label == world.engine.label == f"1.1.{world.membership.incarnation}"
    assert world.route.url == "http://here"
    assert world.intents.pending() == ""
    assert world.beat.reported.state == "rollout_in_progress"
    assert world.step() == []


@pytest.mark.parametrize("call", ["pause retract", "load", "flush", "prove"])
@pytest.mark.parametrize("error", [EngineFault("no", "its words"), Unavailable("silence")])
def test_failed_load_leaves_no_route_when_the_engine_goes_on(
    serving: World, call: str, error: SlackwaterError
) -> None:
    """Whatever call fails: the route is gone before generation continues, the reply is kept, a good load heals."""
    routes: list[int] = []
    serving.publish(2)
    serving.engine.fails[call] = error

    def note(name: str) -> None:
        if name == "resume":
            routes.append(serving.routed())

    serving.engine.hook = note
    assert "resume" in serving.step()
    if call != "prove":
        assert routes == [0]
    assert (serving.routed(), serving.role.proven) == (0, 0)
    assert serving.intents.pending().startswith("1.2.")
    if isinstance(error, EngineFault):
        assert "its words" in serving.beat.reported.note
    serving.engine.fails = {}
    assert serving.step(0.1) == []  # not at once
    assert serving.step(1.0) == LOAD
    assert serving.routed() == 2
    assert serving.beat.reported.note == ""
    assert serving.intents.pending() == ""


def test_image_that_does_not_fit_leaves_the_engine_alone(serving: World) -> None:
    """A corrupt or foreign image never reaches the engine, which goes on with what it has proven."""
    serving.publish(2)

    def corrupt(version: WeightVersion) -> Path:
        raise CorruptCheckpoint("flipped bit")

    fetch, serving.fetch = serving.fetch, corrupt
    assert serving.step() == []
    assert serving.routed() == serving.role.proven == 1
    assert "flipped bit" in serving.beat.reported.note
    serving.fetch = fetch
    serving.engine.fails["check_image"] = EngineFault("shapes")
    assert serving.step(1.0) == ["check_image"]
    assert serving.routed() == 1
    serving.engine.fails = {}
    serving.publish(3)
    assert serving.step(1.5) == LOAD
    assert serving.routed() == 3


def test_head_that_moves_during_a_load(serving: World) -> None:
    """What was proven is routed at the next step, though the head is further by then; versions may be skipped."""
    serving.publish(2)
    serving.engine.hook = lambda call: serving.publish(4) if call == "load" else None
    serving.step()
    assert (serving.routed(), serving.role.proven) == (1, 2)
    routed: list[int] = []
    serving.engine.hook = lambda call: routed.append(serving.routed()) if call == "load" else None
    assert serving.step() == LOAD
    assert routed == [2]
    assert serving.role.proven == 4
    serving.engine.hook = lambda _call: None
    serving.step()
    assert serving.routed() == 4


def test_death_in_mid_load_is_hard_evidence(serving: World) -> None:
    """A refused connection during a load ends this life, without a route."""
    serving.publish(2)
    serving.engine.fails = {"load": Unavailable("reset"), "resume": EngineGone("refused")}
    with pytest.raises(EngineLost) as caught:
        serving.step()
    assert caught.value.hard
    assert serving.routed() == 0


@pytest.mark.parametrize("change", [{"label": "1.9.other"}, {"start_id": "start-2"}])
def test_engine_that_is_not_what_was_proven(serving: World, change: dict[str, str]) -> None:
    """Another label or another start takes the route at the next beat."""
    for name, value in change.items():
        setattr(serving.engine, name, value)
    assert serving.step() == []
    assert serving.routed() == 0
    assert serving.step() == LOAD
    assert serving.routed() == 1


def test_same_life_under_a_new_lease_is_routed_without_a_reload(serving: World) -> None:
    """The lease was lost and taken anew: the route comes back without a load, if all is clean."""
    serving.beat.regain()
    assert serving.routed() == 0
    assert serving.step(0.0) == []
    assert serving.routed() == 1


@pytest.mark.parametrize("doubt", ["start_id", "intent", "silence", "label"])
def test_new_lease_in_doubt_is_no_route(serving: World, doubt: str) -> None:
    """No re-route while the engine's start is unknown, a call is unanswered, the engine silent or its label another."""
    serving.beat.regain()
    if doubt == "start_id":
        serving.engine.start_id = ""
    elif doubt == "intent":
        serving.intents.begin("1.1.old")
    elif doubt == "silence":
        serving.engine.fails["status"] = Unavailable("silence")
    else:
        serving.engine.label = "meddled"
    serving.step(0.5)
    assert serving.routed() == 0


def test_fence_stops_flushes_and_reloads(serving: World) -> None:
    """A recovery: stop, flush, answer, wait; then only a version of the new timeline, in full, is routed."""
    recovery = Recovery(recovery=2)
    serving.write(
        put(serving.keys.timeline, Timeline(timeline=2)),
        put(serving.keys.recovery, recovery),
        delete(serving.keys.routes, prefix=True),
    )
    assert serving.step() == ["pause abort", "flush"]
    kv = serving.store.get(serving.keys.ack(2, NAME))
    assert kv is not None
    ack = decode(Ack, kv.value)
    assert (ack.phase, ack.incarnation) == ("fence", serving.membership.incarnation)
    assert serving.membership.timeline == 2
    assert serving.step() == []  # version 1 is of the old timeline
    assert serving.routed() == 0
    serving.publish(2, timeline=2)
    assert serving.step() == []  # not before the resync
    serving.write(put(serving.keys.recovery, Recovery(recovery=2, phase="resync")))
    assert serving.step() == LOAD
    assert serving.route is not None
    assert (serving.route.version, serving.route.timeline) == (2, 2)
    assert serving.route.label.startswith("2.2.")


def test_engine_that_cannot_be_stopped_still_answers_the_fence(serving: World) -> None:
    """A refused flush does not hold up the recovery: the load to come proves."""
    serving.write(
        put(serving.keys.timeline, Timeline(timeline=2)),
        put(serving.keys.recovery, Recovery(recovery=2)),
        delete(serving.keys.routes, prefix=True),
    )
    serving.engine.fails["flush"] = EngineFault("busy")
    serving.step()
    assert serving.membership.timeline == 2


def test_silence_ends_this_life_after_a_lease(serving: World) -> None:
    """A silent engine is not voted for, keeps its route for one lease, and then ends this life softly."""
    serving.engine.fails["status"] = Unavailable("no answer")
    serving.step(1.0)
    assert serving.routed() == 1
    with pytest.raises(EngineLost) as caught:
        serving.step(1.5)
    assert not caught.value.hard
    assert serving.routed() == 0


def test_refused_connection_ends_this_life_at_once(serving: World) -> None:
    """Nothing listens there: hard evidence, no waiting."""
    serving.engine.fails["status"] = EngineGone("refused")
    with pytest.raises(EngineLost) as caught:
        serving.step()
    assert caught.value.hard
    assert serving.routed() == 0


def test_scheduler_that_died_behind_its_front(serving: World) -> None:
    """Without a token for two leases one is asked for; two misses in a row are a lost engine, one is not."""
    assert serving.step(4.0) == ["round_trip"]
    assert serving.step(1.0) == []
    serving.engine.fails["round_trip"] = Unavailable("no token")
    ticks = serving.beat.ticks
    assert serving.step(4.0) == ["round_trip"]
    assert serving.beat.ticks == ticks  # no progress is claimed for it
    assert serving.routed() == 1
    with pytest.raises(EngineLost):
        serving.step(2.0)
    assert serving.routed() == 0


def test_vote_for_the_cut(serving: World) -> None:
    """A voter votes once, for the version that it has proven and under its own incarnation."""
    voters = {NAME: serving.membership.incarnation}
    other = Round(round=1, timeline=1, phase="ready", step=2, version=2, voters=voters)
    serving.write(put(serving.keys.round, other))
    serving.step()
    assert serving.store.get(serving.keys.vote(1, NAME)) is None
    stranger = Round(round=2, timeline=1, phase="ready", step=1, version=1, voters={NAME: "older"})
    serving.write(put(serving.keys.round, stranger))
    serving.step()
    assert serving.store.get(serving.keys.vote(2, NAME)) is None
    ours = Round(round=3, timeline=1, phase="ready", step=1, version=1, voters=voters)
    serving.write(put(serving.keys.round, ours))
    serving.engine.fails["describe"] = Unavailable("busy")
    serving.step()
    vote = serving.view.votes(3)[NAME]
    assert (vote.state, vote.step, vote.version, vote.sampling_revision) == ("saved", 1, 1, 1)
    mod = serving.view.mod(serving.keys.vote(3, NAME))
    serving.step()
    assert serving.view.mod(serving.keys.vote(3, NAME)) == mod


def test_route_that_could_not_be_taken_is_taken_later(serving: World) -> None:
    """etcd is away when the label turns out wrong: the route goes with the first write that succeeds."""
    serving.engine.label = "meddled"
    serving.store.away = True
    serving.step()
    assert serving.routed() == 1
    serving.store.away = False
    serving.fetch = lambda version: (_ for _ in ()).throw(CorruptCheckpoint("keeps it from loading"))
    serving.step()
    assert serving.routed() == 0


def test_without_a_lease_nothing_outside_changes(serving: World) -> None:
    """No load and no write while the lease may have expired."""
    serving.publish(2)
    serving.beat.up = False
    revision = serving.store.revision
    assert serving.step() == []
    assert serving.store.revision == revision


def test_verdict_ends_this_life(serving: World) -> None:
    """Declared failed: a new incarnation is needed, even in the same process."""
    health = Health(incarnation=serving.membership.incarnation, state="failed")
    serving.write(put(serving.keys.health(NAME), health))
    with pytest.raises(Fenced):
        serving.step()
