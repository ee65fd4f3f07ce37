"""Payload files of the buffer: append-only blobs that the log points into by (file, offset, length,
CRC32)."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from .bufferlog import fsync_directory, write_all
from .digest import crc64nvme, crc_text

__all__ = ["PayloadFiles", "file_crc64"]

READ_BYTES = 8 << 20


class PayloadFiles:
    """Numbered files `pay-<n>.dat`; only the newest grows, and only in the process that made it."""

    def __init__(self, directory: Path, *, first: int = 0, file_bytes: int = 256 << 20) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._readers: dict[int, int] = {}
        self._closing: list[int] = []
        self._fd = -1
        self._crc = 0
        self.tail = max([first - 1, *self.present()]) + 1
        self.offset = 0

    def path(self, file: int) -> Path:
        """Where a file lies."""
        return self._directory / f"pay-{file:08d}.dat"

    def present(self) -> dict[int, int]:
        """Size in bytes of every file there is."""
        return {int(path.stem[4:]): path.stat().st_size for path in self._directory.glob("pay-*.dat")}

    def append(self, blobs: list[bytes]) -> tuple[int, int]:
        """Write blobs one after another; return (file, offset of the first)."""
        if self._fd < 0:
            self._fd = os.open(self.path(self.tail), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            fsync_directory(self._directory)
        joined, start = b"".join(blobs), self.offset
        try:
            write_all(self._fd, joined)
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        self._crc = crc64nvme(joined, self._crc)
        self.offset += len(joined)
        return self.tail, start

    def full(self) -> bool:
        """Whether the tail has reached its size."""
        return self.offset >= self._file_bytes

    def seal(self) -> tuple[int, int, str] | None:
        """End the tail and return (file, bytes, digest), None when it is empty; `sync` makes it durable."""
        if self._fd < 0:
            return None
        self._closing.append(self._fd)
        sealed = (self.tail, self.offset, crc_text(self._crc))
        self._fd, self._crc, self.offset, self.tail = -1, 0, 0, self.tail + 1
        return sealed

    def sync(self) -> None:
        """Make everything written durable; to be called before the log that points into it is."""
        while self._closing:
            os.fsync(self._closing[-1])
            os.close(self._closing.pop())
        if self._fd >= 0:
            os.fsync(self._fd)

    def read(self, file: int, offset: int, length: int, crc: int) -> bytes | None:
        """One blob, or None when it is missing or damaged."""
        if file not in self._readers:
            try:
                self._readers[file] = os.open(self.path(file), os.O_RDONLY)
            except FileNotFoundError:
                return None
        data = os.pread(self._readers[file], length, offset)
        return data if len(data) == length and zlib.crc32(data) == crc else None

    def remove(self, file: int) -> None:
        """Delete a file that nothing needs any more."""
        reader = self._readers.pop(file, None)
        if reader is not None:
            os.close(reader)
        self.path(file).unlink(missing_ok=True)

    def close(self) -> None:
        """Sync and close everything; idempotent."""
        for reader in self._readers.values():
            os.close(reader)
        self._readers.clear()
        self.sync()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def file_crc64(path: Path) -> str:
    """CRC64NVME of a whole file, read in large pieces."""
    crc = 0
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(READ_BYTES):
            crc = crc64nvme(piece, crc)
    return crc_text(crc)
