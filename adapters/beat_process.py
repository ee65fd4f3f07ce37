"""The process beside a worker that keeps its lease: `python -m slackwater.adapters.beat_process <parent's pid>`.

Started by `BeatProcess`, which tells it on standard input first one line (`BeatSpec`), then single bytes as a doorbell;
the rest goes over shared memory. It outlives its parent only for as long as it takes to write down that it ended.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time

import msgspec

from ..engine.beat import Beat
from ..engine.config import Site
from ..engine.errors import SlackwaterError, Unavailable
from ..engine.keys import Keys
from ..engine.model import Alive
from ..engine.ports import StateStore
from .beatboard import BeatNow, Board, Wanted
from .ranklink import LinkClient, LinkServer, RankLink
from .stores import connect_store

__all__ = ["EARLIEST", "BeatSpec", "Runner", "main"]

_PR_SET_PDEATHSIG = 1
_RETRY_SECONDS = 0.1
_LOOK_SECONDS = 1.0
EARLIEST = 0.2  # a changed report is written at the earliest this part of a heartbeat after the last beat


class BeatSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a beat process must know. Secrets are not in it; `rank` above 0 keeps a link and no lease."""

    site: Site
    job: str
    name: str
    lease_s: int
    heartbeat_s: float
    board_fd: int
    link: RankLink | None = None
    listen_fd: int = -1


class Runner:
    """One beat process's work: `run` returns when the worker closed or died."""

    def __init__(self, spec: BeatSpec, parent: int, store: StateStore) -> None:
        self._spec = spec
        self._store = store
        self._parent = parent
        self._board = Board(spec.board_fd)
        self._keys = Keys(spec.job)
        self._beat: Beat | None = None
        self._now = BeatNow()
        self._reported: Alive | None = None
        self._last_pump = 0.0
        self._gone = ""
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        for fd in (0, self._wake_in):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        if hasattr(os, "pidfd_open"):
            self._watch_parent()
        self._server: LinkServer | None = None
        self._client: LinkClient | None = None
        if spec.link is not None and spec.link.rank == 0:
            self._server = LinkServer(socket.socket(fileno=spec.listen_fd), spec.link, self._on_gone)
        elif spec.link is not None:
            self._client = LinkClient(spec.link, self._on_gone)

    def _watch_parent(self) -> None:
        """The parent's end is seen also where a forked child of it still holds the other end of our input."""
        try:
            self._selector.register(os.pidfd_open(self._parent), selectors.EVENT_READ)
        except OSError:
            return  # not on this kernel, or gone already: the death signal and the end of input tell

    def wake(self) -> None:
        """Look around now. Safe in a signal handler and in any thread."""
        try:
            os.write(self._wake_out, b".")
        except BlockingIOError:
            return

    def _on_gone(self, text: str) -> None:
        self._gone = self._gone or text
        self.wake()

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Beat until the worker closed the beat or is gone; then say so and return."""
        while True:
            alive = self._look()
            wanted = self._board.wanted()
            if not alive and not wanted.closed:
                self._say_exited("the process ended without a goodbye")
                return
            if wanted.closed:
                self._close()
                return
            self._step(wanted)
            self._selector.select(self._idle_seconds(wanted))

    def _look(self) -> bool:
        """Empty the doorbell; False when the worker is gone."""
        for fd in (self._wake_in, 0):
            try:
                while block := os.read(fd, 4096):
                    if len(block) < 4096:
                        break
                if not block and fd == 0:
                    return False
            except BlockingIOError:
                continue
        return os.getppid() == self._parent

    def _idle_seconds(self, wanted: Wanted) -> float:
        if self._beat is None:
            return _LOOK_SECONDS
        due = self._last_pump + self._spec.heartbeat_s * (EARLIEST if self._changed(wanted) else 1.0)
        return min(_LOOK_SECONDS, max(0.0, due - time.monotonic()))

    def _changed(self, wanted: Wanted) -> bool:
        return wanted.alive is not None and wanted.alive != self._reported

    def _step(self, wanted: Wanted) -> None:
        if wanted.life > self._now.life:
            self._begin(wanted.life)
        if self._gone and not self._now.lost:
            self._end_of_gang()
        beat = self._beat
        if beat is None:
            return
        self._adopt(beat, wanted)
        gap = self._spec.heartbeat_s * (EARLIEST if self._changed(wanted) else 1.0)
        if time.monotonic() >= self._last_pump + gap:
            self._last_pump = time.monotonic()
            self._reported = wanted.alive
            report = wanted.alive or Alive(incarnation="")
            ticks = int(self._board.ticks[0])
            beat.pump(msgspec.structs.replace(report, progress=report.progress + ticks))
            self._publish(beat)

    def _adopt(self, beat: Beat, wanted: Wanted) -> None:
        if wanted.adoption > self._now.adoption and wanted.registered is not None:
            beat.adopt(wanted.timeline_mod, wanted.registration_mod, wanted.alive_create, wanted.registered)
            self._publish(beat, adoption=wanted.adoption)

    def _begin(self, life: int) -> None:
        """A new life with a new lease; the old one's lease is revoked, so that the slot is free."""
        old, self._beat = self._beat, None
        if old is not None:
            old.close()
        if self._client is not None or self._gone:
            self._begin_linked(life)
            return
        beat = Beat(self._store, self._keys, self._spec.name, self._spec.lease_s)
        try:
            beat.open()
        except SlackwaterError as error:
            self._show(BeatNow(life=life, error=type(error).__name__, lost=str(error)))
            return
        self._beat, self._reported, self._last_pump = beat, None, time.monotonic()
        self._now = BeatNow(life=life, adoption=self._now.adoption)
        self._publish(beat)

    def _begin_linked(self, life: int) -> None:
        link = self._spec.link
        if self._client is not None and link is not None and not self._gone:
            until = time.monotonic() + link.join_seconds
            while not self._client.connected.wait(_RETRY_SECONDS) and not self._gone:
                if time.monotonic() >= until or os.getppid() != self._parent:
                    break
        if self._gone or (self._client is not None and not self._client.connected.is_set()):
            text = self._gone or "the link to rank 0's beat does not come up"
            self._show(BeatNow(life=life, error="Unavailable", lost=text))
            return
        self._show(BeatNow(life=life, deadline=float("1e18")))

    def _publish(self, beat: Beat, adoption: int | None = None) -> None:
        state = beat.state
        self._show(
            BeatNow(
                life=self._now.life,
                adoption=self._now.adoption if adoption is None else adoption,
                lease=state.lease,
                deadline=state.deadline,
                alive_create=state.alive_create,
                lost=state.lost,
            )
        )

    def _show(self, now: BeatNow) -> None:
        self._now = now
        self._board.publish(now)

    # -- the ends ------------------------------------------------------------------------------------------

    def _end_of_gang(self) -> None:
        """Another rank is gone, so this life is over: said to the worker at once, then to the store."""
        beat = self._beat
        if beat is None:
            if self._now.life:
                self._show(BeatNow(life=self._now.life, lost=self._gone))
            return
        beat.end(self._gone)
        self._publish(beat)
        self._testify(beat, self._gone)

    def _say_exited(self, reason: str) -> None:
        if self._client is not None:
            self._client.close("exited", "")
        if self._beat is not None:
            self._adopt(self._beat, self._board.wanted())
            self._testify(self._beat, reason)
            self._beat.close()
        if self._server is not None:
            self._server.close("exited", reason)

    def _testify(self, beat: Beat, reason: str) -> None:
        until = time.monotonic() + 2 * self._spec.lease_s
        pause = threading.Event()
        while time.monotonic() < until:
            try:
                beat.testify(reason)
            except Unavailable:
                pause.wait(_RETRY_SECONDS)  # the outcome is unknown: read back, and again
                continue
            except SlackwaterError as error:
                print(f"slackwater: beat of {self._spec.name}: {error}", file=sys.stderr)  # noqa: T201  # its only voice
            return

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        if self._beat is not None:
            self._beat.close()
            self._beat.end("closed")
            self._publish(self._beat)


def _read_spec() -> BeatSpec:
    line = bytearray()
    while not line.endswith(b"\n"):
        block = os.read(0, 1)
        if not block:
            raise SystemExit(0)  # the worker ended before it told us anything
        line += block
    return msgspec.json.decode(bytes(line), type=BeatSpec)


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM at the parent's end. It comes at the end of our maker's thread, too: it only wakes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


def main() -> None:
    """Entry point; exits with 0 when the worker closed or died, 2 when the settings cannot work."""
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the worker's to answer; we follow it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(parent)
    spec = _read_spec()
    try:
        store = connect_store(spec.site, call_timeout_seconds=min(5.0, spec.lease_s / 4))
    except SlackwaterError as error:
        print(f"slackwater: {error}", file=sys.stderr)  # noqa: T201  # the worker shows it
        raise SystemExit(2) from error
    runner = Runner(spec, parent, store)
    signal.signal(signal.SIGTERM, lambda *_: runner.wake())
    runner.run()
    store.close()


if __name__ == "__main__":
    main()
