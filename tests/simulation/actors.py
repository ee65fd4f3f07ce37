"""The processes of a job as they run the production modules: coordinator, trainer, buffer, rollout."""

from __future__ import annotations

import contextlib
from random import Random
from typing import TYPE_CHECKING, Any

from slackwater.engine.boundary import Directive
from slackwater.engine.bufferrole import BufferRole
from slackwater.engine.coordinator import Coordinator
from slackwater.engine.errors import (
    Conflict,
    Fenced,
    LeaseLost,
    NoSpace,
    SlackwaterError,
    SlotOccupied,
    Unavailable,
)
from slackwater.engine.follow import Follower
from slackwater.engine.membership import Membership
from slackwater.engine.model import Alive, Participant, Upload, Vote, WeightVersion
from slackwater.engine.rolloutrole import EngineLost, RolloutRole
from slackwater.engine.session import Session
from slackwater.engine.trainerrole import TrainerRole
from slackwater.engine.view import View

from .kernel import Process
from .network import StoreProxy, rpc
from .parts import EngineClient, Images, Intents, Model, SimBeat, ToyParts

if TYPE_CHECKING:
    from .world import World

__all__ = ["buffer_main", "coordinator_main", "rollout_main", "trainer_main"]


AWAY = (Unavailable, LeaseLost, NoSpace)  # nothing can be written now: try again


class Eyes:
    """A follower in a task of its own; `view` is a frozen copy of the newest state."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._follower = Follower(world.store_of(process), world.keys.root, clock=world.kernel.clock)
        self._cache: dict[str, Any] = {}
        self.view = View(world.keys, {}, 0, self._cache)
        self._waiting: list[Any] = []
        process.spawn(self._run, "eyes")

    def _run(self) -> None:
        while True:
            try:
                news = self._follower.poll(1.0)
            except Unavailable:
                self._process.sleep(0.2)
                continue
            if news or self._follower.revision > self.view.revision:
                kvs = dict(self._follower.kvs)
                self.view = View(self._world.keys, kvs, self._follower.revision, self._cache)
                waiting, self._waiting = self._waiting, []
                for wake in waiting:
                    self._world.kernel.after(0.0, lambda wake=wake: wake(True))

    def wait(self, seconds: float, newer_than: int | None = None) -> View:
        """Wait for a view newer than this revision (default: the one here) for at most so long."""
        limit = self.view.revision if newer_than is None else newer_than
        if self.view.revision <= limit:
            self._process.wait(seconds, self._waiting.append)
        return self.view


def join(world: World, process: Process, beat_process: Process, role: str) -> Membership:
    """Register, waiting while the slot is occupied."""
    name = process.name.split("#")[0]
    store = world.store_of(process)
    while True:
        beat = SimBeat(world, beat_process, name)
        host = f"host-{name}"
        template = Participant(name=name, role=role, incarnation="", timeline=0, host=host)  # type: ignore[arg-type]
        membership = Membership(store, world.keys, template, beat)
        try:
            covers = world.buffer.step if role == "buffer" else -1
            membership.join(Alive(incarnation=""), covers_step=covers)
            return membership
        except SlotOccupied:
            beat.close()
            process.sleep(1.0)
        except AWAY:
            beat.close()
            process.sleep(0.5)


# -- coordinator -------------------------------------------------------------------------------------------


def coordinator_main(world: World, process: Process, _beat: Process) -> None:
    """Lead or stand by, for as many sessions as it takes."""
    name = process.name
    store = world.store_of(process)
    while True:
        session = Session(store, world.config.timers.lease_s, clock=world.kernel.clock, pause=process.sleep)
        try:
            session.open()
        except AWAY:
            process.sleep(0.5)
            continue

        def keep(session: Session = session) -> None:
            while not session._closed:
                process.sleep(session.beat_seconds)
                try:
                    session.renew()
                except LeaseLost:
                    return

        process.spawn(keep, "keeper")
        coordinator = Coordinator(store, world.keys, session, {"id": name}, clock=world.kernel.clock)
        world.coordinators[name] = coordinator
        while True:
            try:
                coordinator.step(1.0)
            except LeaseLost:
                break
            except Unavailable:
                process.sleep(0.2)
            process.sleep(0.001)
        coordinator.close()
        session.close()


# -- rollout -----------------------------------------------------------------------------------------------


def rollout_main(world: World, process: Process, beat_process: Process) -> None:
    """One sidecar, for as many incarnations as it takes."""
    name = process.name.split("#")[0]
    engine = world.engines[name]
    client = EngineClient(world, process, engine)
    eyes = Eyes(world, process)
    while True:
        try:
            client.status()
        except SlackwaterError:
            process.sleep(1.0)
            continue
        membership = join(world, process, beat_process, "rollout")
        client.membership = membership
        role = RolloutRole(
            membership,
            client,
            world.config,
            Images(world, process),
            Intents(world.intents, name),
            f"http://{name}",
            clock=world.kernel.clock,
        )
        try:
            while True:
                view = eyes.wait(1.0)
                try:
                    role.step(view)
                    role.report()
                except AWAY:
                    process.sleep(0.5)
        except EngineLost as error:
            if error.hard:
                with contextlib.suppress(*AWAY):
                    membership.end("exited", str(error))
        except Fenced:
            pass
        finally:
            membership.beat.close()


# -- buffer ------------------------------------------------------------------------------------------------


def buffer_main(world: World, process: Process, beat_process: Process) -> None:
    """The buffer's participant; its log is durable and outlives it."""
    eyes = Eyes(world, process)
    while True:
        membership = join(world, process, beat_process, "buffer")
        role = BufferRole(membership, world.buffer, world.config, ToyParts(world, process))
        role.report()
        try:
            while True:
                view = eyes.wait(1.0)
                try:
                    role.step(view)
                    role.report()
                except AWAY:
                    process.sleep(0.5)
                except Fenced:
                    if membership.standing(eyes.view) == "replaced" or membership.beat.lost:
                        raise
                    process.sleep(0.2)
        except Fenced:
            membership.beat.close()


# -- trainer -----------------------------------------------------------------------------------------------


class Over(Exception):
    """This life of the trainer is over."""


def trainer_main(world: World, process: Process, beat_process: Process) -> None:
    """One gang: restore, then steps with a boundary after each."""
    with contextlib.suppress(Over, Fenced, SlotOccupied):
        Trainer(world, process, beat_process).run()
    world.exited("trainer", process)


class Trainer:
    """The script and the adapter's main loop in one."""

    def __init__(self, world: World, process: Process, beat_process: Process) -> None:
        self.world, self.process = world, process
        self.rng: Random = world.kernel.rng(f"{process.name}/trainer")
        self.store = StoreProxy(world.network, process)
        self.eyes = Eyes(world, process)
        self.me = join(world, process, beat_process, "trainer")
        self.role = TrainerRole(self.store, self.me, world.config)
        self.birth = self.model = Model(0, "birth", frozenset())
        self.snapshots: dict[str, tuple[Model, Vote | None]] = {}
        self.retried_at = 0.0
        self.offered = ("", "")  # the attempt and the path of the last publication
        process.spawn(self._write, "writer")

    def run(self) -> None:
        self.restore()
        while True:
            if self.train():
                self.boundary()
            else:
                self.wait_rewind()

    # -- recovery ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Do what the recovery wants until training may begin."""
        role = self.role
        role.state = "idle"
        while True:
            view = self.eyes.view
            if view.revision < self.me.registration_mod:
                self.eyes.wait(1.0)
                continue
            if self.me.beat.lost:
                raise Over
            task = role.recovery_task(view)
            try:
                if task == "over":
                    raise Over
                if task == "go":
                    self.world.invariants.granted(self.me, view)
                    return
                if task == "acknowledge":
                    found = next((p for p in self.world.files if p.endswith("/committed.json")), "")
                    role.acknowledge(view, found)
                elif task == "restore":
                    self.load(view)
                elif task == "publish":
                    self.publish(view, None)
            except AWAY:
                self.process.sleep(0.5)
            except Fenced:
                self.process.sleep(0.1)
            role.report(view)
            self.eyes.wait(1.0)

    def load(self, view: View) -> None:
        recovery = view.recovery
        if recovery is None:
            return
        number = recovery.checkpoint
        self.role.state = "loading"
        self.role.report(view)
        self.process.sleep(self.rng.uniform(0.1, 3.0))
        if self.world.poisoned:
            self.role.restore_failed(recovery.recovery, number, "out of memory", unverified=False)
            return
        if number == 0:
            model: object = self.birth
        else:
            path = view.checkpoints()[number].path
            model = self.world.files.get(f"{path}/trainer") or self.world.remote.get(f"{path}/trainer")
            manifest = self.world.files.get(f"{path}/manifest") or self.world.remote.get(f"{path}/manifest")
            if not isinstance(model, Model) or manifest is None:
                self.role.restore_failed(recovery.recovery, number, "files are missing", unverified=True)
                return
        assert isinstance(model, Model)
        self.model = model
        self.role.restored(recovery.recovery, number, model.step, {})
        self.world.invariants.restored(self.me, number, model)

    # -- steps ---------------------------------------------------------------------------------------------

    def buffer_call(self, call: Any, what: str) -> Any:
        """Call the buffer until it answers; None when our timeline is over."""
        while True:
            try:
                return rpc(self.world.network, self.process, self.rng, lambda: self._reach(call), what)
            except Unavailable:
                if self.stops():
                    return None
                self.process.sleep(0.2)
            except Conflict:
                return None

    def _reach(self, call: Any) -> Any:
        """The buffer answers only while its process runs."""
        process = self.world.processes["buffer"][0]
        if process.dead or process.paused_until > self.world.kernel.now:
            raise Unavailable("the buffer does not answer")
        return call()

    def stops(self) -> bool:
        directive = self.role.directive(self.eyes.view)
        return directive.kind in ("rewind", "stop")

    def train(self) -> bool:
        """One optimizer update; False when the buffer refused us."""
        timeline, incarnation, step = self.me.timeline, self.me.incarnation, self.role.step + 1
        buffer = self.world.buffer
        view = self.eyes.view
        samples = self.buffer_call(lambda: buffer.lease(timeline, incarnation, step), "lease")
        if samples is None:
            return False
        self.role.state = "training"
        self.process.sleep(self.rng.uniform(0.1, 0.6))
        self.world.invariants.step_taken(self.role, self.granted_by, self.model, samples)
        digest = f"{self.model.step + 1}:{self.world.new_id()[:8]}"
        self.model = Model(self.model.step + 1, digest, self.model.trained | set(samples))
        self.role.step = self.model.step
        self.me.beat.tick()
        done = self.buffer_call(lambda: buffer.step_done(timeline, incarnation, step) or True, "step_done")
        if done is not None:
            self.role.report(view)  # only now: the buffer's log reaches this step
        return done is not None

    granted_by: tuple[View, bool] | None = None

    def wait_rewind(self) -> None:
        """The buffer refused: either a recovery began, or nothing can be leased now."""
        while not self.stops():
            view = self.eyes.wait(1.0)
            recovering = view.recovery is not None
            if (
                not recovering
                and self.me.standing(view) == "ours"
                and self.world.buffer.timeline == self.me.timeline
            ):
                self.boundary()
                return
            if self.me.beat.lost:
                raise Over
        self.boundary()

    def boundary(self) -> None:
        """The end of a step."""
        role = self.role
        while True:
            self.resolve()
            view = self.eyes.view
            directive = role.directive(view)
            if directive.kind == "go":
                self.granted_by = (view, self.me.beat.alive())
                return
            if directive.kind == "stop":
                raise Over
            if directive.kind == "rewind":
                self.snapshots.clear()
                self.restore()
                continue
            if directive.kind == "hold":
                role.state = "held"
                role.report(view, waits_for=directive.reason)
                self.eyes.wait(1.0)
                if self.world.kernel.now - self.retried_at >= 2.0:
                    # A trainer that stands tries a refused publication again, as the adapter's boundary does.
                    self.retried_at, role.refused_step = self.world.kernel.now, -1
                continue
            try:
                self.publish(view, directive if directive.kind == "cut" else None)
                self.eyes.wait(1.0)
            except AWAY:
                self.process.sleep(0.2)

    def publish(self, view: View, cut: Directive | None) -> None:
        """Write the image, publish it, and with a cut keep the snapshot."""
        attempt = self.world.new_id()
        role = self.role
        role.state = "syncing"
        path = ""
        if cut is not None:
            path = f"t{self.me.timeline}/s{role.step}-r{cut.round}-{attempt[:8]}"
            self.snapshots[path] = (self.model, None)
        self.process.sleep(self.rng.uniform(0.01, 0.3))
        self.world.images[attempt] = self.model.digest
        self.offered = (attempt, path)
        try:
            record = self._offer(view, attempt, cut, path)
        except NoSpace:
            self.refused()
            raise
        if record is not None:
            self.world.invariants.published(record, self.model)
        else:
            self.refused()

    def _offer(self, view: View, attempt: str, cut: Directive | None, path: str) -> WeightVersion | None:
        return self.role.publish(
            view,
            location=attempt,
            digest=self.model.digest,
            size_bytes=1,
            attempt=attempt,
            cut=cut,
            path=path,
        )

    def refused(self) -> None:
        """Nothing is left of a publication that was refused, nor of its cut."""
        attempt, path = self.offered
        self.snapshots.pop(path, None)
        self.world.invariants.refused(attempt)

    def resolve(self) -> None:
        """A publication without an answer: find out before the next update."""
        while self.role.unsettled and not self.me.beat.lost:
            try:
                if not self.role.settle():
                    self.refused()
            except Unavailable:
                self.process.sleep(0.3)

    # -- files ---------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """The saver: files, votes, manifest, `committed.json`, uploads, removals."""
        removed: set[int] = set()
        marked: set[int] = set()
        while True:
            view = self.eyes.wait(1.0)
            try:
                task = self.role.round_task(view)
                if task != "none":
                    self._round(view, task)
                self._tiers(view, marked, removed)
            except AWAY:
                self.process.sleep(0.5)
            except Fenced:
                self.process.sleep(0.5)

    def _round(self, view: View, task: str) -> None:
        round_ = view.round
        if round_ is None:
            return
        token = view.create(self.world.keys.round)
        path = round_.path
        base = Vote(
            name="trainer",
            incarnation=self.me.incarnation,
            timeline=self.me.timeline,
            round=round_.round,
            state="saved",
            step=round_.step,
            version=round_.version,
            host=self.me.record.host,
            path=path,
        )
        if path not in self.snapshots:
            self.role.vote(token, _replace(base, state="failed", error="no snapshot of this cut"))
            return
        model = self.snapshots[path][0]
        files = self.world.files
        if task == "ready":
            self.role.vote(token, _replace(base, state="ready"))
        elif task == "save":
            self.process.sleep(self.rng.uniform(0.1, 4.0))
            files[f"{path}/trainer"] = model
            self.role.vote(token, _replace(base, digest=model.digest, files=1))
        else:
            votes = view.votes(round_.round)
            self.process.sleep(self.rng.uniform(0.01, 0.2))
            files[f"{path}/manifest"] = {
                "voters": dict(round_.voters),
                "digests": {name: vote.digest for name, vote in votes.items()},
            }
            self.role.vote(token, _replace(base, state="sealed", digest=f"manifest:{path}", files=2))

    def _tiers(self, view: View, marked: set[int], removed: set[int]) -> None:
        world = self.world
        if self.me.standing(view) != "ours":
            return
        for number, record in view.checkpoints().items():
            parts = ("trainer", "buffer", "manifest", "committed.json")
            if record.state == "deleting":
                if number not in removed:
                    for part in reversed(parts):
                        for tier in (world.files, world.remote):
                            if tier.pop(f"{record.path}/{part}", None) is not None:
                                world.invariants.deleted(number)
                    self.role.upload(
                        Upload(checkpoint=number, incarnation=self.me.incarnation, state="removed")
                    )
                    removed.add(number)
                continue
            if number not in marked:
                world.files[f"{record.path}/committed.json"] = record
                marked.add(number)
            if record.state == "committed" and f"{record.path}/trainer" in world.files:
                upload = Upload(checkpoint=number, incarnation=self.me.incarnation)
                if world.keys.uploads + f"{number:08d}/" + self.me.incarnation in view.kvs:
                    continue
                self.role.upload(upload)
                self.process.sleep(self.rng.uniform(0.2, 3.0))
                for part in parts:
                    found = world.files.get(f"{record.path}/{part}")
                    if found is not None:
                        world.remote[f"{record.path}/{part}"] = found
                self.role.upload(_replace(upload, state="done", remote=record.path))


def _replace(record: Any, **changes: object) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **changes)
