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

    Raises `Fenced` when this life is over and `EngineLost` when the engine's is; then join again.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.membership = membership
        self.engine = engine
        self.config = config
        self._images = images
        self._intents = intents
        self._url = url
        self._clock = clock
        self.proven = 0  # version that this engine has proven in this life; 0: none
        self.proven_timeline = 0
        self.start_id = ""
        self.state: ParticipantState = "idle"
        self.note = ""
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._not_before = 0.0
        self._answered_at = clock()
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
        self._watch()
        if not me.beat.alive():
            return  # nothing outside may change; the route ends with the lease
        if standing == "fenced":
            self._answer_fence(view)
            return
        recovery, head = view.recovery, view.head
        if recovery is not None and recovery.phase not in ("resync", "freshness"):
            return
        if head is None or head.timeline != me.timeline:
            return
        if self.proven_timeline == me.timeline and self.proven == head.version:
            if me.name not in view.routes():
                self._route(view, head.version)
            self._vote(view)
        elif self._clock() >= self._not_before:
            self._catch_up(view, head.version)

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

    def _watch(self) -> None:
        try:
            status = self.engine.status()
        except EngineGone as error:
            raise EngineLost(f"the engine is gone: {error}", hard=True) from error
        except (EngineFault, Unavailable) as error:
            silent = self._clock() - self._answered_at
            if silent >= self.config.timers.lease_s:
                raise EngineLost(
                    f"the engine has not answered for {silent:.0f} s: {error}", hard=False
                ) from error
            return
        self._answered_at = self._clock()
        self._compare(status)

    def _compare(self, status: EngineStatus) -> None:
        restarted = bool(status.start_id) and bool(self.start_id) and status.start_id != self.start_id
        self.start_id = status.start_id or self.start_id
        if not self.proven:
            return
        if restarted:
            self._quarantine("the engine was restarted")
        elif status.label != self.label:
            self._quarantine(f"the engine is labelled {status.label!r}, not {self.label!r}")

    def _quarantine(self, reason: str) -> None:
        """Take the route at once; only a full, proven load brings it back."""
        self.proven = 0
        self.note = reason[:500]
        self._log.warning("quarantined", reason=reason)
        self._drop_route()
        self._not_before = self._clock() + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)
        self.state = "idle"
        self.report()

    def _drop_route(self) -> None:
        me = self.membership
        me.write([Delete(me.keys.route(me.name))])

    # -- recovery ------------------------------------------------------------------------------------------

    def _answer_fence(self, view: View) -> None:
        """Stop, drop queues and cache, then move to the new timeline. The engine starts again with a full load."""
        recovery = view.recovery
        if recovery is None:
            raise Fenced(f"{self.membership.name}: timeline {view.timeline} began and ended without us")
        self.proven = 0
        self.state = "syncing"
        self.report()
        try:
            self.engine.pause("abort")
            self.engine.flush(_FLUSH_SECONDS)
        except (EngineFault, Unavailable) as error:
            # No route leads here any more, and the load to come flushes and proves: this is only earlier.
            self._log.warning("could not stop the engine", error=str(error))
        ack = Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence")
        self.membership.acknowledge(view, ack)
        self._not_before = 0.0

    # -- following the head --------------------------------------------------------------------------------

    def _catch_up(self, view: View, version: int) -> None:
        record = view.weight_version(version)
        if record is None:
            return
        self.state = "syncing"
        self.report()
        try:
            image = self._prepare(record)
            self._load(record, image)
        except EngineGone as error:
            self._drop_route()
            raise EngineLost(
                f"the engine died while it loaded version {version}: {error}", hard=True
            ) from error
        except (EngineFault, StateMismatch, CorruptCheckpoint, NotFound, Unavailable) as error:
            reply = getattr(error, "reply", "")
            self._quarantine(f"version {version}: {error}" + (f" (reply: {reply})" if reply else ""))
            return
        self.note, self._wait_seconds = "", _FIRST_WAIT_SECONDS
        self._route(view, version)
        self.state = "rollout_in_progress"
        self.report()

    def _prepare(self, record: WeightVersion) -> Path:
        """Pin, fetch and verify while the engine goes on generating."""
        me = self.membership
        pin = Pin(name=me.name, version=record.version)
        if not me.write([put(me.keys.pin(me.name), pin, me.beat.lease)]):
            raise Unavailable(f"version {record.version} could not be pinned")
        image = self._images.fetch(record)
        self.engine.check_image(image)
        return image

    def _load(self, record: WeightVersion, image: Path) -> None:
        """The short pause: update, flush, continue, prove. Continue is always sent."""
        me = self.membership
        label = self.label_of(me.timeline, record.version)
        me.check()
        self._intents.begin(label)
        self.proven = 0
        try:
            self.engine.pause(self.config.weights.pause_mode)
            self.engine.load(image, label)
            self.engine.flush(_FLUSH_SECONDS)
        finally:
            self.engine.resume()
        me.beat.tick()
        self.engine.prove(label)
        self._intents.done()
        self.proven, self.proven_timeline = record.version, me.timeline
        try:
            self.start_id = self.engine.status().start_id or self.start_id
        except SlackwaterError:
            self.start_id = ""  # the next beat learns it

    def _route(self, view: View, version: int) -> None:
        """Offer the proven version, unless the head moved on since this view: then catch up first."""
        me = self.membership
        route = Route(
            name=me.name,
            url=self._url,
            version=version,
            timeline=me.timeline,
            incarnation=me.incarnation,
            label=self.label,
        )
        loadable = Compare(
            me.keys.weight_version(version), "create", "=", view.create(me.keys.weight_version(version))
        )
        head = view.same(me.keys.weight_head)
        op = put(me.keys.route(me.name), route, me.beat.lease)
        if me.write([op], [head, loadable]):
            self.state = "rollout_in_progress"
            return
        self._log.info("the head moved on before the route", version=version)

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
            statistics={"engine": self.engine.describe(), "label": self.label},
        )
        token = Compare(me.keys.round, "create", "=", view.create(me.keys.round))
        if me.write([put(me.keys.vote(round_.round, me.name), vote)], [token]):
            self._voted = round_.round
