"""The shared memory between a worker and its beat: one counter, and one mailbox each way in which the latest wins.

Neither side ever waits for the other: a writer fills the slot that is not the newest, a reader takes the newest slot
whose checksum holds. So a writer that is stopped or killed in the middle of a write takes nothing away.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from typing import Any, TypeVar

import msgspec

from ..engine.errors import ConfigError
from ..engine.model import Alive

__all__ = ["Board", "Wanted", "BeatNow", "create_board"]

_SLOT_BYTES = 96 * 1024  # a value in etcd may have 64 KiB
_HEADER = 16  # sequence number (8), length (4), checksum (4)
_COUNTER_BYTES = 4096
_BOARD_BYTES = _COUNTER_BYTES + 4 * _SLOT_BYTES


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker wants of its beat: a newer `life` wants a new lease, a newer `adoption` was registered.

    `registered` is what the liveness key held at the registration, `alive` the newest report.
    """

    life: int = 0
    adoption: int = 0
    timeline_mod: int = 0
    registration_mod: int = 0
    alive_create: int = 0
    registered: Alive | None = None
    alive: Alive | None = None
    closed: bool = False


class BeatNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the beat has: its answer to `life` and `adoption`, and the lease. `deadline` is CLOCK_MONOTONIC seconds.

    `error` names the class of the error that `life` could not begin with, `lost` says why a life is over.
    """

    life: int = 0
    adoption: int = 0
    lease: int = 0
    deadline: float = 0.0
    alive_create: int = 0
    lost: str = ""
    error: str = ""


T = TypeVar("T", Wanted, BeatNow)


class _Mailbox:
    """Two slots. One process writes (one thread at a time), another reads."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._slots = [memory[at + i * _SLOT_BYTES : at + (i + 1) * _SLOT_BYTES] for i in (0, 1)]
        self._sequence = 0

    def write(self, body: bytes) -> None:
        if len(body) > _SLOT_BYTES - _HEADER:
            raise ConfigError(f"a report of {len(body)} bytes is too large for the beat (and for etcd)")
        if self._sequence == 0:
            self._sequence = self.read()[0]  # another process wrote here before us
        self._sequence += 1
        slot = self._slots[self._sequence % 2]
        head = self._sequence.to_bytes(8, "little") + len(body).to_bytes(4, "little")
        slot[_HEADER : _HEADER + len(body)] = body
        slot[:_HEADER] = head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little")

    def read(self) -> tuple[int, bytes]:
        """Sequence number and body of the newest whole slot; (0, b"") before the first write."""
        best = (0, b"")
        for slot in self._slots:
            head = bytes(slot[:_HEADER])
            length = int.from_bytes(head[8:12], "little")
            if not 0 < length <= _SLOT_BYTES - _HEADER:
                continue
            body = bytes(slot[_HEADER : _HEADER + length])
            if zlib.crc32(body, zlib.crc32(head[:12])) == int.from_bytes(head[12:], "little"):
                best = max(best, (int.from_bytes(head[:8], "little"), body))
        return best


class Board:
    """The mapped memory, seen from either side. `fd` is inherited by the beat; close the board when done."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _BOARD_BYTES)
        memory = memoryview(self._map)
        self.ticks = memory[:8].cast("Q")
        """The worker's progress counter, one item."""
        self._wanted = _Mailbox(memory, _COUNTER_BYTES)
        self._now = _Mailbox(memory, _COUNTER_BYTES + 2 * _SLOT_BYTES)
        self._seen: dict[type[Any], tuple[int, Any]] = {}

    def want(self, wanted: Wanted) -> None:
        """Worker: replace what is wanted."""
        self._wanted.write(msgspec.json.encode(wanted))

    def publish(self, now: BeatNow) -> None:
        """Beat: replace what is."""
        self._now.write(msgspec.json.encode(now))

    def wanted(self) -> Wanted:
        """Beat: the newest wish."""
        return self._read(self._wanted, Wanted)

    def now(self) -> BeatNow:
        """Worker: the beat's newest word."""
        return self._read(self._now, BeatNow)

    def _read(self, box: _Mailbox, kind: type[T]) -> T:
        sequence, body = box.read()
        seen, value = self._seen.get(kind, (0, None))
        if value is None or sequence != seen:
            value = msgspec.json.decode(body, type=kind) if body else kind()
            self._seen[kind] = (sequence, value)
        found: T = value
        return found


def create_board() -> Board:
    """A fresh board in anonymous memory that a spawned child can inherit by its file descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("slackwater-beat", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _BOARD_BYTES)
    return Board(fd)
