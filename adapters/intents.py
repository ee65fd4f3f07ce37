"""The durable note of a control call to an engine that has no proven outcome yet."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["FileIntents"]

_FILE = "intent.json"


class FileIntents:
    """`Intents` in one small file of its own directory, which is made when needed.

    Every change is fsynced before it returns, so that whoever starts after a crash knows that an old call may still
    land in the engine. A note that cannot be read counts as pending. `OSError` when the directory is not writable.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _FILE

    def begin(self, label: str) -> None:
        """Note that the engine is about to be changed to `label`."""
        self._write(label)

    def done(self) -> None:
        """Note that nothing is in flight."""
        self._write("")

    def pending(self) -> str:
        """The label of a call without a proven outcome, "" when there is none."""
        try:
            label = json.loads(self._path.read_bytes())["label"]
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            return "unreadable"
        return str(label)

    def _write(self, label: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(json.dumps({"label": label}).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
