"""Faults that a test switches on through POST /_fault."""

from __future__ import annotations

import threading

__all__ = ["KINDS", "Faults"]

KINDS = (
    "refuse_flush",  # /flush_cache answers 400
    "silence",  # no call is answered; the connection stays open
    "unsuccessful_200",  # an update answers 200 with success false and changes nothing
    "wrong_version",  # an update loads, and labels the weights with another version
    "crash_in_update",  # the process dies in mid-load
    "partial_load",  # half of the tensors are loaded; the answer is a 200 with success
    "updated_but_400",  # everything is loaded and labelled; the answer is a 400
    "stale_cache",  # an update and a flush answer 200, and the cache is kept
    "slow_load",  # `seconds` before a load
    "slow_generate",  # `seconds` after each token
)


class Faults:
    """Which faults are on, and for how many more times (-1: until cleared)."""

    def __init__(self) -> None:
        self._active: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def set(self, kind: str, times: int = -1, seconds: float = 0.0) -> None:
        """Switch a fault on (`times` 0: off). ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind!r}, known: {', '.join(KINDS)}")
        with self._lock:
            self._active[kind] = (times, seconds)

    def take(self, kind: str) -> bool:
        """Whether the fault strikes now; uses up one of its times."""
        with self._lock:
            times, seconds = self._active.get(kind, (0, 0.0))
            if times > 0:
                self._active[kind] = (times - 1, seconds)
            return times != 0

    def seconds(self, kind: str) -> float:
        """The delay of a slow fault, 0.0 when it is off."""
        with self._lock:
            times, seconds = self._active.get(kind, (0, 0.0))
            return seconds if times != 0 else 0.0
