"""Files of the buffer outside its log: generations, the fence, and parts of a checkpoint.

A buffer's directory holds `LOCK`, `FENCE` (highest timeline seen), `CURRENT` (which generation lives) and one
`g<n>/` with log and payloads. A restore builds the next generation beside the old one and then renames
`CURRENT`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from .bufferlog import fsync_directory, write_all
from .digest import crc64nvme, crc_text
from .errors import Conflict, CorruptCheckpoint
from .payloads import file_crc64
from .samples import Caller, PartFile

__all__ = [
    "copy_prefix",
    "fetch_part_file",
    "fsync_file",
    "generation_path",
    "link_or_copy",
    "read_fence",
    "read_generation",
    "write_fence",
    "write_generation",
]

COPY_BYTES = 8 << 20


def read_generation(directory: Path) -> int:
    """Number of the living generation, 0 when there is none yet."""
    try:
        return msgspec.json.decode((directory / "CURRENT").read_bytes(), type=int)
    except FileNotFoundError:
        return 0


def write_generation(directory: Path, generation: int) -> None:
    """Make a generation the living one, atomically and durably."""
    _replace(directory / "CURRENT", msgspec.json.encode(generation))


def generation_path(directory: Path, generation: int) -> Path:
    """Where a generation's files lie."""
    return directory / f"g{generation:06d}"


def read_fence(directory: Path) -> Caller:
    """The highest timeline seen and its trainer's incarnation; timeline 0 when never fenced."""
    try:
        return msgspec.json.decode((directory / "FENCE").read_bytes(), type=Caller)
    except FileNotFoundError:
        return Caller(timeline=0)


def write_fence(directory: Path, fence: Caller) -> None:
    """Persist the fence, durably before it returns."""
    _replace(directory / "FENCE", msgspec.json.encode(fence))


def link_or_copy(source: Path, target: Path) -> None:
    """Give a closed file a second, new name; by copying where a hard link is impossible. Durable but for
    the name."""
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise Conflict(f"{target} exists already") from error
    except FileNotFoundError:
        raise
    except OSError:  # another filesystem, or one without hard links
        copy_prefix(source, target, source.stat().st_size)
    else:
        fsync_file(target)


def copy_prefix(source: Path, target: Path, size_bytes: int) -> str:
    """Copy the first bytes of a file to a new name, fsynced; return their digest."""
    crc, left = 0, size_bytes
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError as error:
        raise Conflict(f"{target} exists already") from error
    try:
        with source.open("rb", buffering=0) as stream:
            while left:
                piece = stream.read(min(COPY_BYTES, left))
                if not piece:
                    raise CorruptCheckpoint(f"{source} is shorter than {size_bytes} bytes", str(source))
                crc = crc64nvme(piece, crc)
                write_all(fd, piece)
                left -= len(piece)
        os.fsync(fd)
    finally:
        os.close(fd)
    return crc_text(crc)


def fetch_part_file(directory: Path, file: PartFile, target: Path) -> bool:
    """Bring one file of a part to its new place and verify it there; False when it does not exist.

    Raises `CorruptCheckpoint` when size or digest differ.
    """
    source = directory / file.name
    try:
        link_or_copy(source, target)
    except FileNotFoundError:
        return False
    if target.stat().st_size != file.size_bytes or file_crc64(target) != file.digest:
        raise CorruptCheckpoint(f"{source} does not match its recorded digest", str(source))
    return True


def fsync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    fsync_directory(path.parent)
