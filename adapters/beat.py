"""The worker's side of its beat: a spawned process keeps the lease, the worker reads a deadline from shared memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from types import TracebackType

import msgspec

from ..engine import errors
from ..engine.beatport import Registered
from ..engine.config import JobConfig, Site
from ..engine.errors import SlackwaterError, Unavailable
from ..engine.keys import check_name
from ..engine.model import Alive
from .beat_process import EARLIEST, BeatSpec
from .beatboard import BeatNow, Wanted, create_board
from .ranklink import RankLink, listen

__all__ = ["BeatProcess"]

_POLL_SECONDS = 0.005
_START_SECONDS = 20.0

_living: weakref.WeakSet[BeatProcess] = weakref.WeakSet()


class BeatProcess:
    """`BeatPort` by a process of its own. Make it before CUDA is touched; close it at a clean end.

    Without `close` (a crash, SIGKILL, the end of the interpreter) the beat writes into the store that this life exited.
    With `link`, rank 0's beat listens at `link.host`:`link.port` (0: any free port, see `link_port`) for the other
    ranks' beats, which keep a connection and no lease: their `open` waits for it and returns 0, and `alive` says only
    that no end of a rank is known. A forked copy of the worker must not use it (and ends nothing).
    """

    def __init__(self, site: Site, config: JobConfig, name: str, *, link: RankLink | None = None) -> None:
        self._lease_s = config.timers.lease_s
        self._name = check_name(name, "participant name")
        self._link = link
        self._listener = listen(link.host, link.port) if link is not None and link.rank == 0 else None
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._board = create_board()
        self._ticks = self._board.ticks
        self._wanted = Wanted()
        self._incarnation = ""
        self._first_adoption = 0
        self._closed = False
        self._ended = ""
        self._rung_at = 0.0
        self._spec = BeatSpec(
            site=site,
            job=config.job,
            name=name,
            lease_s=config.timers.lease_s,
            heartbeat_s=config.timers.heartbeat_s,
            board_fd=self._board.fd,
            link=link,
            listen_fd=self._listener.fileno() if self._listener is not None else -1,
        )
        self._process = self._spawn()
        _living.add(self)

    def _spawn(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-P", "-m", "slackwater.adapters.beat_process", str(os.getpid())]
        fds = [self._board.fd] + ([self._listener.fileno()] if self._listener is not None else [])
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # a kill of our process group leaves it the time to say what happened
            bufsize=0,
        )
        if process.stdin is None:
            raise Unavailable("the beat process has no input")
        os.write(process.stdin.fileno(), msgspec.json.encode(self._spec) + b"\n")
        os.set_blocking(process.stdin.fileno(), False)
        return process

    @property
    def pid(self) -> int:
        """The beat process's pid."""
        return self._process.pid

    @property
    def link_port(self) -> int:
        """Rank 0: the port that the other ranks' beats connect to; 0 without a link."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    # -- BeatPort ------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Begin a life with a new lease and return it (0 on ranks above 0). Blocks until it is granted.

        A beat process that died is started again. Raises `Unavailable`, `AuthFailed` … as the store said.
        """
        with self._lock:
            if self._closed:
                raise errors.LeaseLost(f"{self._name}: the beat is closed")
            if self._process.poll() is not None:
                self._hang_up()
                self._process = self._spawn()
            self._ended, self._incarnation = "", ""
            life = self._wanted.life + 1
            # A number that was never published marks the time before the next adoption.
            self._first_adoption = self._wanted.adoption + 1
            self._want(Wanted(life=life, adoption=self._wanted.adoption))
        return self._await(life)

    def _await(self, life: int) -> int:
        patience = (
            _START_SECONDS + self._lease_s + (self._link.join_seconds if self._link is not None else 0.0)
        )
        until, pause = time.monotonic() + patience, threading.Event()
        while (now := self._board.now()).life < life:
            if self._process.poll() is not None:
                raise Unavailable(f"{self._name}: {self._death()}")
            if time.monotonic() >= until:
                raise Unavailable(f"{self._name}: the beat process did not answer within {patience:g} s")
            pause.wait(_POLL_SECONDS)
        if now.error:
            kind = getattr(errors, now.error, Unavailable)
            raise (
                kind(f"{self._name}: {now.lost}")
                if issubclass(kind, SlackwaterError)
                else Unavailable(now.lost)
            )
        return now.lease

    def adopt(self, registered: Registered, alive: Alive) -> None:
        """From now on keep this registration's liveness key."""
        with self._lock:
            adoption = self._wanted.adoption + 1
            create, first = registered.alive_create, alive
            if alive.incarnation == self._incarnation:
                # The beat knows better by now, or has not taken up the registration itself.
                create, first = self._wanted.alive_create, self._wanted.registered or alive
            else:
                self._incarnation, self._first_adoption = alive.incarnation, adoption
            self._want(
                Wanted(
                    life=self._wanted.life,
                    adoption=adoption,
                    timeline_mod=registered.timeline_mod,
                    registration_mod=registered.registration_mod,
                    alive_create=create,
                    registered=first,
                    alive=alive,
                )
            )

    def report(self, alive: Alive) -> None:
        """Hand over the newest report; never blocks."""
        with self._lock:
            if alive != self._wanted.alive:
                wanted = msgspec.structs.replace(self._wanted, alive=alive)
                self._want(wanted, ring=self._is_news(alive))

    def tick(self) -> None:
        """The worker made progress. Two threads at once may count one step only, which is enough."""
        self._ticks[0] += 1

    def alive(self) -> bool:
        """Whether effects are allowed now: decided by the deadline in shared memory, no thread and no call."""
        if self._closed or self._ended or self._owner != os.getpid():
            return False
        now = self._board.now()
        return now.life == self._wanted.life and not now.lost and time.monotonic() < now.deadline

    @property
    def lease(self) -> int:
        """The lease in force; 0 before `open`."""
        return self._current().lease

    @property
    def lost(self) -> str:
        """Why this life is over; also when the beat process itself is."""
        if not self._ended:
            now = self._current()
            if now.life and now.lost:
                self._ended = now.lost
            elif not self._closed and self._owner == os.getpid() and self._process.poll() is not None:
                self._ended = self._death()
        return self._ended

    @property
    def alive_create(self) -> int:
        """Create-revision of the liveness key."""
        now = self._current()
        if now.adoption < self._first_adoption:
            return self._wanted.alive_create  # just registered: the beat has not taken it up yet
        return now.alive_create

    def close(self) -> None:
        """Say goodbye: the beat revokes the lease and ends. Blocks for at most one TTL; idempotent."""
        self._end(goodbye=True)

    def abandon(self) -> None:
        """Let go without a goodbye: the beat says that this process exited, and ends. Blocks like `close`."""
        self._end(goodbye=False)

    def _end(self, *, goodbye: bool) -> None:
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return
            if goodbye:
                self._want(msgspec.structs.replace(self._wanted, closed=True))
            self._closed = True
        _living.discard(self)
        self._hang_up()
        try:
            self._process.wait(timeout=self._lease_s + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the lease has expired by itself
            self._process.wait()
        if self._listener is not None:
            self._listener.close()
        os.close(self._board.fd)

    def __enter__(self) -> BeatProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _current(self) -> BeatNow:
        now = self._board.now()
        return now if now.life == self._wanted.life else BeatNow()

    def _is_news(self, alive: Alive) -> bool:
        """Whether the beat should look at once. Figures that only count on can wait until it looks by itself."""
        before = self._wanted.alive
        if before is None or time.monotonic() - self._rung_at >= self._spec.heartbeat_s * EARLIEST:
            return True
        step, metrics = alive.training_step, alive.metrics
        return msgspec.structs.replace(before, training_step=step, metrics=metrics) != alive

    def _want(self, wanted: Wanted, *, ring: bool = True) -> None:
        self._board.want(wanted)
        self._wanted = wanted
        if not ring:
            return
        self._rung_at = time.monotonic()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # full: it rang already; broken: `lost` says so
                os.write(self._process.stdin.fileno(), b".")

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _death(self) -> str:
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the beat process ended ({how})"


@atexit.register
def _leave() -> None:
    """At a normal end of the interpreter without `close`, the beats see the end of their input and say "exited"."""
    for beat in list(_living):
        if beat._owner == os.getpid():
            beat._hang_up()
