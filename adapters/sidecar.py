"""The sidecar of one rollout engine: it lives beside the engine and speaks for it in the job. Imports no torch.

    sidecar = Sidecar(config, store, make_beat, engine, name="rollout-0", url=url, images=..., intents=...)
    sidecar.start()
    ...
    sidecar.stop()

The lease is held only while the engine answers; each loss of it, and each loss of ours, begins a new incarnation that
loads in full before it has a route.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import structlog

from ..engine.beatport import BeatPort
from ..engine.config import JobConfig
from ..engine.engineport import RolloutEngine
from ..engine.errors import (
    EngineFault,
    Fenced,
    LeaseLost,
    NoSpace,
    SlotOccupied,
    Unavailable,
)
from ..engine.follow import Follower
from ..engine.keys import Keys, check_name
from ..engine.membership import Membership
from ..engine.model import Alive, Participant, Record
from ..engine.ports import StateStore
from ..engine.rolloutrole import EngineLost, Images, Intents, RolloutRole
from ..engine.view import View

__all__ = ["Sidecar", "stop_on_signals"]

_LOOK_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 2.0


@dataclass(slots=True)
class _Life:
    """One incarnation and what belongs to it alone."""

    role: RolloutRole
    beat: BeatPort


class Sidecar:
    """Attaches one engine to a job, for as many incarnations as it takes. The constructor does no I/O.

    `url` is what the route tells clients. `make_beat` gives a new beat for each incarnation (nothing is opened yet).
    The caller owns `store` and `engine` and closes them after `run` has returned or `stop` was called.
    """

    def __init__(
        self,
        config: JobConfig,
        store: StateStore,
        make_beat: Callable[[], BeatPort],
        engine: RolloutEngine,
        *,
        name: str,
        url: str,
        images: Images,
        intents: Intents,
        flush_seconds: float = 30.0,
    ) -> None:
        self.name = check_name(name, "rollout name")
        self._config = config
        self._keys = Keys(config.job)
        self._store = store
        self._make_beat = make_beat
        self._engine = engine
        self._url = url
        self._images = images
        self._intents = intents
        self._flush_seconds = flush_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._follower = Follower(store, self._keys.root)
        self._cache: dict[str, tuple[int, Record]] = {}
        self._occupied_since = 0.0
        self._beat_seconds = min(config.timers.heartbeat_s, _LOOK_SECONDS)
        self._log = structlog.get_logger().bind(job=config.job, participant=name)

    # -- running -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in a thread of its own; `stop` ends it."""
        self._thread = threading.Thread(target=self._run_kept, name=f"sidecar-{self.name}", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        """Ask `run` to end: the route goes, the job is told, `run` returns. Fit for a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Ask for the end and wait for it; raises what ended the thread, if something did.

        A load that is under way is waited for.
        """
        self.request_stop()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def running(self) -> bool:
        """Whether the thread of `start` lives."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Serve until a stop is asked for; rides out etcd, the engine and recoveries.

        Raises `Refused` (`SlotOccupied` when another live sidecar has the name for longer than a lease),
        `StoreRewound` and what else a person must see.
        """
        try:
            while self._wait_for_engine():
                life = self._join()
                if life is not None:
                    self._live(life)
        finally:
            self._follower.close()

    def _run_kept(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - kept for `stop`, which raises it in the caller's thread
            self._error = error
            self._log.error("the sidecar ended", error=str(error))

    # -- between two lives ---------------------------------------------------------------------------------

    def _wait_for_engine(self) -> bool:
        """Wait until the engine answers; False when a stop was asked for."""
        pause, said = _FIRST_PAUSE_SECONDS, False
        while not self._stopping.is_set():
            try:
                self._engine.status()
                return True
            except (EngineFault, Unavailable) as error:
                if not said:
                    self._log.info("waiting for the engine", error=str(error))
                said = True
            self._stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return False

    def _join(self) -> _Life | None:
        """Register as a new incarnation; None when a stop was asked for or the engine must be asked again first.

        A slot that is occupied is waited for as long as a lease can last: its holder may have just died.
        """
        template = Participant(
            name=self.name,
            role="rollout",
            incarnation="",
            timeline=0,
            endpoint=self._url,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        beat = self._make_beat()
        try:
            membership = Membership(self._store, self._keys, template, beat)
            membership.join(Alive(incarnation="", state="idle", note="joined"))
        except (SlotOccupied, Unavailable, LeaseLost, NoSpace) as error:
            beat.close()
            self._join_later(error)
            return None
        except BaseException:  # what no waiting heals; the lease must not stay behind
            beat.close()
            raise
        self._occupied_since = 0.0
        role = RolloutRole(
            membership,
            self._engine,
            self._config,
            self._images,
            self._intents,
            self._url,
            flush_seconds=self._flush_seconds,
        )
        self._log.info(
            "joined",
            incarnation=membership.incarnation,
            timeline=membership.timeline,
            pending=self._intents.pending(),
        )
        return _Life(role, beat)

    def _join_later(self, error: Exception) -> None:
        if isinstance(error, SlotOccupied):
            now = time.monotonic()
            self._occupied_since = self._occupied_since or now
            timers = self._config.timers
            if now - self._occupied_since > timers.lease_s + 2 * timers.heartbeat_s:
                raise error
        self._log.warning("could not join yet", error=str(error))
        self._stopping.wait(
            _FIRST_PAUSE_SECONDS if isinstance(error, SlotOccupied) else _LONGEST_PAUSE_SECONDS
        )

    # -- one life ------------------------------------------------------------------------------------------

    def _live(self, life: _Life) -> None:
        """Follow the job until this incarnation is over, and leave nothing of it behind."""
        try:
            while not self._stopping.is_set():
                self._step(life.role)
            self._end(life, "left", "stopped")
        except EngineLost as error:
            self._log.warning("engine lost", error=str(error), hard=error.hard)
            if error.hard:
                # The leader need not wait for a lease: the engine's host said that nothing listens there.
                self._end(life, "exited", str(error)[:300])
        except Fenced as error:
            self._log.warning("this life is over", error=str(error))
        finally:
            # Without an engine there is no lease; the liveness key, a route and a pin go with it.
            life.beat.close()

    def _step(self, role: RolloutRole) -> None:
        try:
            self._follower.poll(self._beat_seconds)
        except Unavailable as error:
            self._log.warning("etcd does not answer", error=str(error))
        try:
            role.step(View(self._keys, self._follower.kvs, self._follower.revision, self._cache))
            role.report()
        except (Unavailable, LeaseLost, NoSpace) as error:
            # Nothing of ours is known to have landed; the next step looks again. A life that is over says `Fenced`.
            self._log.warning("not now", error=str(error))
            self._stopping.wait(self._beat_seconds / 2)

    def _end(self, life: _Life, ended: str, reason: str) -> None:
        try:
            life.role.membership.end(ended, reason)
        except (Unavailable, LeaseLost, NoSpace) as error:
            self._log.warning("could not say goodbye; the lease runs out", error=str(error))


@contextlib.contextmanager
def stop_on_signals(sidecar: Sidecar) -> Iterator[None]:
    """SIGTERM and SIGINT ask `sidecar` to stop, as long as the block runs. Main thread only."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        sidecar.request_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
