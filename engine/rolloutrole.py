"""The rollout's side of the protocol: follow the weight head, prove what the engine serves, keep a route, vote.

A route stands only for a version that was proven on this engine, on this timeline, under a label of this incarnation.
Anything but a proven success takes the route away and leaves this engine alone until a full load is proven.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from .action import put
from .config import JobConfig
from .engineport import EngineGone, EngineStatus, RolloutEngine
from .errors import (
    CorruptCheckpoint,
    EngineFault,
    Fenced,
    LeaseLost,
    NotFound,
    SlackwaterError,
    StateMismatch,
    Unavailable,
)
from .membership import Membership
from .model import Ack, Alive, ParticipantState, Pin, Route, Vote, WeightVersion
from .ports import Compare, Delete
from .view import View

__all__ = ["EngineLost", "Images", "Intents", "RolloutRole"]

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_FLUSH_SECONDS = 30.0
_WATCH_SECONDS = 1.0  # the engine is asked at every beat, and not at every piece of news
_MISSED_TOKENS = 2
_NOTE_CHARACTERS = 800


class EngineLost(Fenced):
    """The engine does not answer any more; `hard` when its host answered that nothing listens there."""

    def __init__(self, message: str, *, hard: bool) -> None:
        super().__init__(message)
        self.hard = hard


class Images(Protocol):
    """Where published weights are fetched from."""

    def fetch(self, version: WeightVersion) -> Path:
        """Return a local directory with the verified image. Raises `CorruptCheckpoint`, `NotFound`, `Unavailable`."""
        ...


class Intents(Protocol):
    """A durable note of a control call that may still land after we are gone."""

    def begin(self, label: str) -> None:
        """Note, durably, that the engine is about to be changed to `label`."""
        ...

    def done(self) -> None:
        """The change was proven: nothing is in flight."""
        ...

    def pending(self) -> str:
        """The label of a change without an answer, or ""."""
        ...


class RolloutRole:
    """One incarnation of one rollout. `step` is called on news and at every beat; it blocks while the engine loads.

    Raises `Fenced` when this life is over and `EngineLost` when the engine's is; then join again. `Unavailable` and
    `LeaseLost` come through from etcd: call again. `flush_seconds` bounds one flush with all its refusals.
    """

    def __init__(
        self,
        membership: Membership,
        engine: RolloutEngine,
        config: JobConfig,
        images: Images,
        intents: Intents,
        url: str,
        *,
        flush_seconds: float = _FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.membership = membership
        self.engine = engine
        self.config = config
        self._images = images
        self._intents = intents
        self._url = url
        self._flush_seconds = flush_seconds
        self._clock = clock
        self.proven = 0  # version that this engine has proven in this life; 0: none
        self.proven_timeline = 0
        self.start_id = ""
        self.state: ParticipantState = "idle"
        self.note = ""
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._not_before = 0.0
        self._answered_at = self._token_at = clock()
        self._watched_at = clock() - _WATCH_SECONDS
        self._missed_tokens = 0
        self._answers = False  # the last look at the engine had an answer
        self._clean = False  # the last look at the engine found it as it was proven
        self._must_drop = False  # a route of ours may stand that should not
        self._stopped = False  # paused by us for a recovery; no token comes until the next load
        self._engine_name = ""
        self._voted = 0
        self._log = structlog.get_logger().bind(participant=membership.name)

    @property
    def label(self) -> str:
        """The label under which the proven version runs; read back at every beat."""
        return self.label_of(self.proven_timeline, self.proven)

    def label_of(self, timeline: int, version: int) -> str:
        """Timeline, version and incarnation: no other life's call can be taken for ours."""
        return f"{timeline}.{version}.{self.membership.incarnation}"

    # -- one step ------------------------------------------------------------------------------------------

    def step(self, view: View) -> None:
        """Do what is due: watch the engine, answer a recovery, catch up with the head, vote."""
        me = self.membership
        standing = me.standing(view)
        if standing == "replaced" or me.beat.lost:
            raise Fenced(f"{me.name}: this life is over: {me.beat.lost or 'replaced or declared failed'}")
        offered = self._is_offered(view)
        self._watch(now=self.proven > 0 and not offered)
        if not me.beat.alive():
            return  # nothing outside may change; the route ends with the lease
        if standing == "fenced":
            self._answer_fence(view)
            return
        if self._must_drop:
            self._drop_route()
        recovery, head = view.recovery, view.head
        if recovery is not None and recovery.phase not in ("resync", "freshness"):
            return
        if head is None or head.timeline != me.timeline:
            return
        if self._clean and not offered:
            self._route(view)
        elif self._clean:
            self._vote(view)
        behind = self.proven < head.version  # a version counts up for ever; 0 is none
        if behind and self._answers and self._clock() >= self._not_before:
            self._catch_up(view, head.version)

    def _is_offered(self, view: View) -> bool:
        """Whether our route stands for what is proven now."""
        route = view.routes().get(self.membership.name)
        return route is not None and self.proven > 0 and route.label == self.label

    def report(self) -> None:
        """Tell the beat what we are doing."""
        self.membership.report(
            Alive(
                incarnation=self.membership.incarnation,
                state=self.state,
                weight_version=self.proven,
                note=self.note,
            )
        )

    # -- the engine's own health ---------------------------------------------------------------------------

    def _watch(self, *, now: bool) -> None:
        """Ask the engine who it is, at every beat or `now`; without an answer it is not to be offered anew."""
        every = min(self.config.timers.heartbeat_s, _WATCH_SECONDS)
        if not now and self._clock() - self._watched_at < every:
            return
        self._watched_at = self._clock()
        self._answers = self._clean = False
        try:
            status = self.engine.status()
        except EngineGone as error:
            self._drop_route()
            raise EngineLost(f"the engine is gone: {error}", hard=True) from error
        except (EngineFault, Unavailable) as error:
            self._silent(error)
            return
        self._answered_at, self._answers = self._clock(), True
        self._compare(status)
        if not status.paused and not self._stopped:
            self._want_token()

    def _silent(self, error: SlackwaterError) -> None:
        silent = self._clock() - self._answered_at
        if silent >= self.config.timers.lease_s:
            self._drop_route()
            raise EngineLost(
                f"the engine has not answered for {silent:.0f} s: {error}", hard=False
            ) from error

    def _compare(self, status: EngineStatus) -> None:
        restarted = bool(status.start_id) and bool(self.start_id) and status.start_id != self.start_id
        known = bool(status.start_id)
        self.start_id = status.start_id or self.start_id
        if not self.proven:
            return
        if restarted:
            self._quarantine("the engine was restarted")
        elif status.label != self.label:
            self._quarantine(f"the engine is labelled {status.label!r}, not {self.label!r}")
        else:
            self._clean = known and not self._intents.pending()

    def _want_token(self) -> None:
        """Where no token was seen for two leases, ask for one: the front may outlive its scheduler."""
        if self._clock() - self._token_at < self.config.timers.lease_s * (2 + self._missed_tokens):
            self.membership.beat.tick()
            return
        try:
            self.engine.round_trip()
        except EngineGone as error:
            self._drop_route()
            raise EngineLost(f"the engine is gone: {error}", hard=True) from error
        except (EngineFault, Unavailable) as error:
            self._missed_tokens += 1
            if self._missed_tokens >= _MISSED_TOKENS:
                self._drop_route()
                raise EngineLost(f"the engine answers but generates nothing: {error}", hard=False) from error
            return
        self._saw_token()

    def _saw_token(self) -> None:
        self._token_at = self._answered_at = self._clock()
        self._missed_tokens = 0
        self.membership.beat.tick()

    def _quarantine(self, reason: str) -> None:
        """Take the route at once; only a full, proven load brings it back."""
        self.proven = 0
        self._clean = False
        self._log.warning("quarantined", reason=reason)
        self._drop_route()
        self._postpone(reason)

    def _postpone(self, reason: str) -> None:
        """Say what went wrong and wait a little longer each time before the next try."""
        self.note = reason[:_NOTE_CHARACTERS]
        self._not_before = self._clock() + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)
        self.state = "rollout_in_progress" if self.proven else "idle"
        self.report()

    def _drop_route(self) -> None:
        """Take our route away now, or, when etcd cannot be written, at the first step that can."""
        me = self.membership
        self._must_drop = True
        try:
            self._must_drop = not me.write([Delete(me.keys.route(me.name))])
        except (LeaseLost, Unavailable) as error:
            self._log.warning("the route could not be taken yet", error=str(error))

    # -- recovery ------------------------------------------------------------------------------------------

    def _answer_fence(self, view: View) -> None:
        """Stop, drop queues and cache, then move to the new timeline. The engine starts again with a full load."""
        recovery = view.recovery
        if recovery is None:
            raise Fenced(f"{self.membership.name}: timeline {view.timeline} began and ended without us")
        self.proven = 0
        self._clean = False
        self.state = "syncing"
        self.report()
        self._stopped = True
        try:
            self.engine.pause("abort")
            self.engine.flush(self._flush_seconds)
        except (EngineFault, Unavailable) as error:
            # No route leads here any more, and the load to come flushes and proves: this is only earlier.
            self._log.warning("could not stop the engine", error=str(error))
        ack = Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence")
        self.membership.acknowledge(view, ack)
        self._must_drop = False  # the fence took every route of the old timeline
        # The trainer may restore for long: waiting for it is no stall.
        self.state = "idle"
        self.report()
        self._not_before, self._wait_seconds = 0.0, _FIRST_WAIT_SECONDS

    # -- following the head --------------------------------------------------------------------------------

    def _catch_up(self, view: View, version: int) -> None:
        record = view.weight_version(version)
        if record is None:
            return
        self.state = "syncing"
        self.report()
        try:
            image = self._prepare(view, record)
        except (EngineFault, StateMismatch, CorruptCheckpoint, NotFound) as error:
            # The engine was not touched: it goes on with what it has proven.
            self._log.warning("not loaded", version=version, error=str(error))
            self._postpone(f"version {version}: {error}")
            return
        except Unavailable:
            self._postpone(f"version {version}: could not be pinned or fetched yet")
            raise
        try:
            self._load(record, image)
        except EngineGone as error:
            raise EngineLost(
                f"the engine died while it loaded version {version}: {error}", hard=True
            ) from error
        except (EngineFault, Unavailable) as error:
            reply = getattr(error, "reply", "")
            self._quarantine(f"version {version}: {error}" + (f" (reply: {reply})" if reply else ""))
            return
        self.note, self._wait_seconds = "", _FIRST_WAIT_SECONDS
        self._route(view)
        self.report()

    def _prepare(self, view: View, record: WeightVersion) -> Path:
        """Pin, fetch and verify while the engine goes on generating."""
        me = self.membership
        pin = put(me.keys.pin(me.name), Pin(name=me.name, version=record.version), me.beat.lease)
        if not me.write([pin], [self._loadable(view, record.version)]):
            raise NotFound(f"version {record.version} could not be pinned: it is gone, or this life is over")
        image = self._images.fetch(record)
        me.beat.tick()
        self.engine.check_image(image)
        return image

    def _loadable(self, view: View, version: int) -> Compare:
        key = self.membership.keys.weight_version(version)
        return Compare(key, "create", "=", view.create(key))

    def _load(self, record: WeightVersion, image: Path) -> None:
        """The short pause: update, flush, continue, prove. Continue is always sent, on failure after the route is
        gone: an engine that is not proven must not meet requests.
        """
        me = self.membership
        label = self.label_of(me.timeline, record.version)
        me.check()
        self._intents.begin(label)
        self.proven, self._clean = 0, False
        self.state = "loading"
        self.report()
        try:
            self.engine.pause(self.config.weights.pause_mode)
            self.engine.load(image, label)
            self.engine.flush(self._flush_seconds)
        except (EngineFault, Unavailable):
            self._drop_route()
            self._resume_after_failure()
            raise
        self.engine.resume()
        self._stopped = False
        self.state = "syncing"
        self.report()
        me.beat.tick()
        self.engine.prove(label)
        self._saw_token()
        self._intents.done()
        self.proven, self.proven_timeline = record.version, me.timeline
        try:
            self.start_id = self.engine.status().start_id
            self._clean = bool(self.start_id)
        except SlackwaterError:
            self.start_id = ""  # the next beat learns it

    def _resume_after_failure(self) -> None:
        """`EngineGone` comes through, since it says more than the failure; the rest does not hide that."""
        try:
            self.engine.resume()
            self._stopped = False
        except EngineGone:
            raise
        except (EngineFault, Unavailable) as error:
            self._log.warning("could not continue the engine", error=str(error))

    def _route(self, view: View) -> None:
        """Offer the proven version, unless the head or our route moved on since this view: then the next step does."""
        me = self.membership
        route = Route(
            name=me.name,
            url=self._url,
            version=self.proven,
            timeline=me.timeline,
            incarnation=me.incarnation,
            label=self.label,
        )
        guards = (
            view.same(me.keys.weight_head),
            view.same(me.keys.route(me.name)),
            self._loadable(view, self.proven),
        )
        if me.write([put(me.keys.route(me.name), route, me.beat.lease)], guards):
            self._must_drop = False
            self.state = "rollout_in_progress"
            return
        self._log.info("the head moved on before the route", version=self.proven)

    # -- rounds --------------------------------------------------------------------------------------------

    def _vote(self, view: View) -> None:
        round_, me = view.round, self.membership
        if round_ is None or round_.phase not in ("ready", "save") or self._voted == round_.round:
            return
        if round_.voters.get(me.name) != me.incarnation or round_.version != self.proven:
            return
        sampling = view.sampling
        vote = Vote(
            name=me.name,
            incarnation=me.incarnation,
            timeline=me.timeline,
            round=round_.round,
            state="saved",  # a rollout's part is the vote itself: its sampling parameters and figures
            step=round_.step,
            version=round_.version,
            host=me.record.host,
            sampling_revision=sampling.revision,
            statistics={"engine": self._describe(), "label": self.label},
        )
        token = Compare(me.keys.round, "create", "=", view.create(me.keys.round))
        routed = view.same(me.keys.route(me.name))
        if me.write([put(me.keys.vote(round_.round, me.name), vote)], [token, routed]):
            self._voted = round_.round

    def _describe(self) -> str:
        if not self._engine_name:
            try:
                self._engine_name = self.engine.describe()
            except (EngineFault, Unavailable):
                return "unknown"
        return self._engine_name
