"""What the trainer says about itself: one JSON line an event in a file that the demo follows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Event", "EventLog", "EventTail"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `at` is CLOCK_MONOTONIC in seconds, the same for all processes of a host; `pid` wrote it."""

    kind: str
    at: float
    pid: int
    fields: dict[str, Any] = {}


class EventLog:
    """Appends events; with path None (the other ranks) it writes nothing. Lines survive a SIGKILL of the writer."""

    def __init__(self, path: Path | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(path, flags, 0o644) if path is not None else -1

    def write(self, kind: str, **fields: Any) -> None:
        """One event, in one write."""
        if self._file >= 0:
            event = Event(kind=kind, at=time.monotonic(), pid=os.getpid(), fields=fields)
            os.write(self._file, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class EventTail:
    """Reads the events of a file as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """The events since the last call; a line that is not finished waits for the next one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]
