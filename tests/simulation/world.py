"""One simulated job: machines, processes that run the production modules, a supervisor that restarts the dead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import structlog
from greenlet import getcurrent

from slackwater.backends.memory import MemoryStore
from slackwater.engine import membership as membership_module
from slackwater.engine import settings as settings_module
from slackwater.engine.config import CheckpointSettings, JobConfig, StallLimits, Timers, WeightSettings
from slackwater.engine.coordinator import Coordinator
from slackwater.engine.keys import Keys
from slackwater.engine.settings import bootstrap

from .actors import buffer_main, coordinator_main, rollout_main, trainer_main
from .invariants import Invariants
from .kernel import Kernel, Process
from .network import Network, StoreProxy
from .parts import SimBeat, SimBuffer, SimEngine

__all__ = ["World", "default_config"]


def default_config(mode: str = "overlap", *, stall_s: float = 0.0, **changes: object) -> JobConfig:
    """A job whose rounds come often enough to be seen."""
    return JobConfig(
        job="sim",
        timers=Timers(
            heartbeat_s=1.0,
            lease_s=3,
            window_s=12.0,
            prepare_deadline_s=40.0,
            ready_deadline_s=8.0,
            save_deadline_s=20.0,
            resync_deadline_s=15.0,
            persist_s=3.0,
            retry_wait_s=1.0,
            stall_s=StallLimits(training=stall_s) if stall_s else StallLimits(),
        ),
        checkpoint=CheckpointSettings(every_steps=6, mode=mode, keep_last=2),  # type: ignore[arg-type]
        weights=WeightSettings(publish_every_steps=2, max_lag_steps=4, min_rollouts=1),
        **changes,  # type: ignore[arg-type]
    ).checked()


class World:
    """A job with its surroundings. `start` begins it; `kernel.run` lets time pass."""

    def __init__(
        self, seed: int, *, rollouts: int = 2, coordinators: int = 2, config: JobConfig | None = None
    ) -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        self.kernel = Kernel(seed)
        self.rng = self.kernel.rng("world")
        self._ids = self.kernel.rng("ids")
        self.config = config or default_config()
        self.keys = Keys(self.config.job)
        self.store = MemoryStore(self.kernel.clock)
        self.network = Network(self.kernel, self.store)
        self.invariants = Invariants(self)
        self.kernel.after_event = self.after_event
        self.network.on_applied = self.invariants.applied
        self.network.before_apply = self.invariants.store_changed
        self.network.on_sent = self.invariants.sent
        self.network.root = self.keys.root
        self.images: dict[str, str] = {}  # attempt -> digest
        self.files: dict[str, object] = {}  # local tier: path -> content
        self.remote: dict[str, object] = {}
        self.parts: dict[str, dict[int, tuple[int, ...]]] = {}
        self.buffer = SimBuffer(self)
        self.engines = {f"rollout-{n}": SimEngine(self, f"rollout-{n}") for n in range(rollouts)}
        self.intents: dict[str, str] = {}
        self.mains: dict[str, Callable[[World, Process, Process], None]] = {
            **{f"coordinator-{n}": coordinator_main for n in range(coordinators)},
            "trainer": trainer_main,
            "buffer": buffer_main,
            **dict.fromkeys(self.engines, rollout_main),
        }
        self.processes: dict[str, tuple[Process, Process]] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.beats: dict[str, SimBeat] = {}
        self.restarts = True
        self.poisoned = False  # no checkpoint can be loaded, for a reason that an older one would not cure
        self.calm_since = 0.0  # since when nothing disturbs the job
        self.led_since = 0.0  # since when nothing disturbs store and coordinators
        self.lives = 0

    def start(self) -> None:
        """Create the job and start every process."""
        uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=self.new_id()))
        membership_module.uuid = uuids  # type: ignore[assignment]
        settings_module.uuid = uuids  # type: ignore[assignment]
        bootstrap(self.store, self.config)
        for name in self.mains:
            self.launch(name)

    def new_id(self) -> str:
        """A random id that the seed determines."""
        return f"{self._ids.getrandbits(64):016x}"

    def launch(self, name: str) -> None:
        """Start (again) the process of this name and its beat."""
        self.lives += 1
        worker = Process(self.kernel, f"{name}#{self.lives}")
        beat = Process(self.kernel, f"{name}#{self.lives}/beat")
        self.processes[name] = (worker, beat)
        worker.spawn(lambda: self.mains[name](self, worker, beat))

    def caller(self) -> Process:
        """The process whose task runs now."""
        me = getcurrent()
        for pair in self.processes.values():
            for process in pair:
                if any(task.greenlet is me for task in process.tasks):
                    return process
        raise RuntimeError("called from outside any process")

    def store_of(self, process: Process) -> StoreProxy:
        """The store as this process reaches it."""
        return StoreProxy(self.network, process)

    # -- what may be done to a process; from the hub only --------------------------------------------------

    def kill(self, name: str, restart_after: float = 2.0) -> None:
        """Kill a process with its beat; it is restarted."""
        worker, beat = self.processes[name]
        if worker.dead:
            return
        worker.kill()
        beat.kill()
        self.kernel.after(restart_after, lambda: self._relaunch(name, worker))

    def exit(self, name: str, restart_after: float = 2.0) -> None:
        """A worker dies and its beat says so."""
        worker, beat = self.processes[name]
        worker.kill()
        own = self.beats.get(beat.name)
        if own is not None and not beat.dead:
            beat.spawn(lambda: own.testify("killed"), "testify")
        self.kernel.after(2.0, beat.kill)
        self.kernel.after(max(restart_after, 2.1), lambda: self._relaunch(name, worker))

    def stop(self) -> None:
        """Kill everything, so that no greenlet stays behind."""
        self.restarts = False
        for pair in self.processes.values():
            for process in pair:
                process.kill()

    def exited(self, name: str, worker: Process) -> None:
        """A process ended by itself: the supervisor starts it again."""
        _, beat = self.processes[name]

        def end() -> None:
            worker.kill()
            beat.kill()

        self.kernel.after(0.0, end)
        self.kernel.after(2.0, lambda: self._relaunch(name, worker))

    def _relaunch(self, name: str, dead: Process) -> None:
        if self.restarts and self.processes[name][0] is dead:
            self.launch(name)

    def disturb(self, kind: str, who: str, seconds: float) -> None:
        """Bounds in time hold only a while after the last fault; what befalls an engine disturbs nobody else."""
        if who.startswith(("leader", "coordinator")) or not who:
            self.led_since = max(self.led_since, self.kernel.now + max(seconds, 8.0) + 12.0)
        if not kind.startswith(("engine", "must", "blackout")):
            self.calm_since = max(self.calm_since, self.kernel.now + max(seconds, 8.0) + 12.0)

    def pause(self, name: str, seconds: float, *, worker: bool = True, beat: bool = True) -> None:
        """Stop a process (with its beat or alone), or its beat, for so long."""
        own_worker, own_beat = self.processes[name]
        if worker:
            own_worker.pause(seconds)
        if beat:
            own_beat.pause(seconds)

    def leader(self) -> str:
        """Who holds the oldest candidacy now; "" when nobody does."""
        found = self.store.range(self.keys.leaders).kvs
        if not found:
            return ""
        oldest = min(found, key=lambda kv: kv.create_revision)
        return str(oldest.value, "utf-8").split('"')[3]

    def after_event(self) -> None:
        """Let leases expire, tell the watchers, check what must hold."""
        before = self.network._seen
        if self.store._expiries and self.store._expiries[0][0] <= self.kernel.now:
            self.store.expire()
        if self.store.revision != before:
            self.invariants.time_passed()
            self.invariants.store_changed()
            self.network.notify()
