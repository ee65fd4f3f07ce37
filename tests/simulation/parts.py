"""The toy surroundings of a simulated job: disks, images, a rollout engine, an experience buffer, a beat."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slackwater.engine.beat import Beat
from slackwater.engine.beatport import Registered
from slackwater.engine.engineport import EngineGone, EngineStatus, Proof
from slackwater.engine.errors import (
    Conflict,
    CorruptCheckpoint,
    EngineFault,
    Fenced,
    LeaseLost,
    NoSpace,
    NotFound,
    Unavailable,
)
from slackwater.engine.membership import Membership
from slackwater.engine.model import Alive, Checkpoint, WeightVersion
from slackwater.engine.samples import BufferPart, FreshnessReport

from .kernel import Process
from .network import StoreProxy, rpc

if TYPE_CHECKING:
    from .world import World

__all__ = ["Images", "Intents", "Model", "SimBeat", "SimBuffer", "SimEngine", "ToyParts"]


@dataclass(frozen=True)
class Model:
    """A trainer's state: how many updates, by whom (`digest` differs between any two updates), on which samples."""

    step: int
    digest: str
    trained: frozenset[int]


class SimBeat:
    """`BeatPort` over the production `Beat`, in a process of its own."""

    def __init__(self, world: World, process: Process, name: str) -> None:
        self._world, self._process, self._name = world, process, name
        self._store = StoreProxy(world.network, process)
        self._beat: Beat | None = None
        self._report = Alive(incarnation="")
        self._closed = False
        self._ticks = 0

    def open(self) -> int:
        world = self._world
        if self._beat is None or self._beat.state.lost:
            self._beat = Beat(
                self._worker_store(),
                world.keys,
                self._name,
                world.config.timers.lease_s,
                clock=world.kernel.clock,
                pause=self._pause,
            )
            lease = self._beat.open()
            self._beat._store = self._store
            self._beat._session._store = self._store
            self._world.beats[self._process.name] = self
            self._process.spawn(self._run, "beat")
            return lease
        return self._beat.open()

    def _worker_store(self) -> StoreProxy:
        return StoreProxy(self._world.network, self._world.caller())

    def _pause(self, seconds: float) -> None:
        self._world.caller().sleep(seconds)

    def _run(self) -> None:
        beat = self._beat
        heartbeat = self._world.config.timers.heartbeat_s
        while beat is not None and not self._closed and beat is self._beat:
            self._process.sleep(heartbeat)
            if self._closed:
                return
            state = beat.pump(self._report)
            if state.lost:
                return

    def testify(self, reason: str) -> None:
        """The worker is gone: write hard evidence, stop beating."""
        if self._beat is None:
            return
        self._closed = True
        for _ in range(3):
            try:
                self._beat.testify(reason)
                return
            except (Unavailable, LeaseLost, NoSpace):
                self._process.sleep(0.2)

    def adopt(self, registered: Registered, alive: Alive) -> None:
        if self._beat is not None:
            self._report = alive
            self._beat.adopt(
                registered.timeline_mod, registered.registration_mod, registered.alive_create, alive
            )

    def report(self, alive: Alive) -> None:
        self._report = alive

    def tick(self) -> None:
        self._ticks += 1

    def alive(self) -> bool:
        if self._beat is None or self._closed:
            return False
        state = self._beat.state
        return not state.lost and state.alive_create > 0 and self._world.kernel.now < state.deadline

    @property
    def lease(self) -> int:
        return self._beat.state.lease if self._beat is not None else 0

    @property
    def lost(self) -> str:
        return self._beat.state.lost if self._beat is not None else ""

    @property
    def alive_create(self) -> int:
        return self._beat.state.alive_create if self._beat is not None else 0

    def close(self) -> None:
        self._closed = True
        if self._beat is not None:
            with contextlib.suppress(Unavailable, LeaseLost):
                self._worker_store().revoke(self._beat.state.lease)


@dataclass
class SimEngine:
    """A rollout server that outlives its adapter. `proofs` are the labels that it has proven, with what they were."""

    world: World
    name: str
    start: int = 1
    label: str = ""
    digest: str = ""
    dead: bool = False
    silent_until: float = 0.0
    refuse_until: float = 0.0
    dirty: bool = True
    paused: bool = False
    proofs: dict[str, str] = field(default_factory=dict)

    def restart(self) -> None:
        """A new process with nothing loaded."""
        self.start += 1
        self.label = self.digest = ""
        self.dead = self.paused = False
        self.dirty = True
        self.silent_until = self.refuse_until = 0.0

    def die(self) -> None:
        self.dead, self.label, self.digest = True, "", ""

    def change(self, label: str, digest: str) -> None:
        self.label, self.digest = label, digest
        self.dirty = True


class EngineClient:
    """`RolloutEngine` as one adapter process reaches the engine; a request in flight lands whoever dies."""

    def __init__(self, world: World, process: Process, engine: SimEngine) -> None:
        self._world, self._process, self._engine = world, process, engine
        self.membership: Membership | None = None
        self._rng = world.kernel.rng(f"{process.name}/engine")

    def _call(self, call: Any, what: str) -> Any:
        engine = self._engine

        def at_server() -> Any:
            if engine.dead:
                raise EngineGone(f"{what}: connection refused")
            if self._world.kernel.now < engine.silent_until:
                raise Unavailable(f"{what}: silence")
            return call()

        return rpc(self._world.network, self._process, self._rng, at_server, what)

    def describe(self) -> str:
        return "simulated 1"

    def status(self) -> EngineStatus:
        engine = self._engine
        found: EngineStatus = self._call(
            lambda: EngineStatus(engine.label, str(engine.start), "m", engine.paused, 0), "status"
        )
        return found

    def round_trip(self) -> None:
        self._call(lambda: None, "round trip")

    def check_image(self, image: Path) -> None:
        if image.name not in self._world.images:
            raise CorruptCheckpoint("no such image")

    def pause(self, mode: str) -> None:
        self._call(lambda: setattr(self._engine, "paused", True), "pause")

    def resume(self) -> None:
        self._call(lambda: setattr(self._engine, "paused", False), "resume")

    def load(self, image: Path, label: str) -> None:
        digest = self._world.images.get(image.name)
        if digest is None:
            raise EngineFault("no such image")
        self._world.invariants.effect(self.membership, "load")
        self._process.sleep(self._rng.uniform(0.05, 1.5))
        self._call(lambda: self._engine.change(label, digest), "load")

    def flush(self, deadline_seconds: float) -> None:
        end = self._world.kernel.now + deadline_seconds

        def flush() -> None:
            if self._world.kernel.now < self._engine.refuse_until:
                raise EngineFault("flush refused", reply="busy")
            self._engine.dirty = False

        while True:
            try:
                self._call(flush, "flush")
                return
            except EngineGone:
                raise
            except EngineFault:
                if self._world.kernel.now >= end:
                    raise
                self._process.sleep(1.0)

    def prove(self, label: str) -> Proof:
        engine = self._engine

        def prove() -> Proof:
            if engine.label != label or engine.dirty or engine.paused:
                raise EngineFault(f"labelled {engine.label!r}, dirty {engine.dirty}, paused {engine.paused}")
            engine.proofs[label] = engine.digest
            return Proof(label, 1, 0)

        proof: Proof = self._call(prove, "prove")
        return proof

    def close(self) -> None:
        return


class Images:
    """Published weights by attempt."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def fetch(self, version: WeightVersion) -> Path:
        self._process.sleep(0.05)
        if self._world.images.get(version.attempt) != version.digest:
            raise CorruptCheckpoint(f"no image {version.attempt}")
        return Path(version.attempt)


class Intents:
    """A durable note for each engine."""

    def __init__(self, notes: dict[str, str], name: str) -> None:
        self._notes, self._name = notes, name

    def begin(self, label: str) -> None:
        self._notes[self._name] = label

    def done(self) -> None:
        self._notes.pop(self._name, None)

    def pending(self) -> str:
        return self._notes.get(self._name, "")


class SimBuffer:
    """A buffer whose log is durable: `done[t]` is what was trained at steps <= t on this log, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.timeline = 0
        self.incarnation = ""
        self.step = 0
        self.cursor = 0
        self.pending: list[int] = []
        self.trained: dict[int, tuple[int, ...]] = {}
        self.leased: dict[int, tuple[int, ...]] = {}
        self.version = 0

    # -- the trainer's calls -------------------------------------------------------------------------------

    def _admit(self, timeline: int, incarnation: str) -> None:
        if timeline != self.timeline or (self.incarnation and incarnation != self.incarnation):
            raise Fenced(f"the buffer is on timeline {self.timeline}, not {timeline}")

    def lease(self, timeline: int, incarnation: str, step: int) -> tuple[int, ...]:
        self._admit(timeline, incarnation)
        if step != self.step + 1:
            raise Conflict(f"step {step} after {self.step}")
        if step not in self.leased:
            while len(self.pending) < 2:
                self.pending.append(self.cursor)
                self.cursor += 1
            self.leased[step] = tuple(self.pending[:2])
            del self.pending[:2]
            self.version += 1
        return self.leased[step]

    def step_done(self, timeline: int, incarnation: str, step: int) -> None:
        self._admit(timeline, incarnation)
        if step <= self.step:
            return
        self.trained[step] = self.leased.pop(step)
        self.step = step
        self.version += 1

    # -- the port ------------------------------------------------------------------------------------------

    def fence(self, timeline: int, incarnation: str = "") -> None:
        if timeline < self.timeline:
            raise Fenced(f"timeline {self.timeline} was seen")
        if timeline > self.timeline:
            self.incarnation = ""
        self.timeline = timeline
        self.incarnation = incarnation or self.incarnation

    def cut(self, step: int, directory: Path) -> BufferPart:
        if step > self.step:
            raise Conflict(f"step {step} is not done")
        kept = {t: ids for t, ids in self.trained.items() if t <= step}
        self._world.parts[str(directory)] = kept
        return BufferPart(step=step, version=self.version, files=(), counts={})

    def committed(self, step: int) -> None:
        return

    def restore(self, directory: Path, part: BufferPart | None, timeline: int) -> None:
        if timeline < self.timeline:
            raise Fenced("an older timeline")
        kept = {} if part is None else self._world.parts.get(str(directory))
        if kept is None:
            raise CorruptCheckpoint("the buffer's part is missing")
        self.trained, self.leased = dict(kept), {}
        self.step = max(kept, default=0)
        done = {sample for ids in kept.values() for sample in ids}
        self.pending = [sample for sample in range(self.cursor) if sample not in done]
        self.version += 1

    def apply_freshness(self, step_map: Mapping[int, int], training_step: int) -> FreshnessReport:
        return FreshnessReport(pending=len(self.pending), stale=0, dead=0, action="keep")

    def statistics(self) -> dict[str, Any]:
        return {"step": self.step, "version": self.version, "counts": {}}

    def close(self) -> None:
        return


class ToyParts:
    """`BufferParts` on the toy disk."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def directory(self, path: str) -> Path:
        return Path(path)

    def store(self, path: str, part: BufferPart) -> tuple[str, int, int]:
        self._process.sleep(self._world.kernel.rng(path).uniform(0.05, 2.0))
        self._world.files[f"{path}/buffer"] = part
        return f"buffer:{path}:{part.step}", 10, 1

    def load(self, checkpoint: Checkpoint) -> tuple[Path, BufferPart] | None:
        self._process.sleep(0.1)
        part = self._world.files.get(f"{checkpoint.path}/buffer")
        if part is None:
            raise NotFound(f"{checkpoint.path}: no buffer part")
        return Path(checkpoint.path), part
