"""A session: one lease, a local deadline that is always earlier than the server's, and one signal when it
is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .errors import ConfigError, LeaseLost, SlackwaterError, Unavailable
from .ports import StateStore

__all__ = ["Session", "SessionKeeper"]

_BEATS_PER_TTL = 3
_RETRY_PAUSE_SECONDS = 0.1


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Session:
    """A lease that its holder believes in only until a deadline of its own.

    The deadline is the moment the last good renewal was *sent* plus the TTL, on the holder's monotonic
    `clock`; the server's is never earlier. `margin_seconds` (default a tenth of the TTL) before it, the
    session is lost for good: `lost` fires once, later renewals raise `LeaseLost`, and nothing replaces the
    lease; whoever wants to go on makes a new session and registers again. Thread-safe. `pause` waits
    between tries of a renewal (a simulator gives its own).
    """

    def __init__(
        self,
        store: StateStore,
        ttl_seconds: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        margin_seconds: float | None = None,
        pause: Callable[[float], None] = _pause,
    ) -> None:
        margin = ttl_seconds / 10 if margin_seconds is None else margin_seconds
        if ttl_seconds < 1 or not 0 <= margin < ttl_seconds * (1 - 1 / _BEATS_PER_TTL):
            raise ConfigError(
                f"session: a TTL of {ttl_seconds} s with a margin of {margin:g} s leaves no time"
            )
        self.ttl_seconds = ttl_seconds
        self.margin_seconds = margin
        self._store = store
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._lease = 0
        self._deadline = 0.0
        self._closed = False
        self._lost = threading.Event()
        self._reason = ""
        self._callbacks: list[Callable[[str], None]] = []

    # -- what a holder asks --------------------------------------------------------------------------------

    @property
    def lease(self) -> int:
        """The lease's id; 0 before `open`."""
        return self._lease

    @property
    def beat_seconds(self) -> float:
        """How often to call `renew`."""
        return self.ttl_seconds / _BEATS_PER_TTL

    @property
    def deadline(self) -> float:
        """When the lease may have expired, on the clock, if no renewal succeeds any more."""
        return self._deadline

    @property
    def reason(self) -> str:
        """Why the session was lost; empty while it was not."""
        return self._reason

    def alive(self) -> bool:
        """Whether effects are allowed now. Once False, False for ever; decided by the clock, not by a
        thread.
        """
        if self._lease == 0 or self._closed or self._lost.is_set():
            return False
        if self._clock() < self._deadline - self.margin_seconds:
            return True
        self._lose(f"no renewal within {self.ttl_seconds - self.margin_seconds:g} s")
        return False

    def check(self) -> None:
        """Raise `LeaseLost` unless `alive()`."""
        if not self.alive():
            raise LeaseLost(f"lease {self._lease:016x}: {self._reason or 'the session is not open'}")

    def wait_lost(self, timeout_seconds: float) -> bool:
        """Wait for the loss and return whether it happened; needs no thread that renews to notice it."""
        end = self._clock() + timeout_seconds
        while True:
            open_and_alive = self.alive()
            if self._lost.is_set():
                return True
            now = self._clock()
            if now >= end or self._closed:
                return False
            until = min(end, self._deadline - self.margin_seconds) if open_and_alive else end
            self._lost.wait(max(0.001, until - now))

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the session is lost, in the thread that notices; at once if it
        was.
        """
        with self._lock:
            if not self._lost.is_set():
                self._callbacks.append(callback)
                return
        callback(self._reason)

    # -- the life of the lease -----------------------------------------------------------------------------

    def open(self) -> int:
        """Grant the lease and return its id; a no-op when it is open. `Unavailable` may leave one to
        expire.
        """
        if self._closed or self._lost.is_set():
            raise LeaseLost("a session that is over cannot be opened again; make a new one")
        if self._lease == 0:
            sent = self._clock()
            self._lease = self._store.grant(self.ttl_seconds)
            self._deadline = sent + self.ttl_seconds
        return self._lease

    def renew(self) -> None:
        """One beat: renew the lease, trying again through transient faults until the session is lost.

        Call it every `beat_seconds`. Raises `LeaseLost` when the lease is gone or could not be renewed in
        time.
        """
        while True:
            self.check()
            sent = self._clock()
            try:
                ttl_seconds = self._store.keep_alive(self._lease)
            except Unavailable:
                self.check()
                self._pause(min(_RETRY_PAUSE_SECONDS, self.beat_seconds / 10))
                continue
            if ttl_seconds <= 0:
                self._lose("the store has no such lease any more")
            else:
                # An answer may be old (this process stood still): it counts from when it was asked for.
                with self._lock:
                    self._deadline = max(self._deadline, sent + self.ttl_seconds)
            self.check()
            return

    def fail(self, reason: str) -> None:
        """Declare the session lost (somebody knows better than the clock); idempotent."""
        self._lose(reason)

    def close(self) -> None:
        """Revoke the lease, trying for at most one TTL; after that it has expired by itself. Fires no
        signal.
        """
        if self._closed:
            return
        self._closed = True
        give_up = self._clock() + self.ttl_seconds
        while self._lease != 0:
            try:
                self._store.revoke(self._lease)
            except Unavailable:
                if self._clock() >= give_up:
                    return
                self._pause(_RETRY_PAUSE_SECONDS)
            except SlackwaterError:  # no permission, no space: the lease runs out by itself
                return
            else:
                return

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost.is_set() or self._closed:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
            self._lost.set()
        for callback in callbacks:
            callback(reason)


class SessionKeeper:
    """A thread that beats for one session. Start it after `session.open()`; stop it before
    `session.close()`.

    It ends by itself when the session is lost. A beat that comes late says so by `overruns` (late beats so
    far).
    """

    def __init__(self, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="session-keeper", daemon=True)
        self.overruns = 0

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, at most one TTL; the lease stays. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(self._session.ttl_seconds)

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        beat = self._session.beat_seconds
        due = self._clock() + beat
        try:
            while not self._stopping.wait(max(0.0, due - self._clock())):
                if self._clock() > due + beat / 2:
                    self.overruns += 1
                due = self._clock() + beat
                self._session.renew()
        except LeaseLost:
            return
        except SlackwaterError as error:
            self._session.fail(f"cannot renew: {error}")
        except BaseException as error:
            self._session.fail(f"the renewing thread died: {error!r}")
            raise
