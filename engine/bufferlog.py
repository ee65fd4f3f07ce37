"""The buffer's append-only log: frames in segment files, read back up to a torn tail.

A frame is a 28-byte header (magic, kind, body length, CRC32 of the body, its global position, CRC32 of the
header)
and a body: a small JSON head plus one packed array, so one frame records a whole batch. A segment is named
by the
position of its first byte; positions never restart, hence a position is the buffer's version.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from .errors import CorruptCheckpoint

__all__ = ["Frame", "Head", "Kind", "SegmentLog", "fsync_directory", "write_all"]

MAGIC = b"SWB1"
HEADER = struct.Struct("<4sIIIQ")
HEADER_BYTES = HEADER.size + 4
HEAD_LENGTH = struct.Struct("<I")


class Kind:
    """Kinds of log entries, as numbers in the frame header."""

    BIRTH = 1
    DISPATCHED = 2
    LANDED = 3
    LEASED = 4
    TRAINED = 5
    STEP_DONE = 6
    DROPPED = 7
    AGAIN = 8
    RELEASED = 9
    STEP_MAP = 10
    SEALED = 11
    RESTORED = 12


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON part of an entry; each kind uses the fields that it needs."""

    timeline: int = 0
    step: int = 0
    key: str = ""
    reason: str = ""
    first: int = 0
    count: int = 0
    group_size: int = 1
    file: int = 0
    size_bytes: int = 0
    digest: str = ""
    prompts: tuple[str, ...] = ()
    versions: dict[int, int] = {}
    replace: bool = False


class Frame(NamedTuple):
    """One entry: `position` is where it begins, `end` where the next one does."""

    kind: int
    head: Head
    raw: memoryview
    position: int
    end: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


def encode_frame(kind: int, head: Head, raw: bytes, position: int) -> bytes:
    """Pack one entry for the given global position."""
    text = _encode(head)
    body = b"".join((HEAD_LENGTH.pack(len(text)), text, raw))
    header = HEADER.pack(MAGIC, kind, len(body), zlib.crc32(body), position)
    return b"".join((header, zlib.crc32(header).to_bytes(4, "little"), body))


def _header_at(data: memoryview, offset: int, base: int) -> tuple[int, int, int] | None:
    """(kind, body length, body CRC) of an intact header at this offset, else None."""
    raw = bytes(data[offset : offset + HEADER_BYTES])
    if len(raw) < HEADER_BYTES or zlib.crc32(raw[: HEADER.size]) != int.from_bytes(
        raw[HEADER.size :], "little"
    ):
        return None
    magic, kind, length, crc, position = HEADER.unpack(raw[: HEADER.size])
    return (kind, length, crc) if magic == MAGIC and position == base + offset else None


def _frame_at(data: memoryview, offset: int, base: int) -> Frame | None:
    header = _header_at(data, offset, base)
    if header is None:
        return None
    kind, length, crc = header
    start, end = offset + HEADER_BYTES, offset + HEADER_BYTES + length
    body = data[start:end]
    if len(body) < length or zlib.crc32(body) != crc:
        return None
    (head_bytes,) = HEAD_LENGTH.unpack(body[: HEAD_LENGTH.size])
    text = body[HEAD_LENGTH.size : HEAD_LENGTH.size + head_bytes]
    return Frame(kind, _decode(text), body[HEAD_LENGTH.size + head_bytes :], base + offset, base + end)


def _intact_header_after(data: memoryview, offset: int, base: int) -> bool:
    """Whether anything written later survives: then a bad frame is damage, not a torn tail."""
    whole = bytes(data)
    found = whole.find(MAGIC, offset + 1)
    while found >= 0:
        if _header_at(data, found, base) is not None:
            return True
        found = whole.find(MAGIC, found + 1)
    return False


class SegmentLog:
    """Append-only segments in one directory; one writer. `replay` once, then `append`."""

    def __init__(self, directory: Path, *, segment_bytes: int = 64 << 20) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segments: list[tuple[int, Path]] = []
        self._fd = -1
        self._end = 0

    @property
    def end(self) -> int:
        """The position after the last entry."""
        return self._end

    def replay(self, *, torn_tail: bool = True) -> Iterator[Frame]:
        """Yield every entry and get ready to append; a torn tail is cut off the last file.

        Raises `CorruptCheckpoint` on damage anywhere else, and with `torn_tail=False` on a torn tail as well.
        """
        found = sorted((int(path.stem[4:]), path) for path in self._directory.glob("log-*.seg"))
        position = found[0][0] if found else 0
        for number, (base, path) in enumerate(found):
            if base != position:
                raise CorruptCheckpoint(f"log segment {path.name} does not begin at {position}", str(path))
            data = memoryview(path.read_bytes())
            offset = 0
            while offset < len(data):
                frame = _frame_at(data, offset, base)
                if frame is None:
                    last = number == len(found) - 1
                    if not (torn_tail and last) or _intact_header_after(data, offset, base):
                        raise CorruptCheckpoint(
                            f"log segment {path.name} is damaged at byte {offset}", str(path)
                        )
                    _truncate(path, offset)
                    break
                yield frame
                offset = frame.end - base
            position = base + offset
        self._segments = found
        self._end = position
        if found:
            self._fd = os.open(found[-1][1], os.O_RDWR | os.O_APPEND)

    def append(self, kind: int, head: Head, raw: bytes = b"") -> Frame:
        """Write one entry (to the page cache; `sync` makes it durable) and return it."""
        if self._fd < 0 or self._end - self._segments[-1][0] >= self._segment_bytes:
            self.roll()
        blob = encode_frame(kind, head, raw, self._end)
        start = self._end
        try:
            write_all(self._fd, blob)
        except OSError:
            os.ftruncate(
                self._fd, start - self._segments[-1][0]
            )  # a half entry must not precede the next one
            raise
        self._end += len(blob)
        return Frame(kind, head, memoryview(raw), start, self._end)

    def roll(self) -> None:
        """Close the current segment, durably, and begin one at the end; the closed file never changes
        again."""
        if self._segments and self._segments[-1][0] == self._end and self._fd >= 0:
            return
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
        path = self._directory / f"log-{self._end:016d}.seg"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        fsync_directory(self._directory)
        self._segments.append((self._end, path))

    def sync(self) -> None:
        """Make every entry so far durable."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def prefix(self, position: int) -> list[tuple[Path, int, bool]]:
        """(file, bytes that belong to the prefix, whether that is a whole closed file) up to `position`."""
        parts = []
        for number, (base, path) in enumerate(self._segments):
            last = number == len(self._segments) - 1
            end = self._end if last else self._segments[number + 1][0]
            if base < position:
                parts.append((path, min(end, position) - base, not last and end <= position))
        return parts

    def close(self) -> None:
        """Sync and close; idempotent."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def _truncate(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write everything; the kernel may take a large write in pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
