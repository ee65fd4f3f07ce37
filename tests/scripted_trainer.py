"""A coordinator, a trainer that does as it is told, and beats in threads, for tests of what stands around a rollout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slackwater.engine.beat import Beat
from slackwater.engine.beatport import Registered
from slackwater.engine.boundary import Directive
from slackwater.engine.config import CheckpointSettings, JobConfig, Slots, Timers, WeightSettings
from slackwater.engine.coordinator import Coordinator
from slackwater.engine.errors import Fenced, LeaseLost, SlackwaterError, Unavailable
from slackwater.engine.follow import Follower
from slackwater.engine.keys import TRAINER, Keys
from slackwater.engine.membership import Membership
from slackwater.engine.model import Alive, Participant, Record, Vote
from slackwater.engine.ports import StateStore
from slackwater.engine.session import Session, SessionKeeper
from slackwater.engine.settings import bootstrap
from slackwater.engine.trainerrole import TrainerRole
from slackwater.engine.view import View

__all__ = ["ScriptedTrainer", "ThreadBeat", "Watcher", "fast_config", "running_job"]

_STATES = {"ready": "ready", "save": "saved", "seal": "sealed"}


def fast_config(job: str, *, min_rollouts: int = 0, window_s: float = 2.0) -> JobConfig:
    """Settings with short timers and no buffer; a checkpoint only when a request asks for one."""
    return JobConfig(
        job=job,
        slots=Slots(buffer=False),
        timers=Timers(
            heartbeat_s=0.5,
            lease_s=2,
            window_s=window_s,
            ready_deadline_s=10.0,
            resync_deadline_s=10.0,
            persist_s=1.0,
            retry_wait_s=0.5,
        ),
        checkpoint=CheckpointSettings(every_steps=0),
        weights=WeightSettings(publish_every_steps=1, max_lag_steps=100, min_rollouts=min_rollouts),
    ).checked()


class ThreadBeat:
    """A `BeatPort` whose beat is a thread of this process."""

    def __init__(self, store: StateStore, keys: Keys, name: str, config: JobConfig) -> None:
        self._make = lambda: Beat(store, keys, name, config.timers.lease_s)
        self._store = store
        self._beat = self._make()
        self._every = config.timers.heartbeat_s
        self._report: Alive | None = None
        self._progress = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> int:
        self._beat = self._make()
        return self._beat.open()

    def adopt(self, registered: Registered, alive: Alive) -> None:
        with self._lock:
            self._beat.adopt(
                registered.timeline_mod, registered.registration_mod, registered.alive_create, alive
            )
            self._report = alive
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def report(self, alive: Alive) -> None:
        self._report = alive

    def tick(self) -> None:
        self._progress += 1

    def alive(self) -> bool:
        state = self._beat.state
        return not state.lost and state.lease > 0 and time.monotonic() < state.deadline

    @property
    def lease(self) -> int:
        return self._beat.state.lease

    @property
    def lost(self) -> str:
        return self._beat.state.lost

    @property
    def alive_create(self) -> int:
        return self._beat.state.alive_create

    def silence(self) -> None:
        """Stop beating as a killed process does: the lease runs out by itself."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.silence()
        with contextlib.suppress(SlackwaterError):
            self._store.revoke(self._beat.state.lease)

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            with self._lock:
                if self._report is not None:
                    with contextlib.suppress(Unavailable):
                        self._beat.pump(msgspec.structs.replace(self._report, progress=self._progress))


class Watcher:
    """Looks at a job in etcd and waits for conditions."""

    def __init__(self, store: StateStore, job: str) -> None:
        self.keys = Keys(job)
        self._store = store

    @property
    def view(self) -> View:
        """What etcd holds now."""
        found = self._store.range(self.keys.root)
        return View(self.keys, {kv.key: kv for kv in found.kvs}, found.revision, {})

    def wait(self, condition: Callable[[View], bool], what: str, seconds: float = 30.0) -> View:
        """Return the first view that satisfies `condition`."""
        deadline = time.monotonic() + seconds
        while True:
            view = self.view
            if condition(view):
                return view
            if time.monotonic() > deadline:
                held = {k: kv.value.decode() for k, kv in view.kvs.items() if "/config" not in k}
                raise TimeoutError(f"not within {seconds:g} s: {what}; etcd holds {held}")
            time.sleep(0.05)

    def routed(self, name: str, version: int, seconds: float = 30.0) -> View:
        """Wait until a rollout's route stands for `version`."""

        def is_routed(view: View) -> bool:
            route = view.routes().get(name)
            return route is not None and route.version == version

        return self.wait(is_routed, f"{name} routed at version {version}", seconds)

    def unrouted(self, name: str, seconds: float = 30.0) -> View:
        """Wait until a rollout has no route."""
        return self.wait(lambda view: name not in view.routes(), f"{name} without a route", seconds)


class ScriptedTrainer:
    """A trainer participant without tensors: publishes the image that it is told, restores by saying so."""

    def __init__(self, store: StateStore, config: JobConfig, image: Path, digest: str) -> None:
        self._store = store
        self._config = config
        self._keys = Keys(config.job)
        self.image = (image, digest)
        self.step = 0
        self._beat = ThreadBeat(store, self._keys, TRAINER, config)
        template = Participant(name=TRAINER, role="trainer", incarnation="", timeline=0, host="here")
        self._membership = Membership(store, self._keys, template, self._beat)
        self.role = TrainerRole(store, self._membership, config)
        self._follower = Follower(store, self._keys.root)
        self._cache: dict[str, tuple[int, Record]] = {}
        self._wanted: tuple[Path, str] | None = None
        self._accepted = 0
        self._done = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: SlackwaterError | None = None

    def start(self) -> None:
        """Join and begin."""
        self._membership.join(Alive(incarnation="", state="idle"))
        self._thread.start()

    def publish(self, image: Path, digest: str, seconds: float = 30.0) -> int:
        """Do one step and publish `image` for it; returns the version once it is accepted."""
        with self._done:
            self._accepted, self._wanted = 0, (image, digest)
            if not self._done.wait_for(lambda: self._accepted > 0, seconds):
                raise TimeoutError(f"not published: {self.error}")
            return self._accepted

    def stop(self, *, silently: bool = False) -> None:
        """End; `silently` as a killed process does."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._follower.close()
        if silently:
            self._beat.silence()
        else:
            self._beat.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follower.poll(0.1)
                self._act(View(self._keys, self._follower.kvs, self._follower.revision, self._cache))
            except (Unavailable, LeaseLost, Fenced) as error:
                self.error = error
                if isinstance(error, Fenced):
                    return

    def _act(self, view: View) -> None:
        role = self.role
        task = role.recovery_task(view)
        recovery = view.recovery
        if task == "acknowledge":
            role.acknowledge(view)
        elif task == "restore" and recovery is not None:
            checkpoint = view.checkpoints().get(recovery.checkpoint)
            self.step = checkpoint.training_step if checkpoint is not None else 0
            role.restored(recovery.recovery, recovery.checkpoint, self.step, {})
        elif task == "publish":
            self._publish(view, None)
        elif task == "go":
            self._train(view)
        role.step = self.step
        role.state = "training"
        role.report(view)

    def _train(self, view: View) -> None:
        directive = self.role.directive(view)
        if directive.kind == "cut":
            self._publish(view, directive)
        elif self._wanted is not None:
            self.image = self._wanted
            self.step += 1
            self.role.step = self.step
            version = self._publish(view, None)
            with self._done:
                self._wanted, self._accepted = None, version
                self._done.notify_all()
        self._vote(view)

    def _publish(self, view: View, cut: Directive | None) -> int:
        image, digest = self.image
        attempt = f"{time.monotonic_ns():x}"
        record = self.role.publish(
            view,
            location=image.as_uri(),
            digest=digest,
            size_bytes=1,
            attempt=attempt,
            cut=cut,
            path="somewhere",
        )
        if record is None:
            self.role.refused_step = -1  # it stands at this step: like the adapter, it tries again by itself
            raise Unavailable("refused; the next view decides")
        return record.version

    def _vote(self, view: View) -> None:
        task, round_ = self.role.round_task(view), view.round
        if task == "none" or round_ is None:
            return
        vote = Vote(
            name=TRAINER,
            incarnation=self._membership.incarnation,
            timeline=self._membership.timeline,
            round=round_.round,
            state=_STATES[task],  # type: ignore[arg-type]
            step=round_.step,
            version=round_.version,
            path=round_.path,
            digest="manifest",
        )
        self.role.vote(view.create(view.keys.round), vote)


@contextlib.contextmanager
def running_job(store: StateStore, config: JobConfig) -> Iterator[Watcher]:
    """A job with one coordinator in a thread."""
    bootstrap(store, config)
    session = Session(store, config.timers.lease_s)
    session.open()
    keeper = SessionKeeper(session)
    keeper.start()
    coordinator = Coordinator(store, Keys(config.job), session, {"id": "c0"})
    stopping = threading.Event()

    def lead() -> None:
        with contextlib.suppress(LeaseLost):
            while not stopping.is_set():
                coordinator.step(0.1)

    thread = threading.Thread(target=lead, daemon=True)
    thread.start()
    try:
        yield Watcher(store, config.job)
    finally:
        stopping.set()
        thread.join()
        coordinator.close()
        keeper.stop()
        session.close()
