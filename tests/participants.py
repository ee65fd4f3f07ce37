"""Scripted participants on a real store: the real registrations, beats and transactions, with no tensor behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slackwater.engine.action import put
from slackwater.engine.beat import Beat
from slackwater.engine.beatport import Registered
from slackwater.engine.config import JobConfig
from slackwater.engine.errors import Fenced, Unavailable
from slackwater.engine.follow import Follower
from slackwater.engine.keys import BUFFER, TRAINER, Keys
from slackwater.engine.membership import Membership
from slackwater.engine.model import Ack, Alive, Participant, Record, Route, Vote
from slackwater.engine.ports import Compare, StateStore
from slackwater.engine.trainerrole import TrainerRole
from slackwater.engine.view import View


class ThreadBeat:
    """A `BeatPort` whose beat is a thread of this process."""

    def __init__(self, store: StateStore, keys: Keys, name: str, config: JobConfig) -> None:
        self._clock = time.monotonic
        self._beat = Beat(store, keys, name, config.timers.lease_s)
        self._lock = threading.RLock()
        self._pause = config.timers.heartbeat_s
        self._alive = Alive(incarnation="")
        self._stopping = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def open(self) -> int:
        """Grant the lease and begin to beat."""
        with self._lock:
            lease = self._beat.open()
        self._thread.start()
        return lease

    def adopt(self, registered: Registered, alive: Alive) -> None:
        """Keep this registration's key."""
        with self._lock:
            create = registered.alive_create
            self._beat.adopt(registered.timeline_mod, registered.registration_mod, create, alive)
            self._alive = alive

    def report(self, alive: Alive) -> None:
        """Write the report soon."""
        with self._lock:
            self._alive = alive
        self._news.set()

    def tick(self) -> None:
        """Nothing counts progress here."""

    def alive(self) -> bool:
        """Whether the deadline lies ahead."""
        with self._lock:
            return self._clock() < self._beat.state.deadline

    @property
    def lease(self) -> int:
        """The lease."""
        return self._beat.state.lease

    @property
    def lost(self) -> str:
        """Why it is over."""
        return self._beat.state.lost

    @property
    def alive_create(self) -> int:
        """Create-revision of the liveness key."""
        with self._lock:
            return self._beat.state.alive_create

    def stop(self) -> None:
        """Fall silent as a killed process does: the lease stays until it runs out."""
        self._stopping.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop and revoke."""
        self.stop()
        self._beat.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.wait(self._pause)
            self._news.clear()
            with self._lock:
                self._beat.pump(self._alive)


class Scripted:
    """One participant that answers everything the protocol asks, from a thread of its own, until `stop`.

    `refuse` holds phases that it does not answer ("ready", "saved", "fence", …). A trainer's steps take no time here:
    with `announced_every` it stands before each multiple until a round is announced for it, as a real step would last.
    """

    def __init__(self, store: StateStore, config: JobConfig, name: str, role: str) -> None:
        self.store, self.config, self.name = store, config, name
        self.keys = Keys(config.job)
        self.refuse: set[str] = set()
        self.announced_every = 0
        self.beat = ThreadBeat(store, self.keys, name, config)
        record = Participant(name=name, role=role, incarnation="", timeline=0, host=f"host-{name}")  # type: ignore[arg-type]
        self.membership = Membership(store, self.keys, record, self.beat)
        self.trainer = TrainerRole(store, self.membership, config) if name == TRAINER else None
        self.trained = 0
        self.errors: list[BaseException] = []
        self._follower = Follower(store, self.keys.root)
        self._cache: dict[str, tuple[int, Record]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Scripted:
        """Register and begin to answer."""
        self.membership.join(Alive(incarnation=""), covers_step=0)
        self._thread.start()
        return self

    def stop(self, *, silent: bool = False) -> None:
        """End; `silent` leaves the lease to run out, as a crash does."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._follower.close()
        if silent:
            self.beat.stop()
        else:
            self.beat.close()

    def _run(self) -> None:
        act: Callable[[View], None] = {TRAINER: self._trainer, BUFFER: self._buffer}.get(
            self.name, self._rollout
        )
        while not self._stopping.is_set():
            try:
                self._follower.poll(0.02)
                act(View(self.keys, self._follower.kvs, self._follower.revision, self._cache))
            except (Fenced, Unavailable):
                continue
            except BaseException as error:
                self.errors.append(error)
                raise

    # -- roles ---------------------------------------------------------------------------------------------

    def _trainer(self, view: View) -> None:
        role = self.trainer
        if role is None:
            return
        task, recovery = role.recovery_task(view), view.recovery
        if task == "acknowledge" and "fence" not in self.refuse:
            role.acknowledge(view)
        elif task == "restore" and recovery is not None:
            record = view.checkpoints().get(recovery.checkpoint)
            step = record.training_step if record is not None else 0
            role.restored(recovery.recovery, recovery.checkpoint, step, {})
        elif task == "publish":
            self._publish(role, view)
        elif task == "go":
            self._train(role, view)

    def _publish(self, role: TrainerRole, view: View) -> None:
        attempt = f"a{view.revision}-{role.step}"
        role.publish(view, location="nowhere", digest="d", size_bytes=1, attempt=attempt)

    def _train(self, role: TrainerRole, view: View) -> None:
        directive = role.directive(view)
        if directive.kind == "go" and self._may_step(view, role.step + 1):
            role.step += 1
            self.trained += 1
        elif directive.kind == "publish":
            self._publish(role, view)
        elif directive.kind == "cut":
            path = f"t{view.timeline}/s{role.step}-r{directive.round}-x"
            attempt = f"c{directive.round}-{role.step}"
            role.publish(
                view, location="nowhere", digest="d", size_bytes=1, attempt=attempt, cut=directive, path=path
            )
        wanted = role.round_task(view)
        if wanted == "ready" and "ready" not in self.refuse:
            self._vote(view, "ready")
        elif wanted == "save" and "saved" not in self.refuse:
            self._vote(view, "saved")
        elif wanted == "seal" and "sealed" not in self.refuse:
            self._vote(view, "sealed")
        role.report(view, waits_for=directive.reason if directive.kind == "hold" else "")

    def _may_step(self, view: View, step: int) -> bool:
        if not self.announced_every or step % self.announced_every:
            return True
        return view.round is not None and view.round.not_before_step >= step

    def _buffer(self, view: View) -> None:
        me, recovery = self.membership, view.recovery
        if recovery is None:
            self._vote_once(view, "saved")
            return
        ack = view.acks(recovery.recovery).get(me.name)
        fresh = Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence")
        if ack is None or me.timeline != recovery.recovery:
            me.acknowledge(view, fresh)
        elif recovery.phase == "restore" and ack.phase == "fence":
            me.acknowledge_phase(
                Ack(
                    recovery=recovery.recovery,
                    name="",
                    incarnation="",
                    phase="restore",
                    checkpoint=recovery.checkpoint,
                )
            )
        elif recovery.phase == "freshness" and ack.phase == "restore":
            me.acknowledge_phase(
                Ack(
                    recovery=recovery.recovery,
                    name="",
                    incarnation="",
                    phase="freshness",
                    checkpoint=recovery.checkpoint,
                )
            )

    def _rollout(self, view: View) -> None:
        me, recovery, head = self.membership, view.recovery, view.head
        if recovery is not None and me.timeline != recovery.recovery:
            me.acknowledge(view, Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence"))
            return
        route = view.routes().get(me.name)
        stale = route is None or head is None or route.version != head.version
        if head is not None and head.timeline == me.timeline and stale:
            record = Route(
                name=me.name,
                url="http://127.0.0.1:1",
                version=head.version,
                timeline=me.timeline,
                incarnation=me.incarnation,
            )
            me.write(
                [put(self.keys.route(me.name), record, self.beat.lease)], [view.same(self.keys.weight_head)]
            )
        elif not stale:
            self._vote_once(view, "saved")

    # -- votes ---------------------------------------------------------------------------------------------

    def _vote_once(self, view: View, state: str) -> None:
        round_ = view.round
        if round_ is None or round_.phase not in ("ready", "save") or state in self.refuse:
            return
        if round_.voters.get(self.name) == self.membership.incarnation and self.name not in view.votes(
            round_.round
        ):
            self._vote(view, state)

    def _vote(self, view: View, state: str) -> None:
        round_, me = view.round, self.membership
        if round_ is None:
            return
        vote = Vote(
            name=me.name,
            incarnation=me.incarnation,
            timeline=me.timeline,
            round=round_.round,
            state=state,  # type: ignore[arg-type]
            step=round_.step,
            version=round_.version,
            path=round_.path,
            digest="d",
            host=me.record.host,
        )
        op = put(self.keys.vote(round_.round, me.name), vote)
        token = view.create(self.keys.round)
        me.write([op], [Compare(self.keys.round, "create", "=", token)])
