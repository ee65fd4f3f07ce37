"""Reusable staging memory: page-aligned, and touched when it is made, so that a snapshot faults no
page in.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from typing import Any

from .errors import NoSpace, StagingBusy

__all__ = ["Arena", "ArenaPool"]

_PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class Arena:
    """One block of anonymous memory of `size_bytes` (rounded up), at `address`; pinned for CUDA when asked.

    Free it with `close`; views of it must be dropped first, else the memory stays until they are.
    """

    def __init__(self, size_bytes: int, *, pin: bool = False) -> None:
        self.size_bytes = max(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES, _PAGE_BYTES)
        try:
            self._map = mmap.mmap(-1, self.size_bytes)
        except (OSError, MemoryError) as error:
            raise NoSpace(f"no memory for a staging arena of {self.size_bytes} bytes: {error}") from error
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._prefault()
        self.pinned = pin and self._register()

    def _prefault(self) -> None:
        if self.size_bytes >= _HUGE_BYTES:
            with contextlib.suppress(OSError):
                self._map.madvise(_MADV_HUGEPAGE)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # Linux before 5.14: touch every page by hand
            ctypes.memset(self.address, 0, self.size_bytes)

    def _register(self) -> bool:
        cudart = _cudart()
        return cudart is not None and int(cudart.cudaHostRegister(self.address, self.size_bytes, 0)) == 0

    def close(self) -> None:
        """Release the memory; idempotent."""
        cudart = _cudart() if self.pinned else None
        if cudart is not None:
            cudart.cudaHostUnregister(self.address)
            self.pinned = False
        self.view.release()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: freed with that tensor
            self._map.close()


def _cudart() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda.cudart() if torch is not None and torch.cuda.is_available() else None


class ArenaPool:
    """At most `limit` arenas: one being written, one being filled. Thread-safe."""

    def __init__(self, limit: int = 2, *, pin: bool = False) -> None:
        self.limit = limit
        self._pin = pin
        self._idle: list[Arena] = []
        self._busy = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Arena:
        """Return an idle arena of at least `size_bytes`, or a new one. `StagingBusy` when all are in use."""
        with self._lock:
            if self._busy >= self.limit:
                raise StagingBusy(
                    f"{self._busy} snapshots are still being written; one more copy in memory is not allowed"
                )
            self._busy += 1
            arena = self._idle.pop() if self._idle else None
        try:
            if arena is not None and not size_bytes <= arena.size_bytes <= 2 * size_bytes + (64 << 20):
                arena.close()
                arena = None
            return arena if arena is not None else Arena(size_bytes, pin=self._pin)
        except BaseException:
            with self._lock:
                self._busy -= 1
            raise

    def give_back(self, arena: Arena) -> None:
        """Return an arena that `take` gave out; the next snapshot reuses it."""
        with self._lock:
            self._busy -= 1
            self._idle.append(arena)

    @property
    def busy(self) -> int:
        """Snapshots that hold an arena now."""
        return self._busy

    def close(self) -> None:
        """Free the idle arenas; ones in use stay until given back, then close again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.close()
