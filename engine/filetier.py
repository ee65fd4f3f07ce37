"""The port to the local tier: directories of checkpoint attempts on this host, addressed by relative paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .manifest import FileEntry
from .tensorfile import FileSystem

__all__ = ["FileTier"]


class FileTier(Protocol):
    """Attempt directories below `root`. All calls block for the disk and may be made by several threads and processes.

    A relative path that leaves the root raises `CorruptCheckpoint`, and so does one that crosses a symbolic link. A
    full disk is `NoSpace`, any other failure of the system `StoreError`.
    """

    @property
    def root(self) -> Path:
        """The absolute directory that everything lies below."""
        ...

    @property
    def files(self) -> FileSystem:
        """The system calls that writers of data files use here."""
        ...

    def prepare(self, needed_bytes: int = 0) -> None:
        """Make the root and prove that it can be written. Raises `ConfigError` or `NoSpace`."""
        ...

    def path(self, relative: str) -> Path:
        """The absolute path of a relative one; nothing needs to be there."""
        ...

    def create(self, relative: str) -> Path:
        """Make an attempt's directory, durable in its parents; an existing one is no error (another rank made it)."""
        ...

    def write_json(self, relative: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file whole and durably, or not at all.

        The same bytes again are no error; other bytes are a `Conflict` without `replace`.
        """
        ...

    def read_json(self, relative: str) -> bytes:
        """Read a small file. Raises `NotFound`, or `CorruptCheckpoint` when it is no plain file of a possible size."""
        ...

    def committed(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        """(relative path, bytes of `committed.json`) of every attempt below `prefix` that has one."""
        ...

    def leftovers(self, prefix: str = "") -> Iterator[str]:
        """Paths of attempts below `prefix` without `committed.json`; the caller knows which are still being written."""
        ...

    def verify(self, relative: str, entry: FileEntry) -> Path:
        """Read a file of an attempt whole; its path when size and digest are as recorded, else `CorruptCheckpoint`."""
        ...

    def remove(self, relative: str) -> None:
        """Remove an attempt, manifest first, so that what is left of it is no checkpoint; a missing one is no error."""
        ...
