"""Write one file so that it is either complete and durable under a new name, or absent.

Temp beside the target, large direct writes, hashed in the same pass, fsync, rename to a name that must
be free, fsync of the directory. A failure at any point removes the partial file and raises a named error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .digest import CHUNK_BYTES, combine_crcs, crc64nvme, crc_text, sha256_text
from .errors import Conflict, NoSpace, StoreError
from .manifest import FileEntry

__all__ = ["TEMP_SUFFIX", "FileSystem", "write_file", "write_small_file"]

TEMP_SUFFIX = ".partial"
_BLOCK_BYTES = 4096
_NOREPLACE = 1
_START_WRITEBACK = 2
_libc = ctypes.CDLL(None, use_errno=True)


class FileSystem:
    """The system calls of a write, in one place; a test puts faults or a recorder in their stead."""

    def create(self, path: Path, direct: bool) -> int:
        """Open a new file for writing; the mode is the umask's business."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """pwrite; may write less."""
        return os.pwrite(fd, data, offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Ask the kernel to start writing a range of a buffered file; only a hint."""
        with contextlib.suppress(AttributeError):
            _libc.sync_file_range(
                fd, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_START_WRITEBACK)
            )

    def truncate(self, fd: int, size_bytes: int) -> None:
        """ftruncate."""
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        """fsync of a file or a directory."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """close; network file systems report quota errors here."""
        os.close(fd)

    def rename_new(self, source: Path, target: Path) -> None:
        """Rename, refusing to replace an existing target (FileExistsError)."""
        result = -1
        with contextlib.suppress(AttributeError):
            result = _libc.renameat2(-100, os.fsencode(source), -100, os.fsencode(target), _NOREPLACE)
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, 0):
            raise OSError(code, os.strerror(code), str(target))
        if target.exists():  # a file system without RENAME_NOREPLACE; our names are unique per attempt
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over an existing target."""
        source.replace(target)

    def sync_directory(self, path: Path) -> None:
        """fsync of a directory, so that a rename in it survives power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)


def write_file(
    directory: Path,
    name: str,
    data: memoryview,
    size_bytes: int,
    *,
    path: str | None = None,
    digest: str = "crc64nvme",
    direct: bool = True,
    files: FileSystem | None = None,
) -> FileEntry:
    """Write the first `size_bytes` of `data` to the new file `directory/name` and return its entry, durable.

    For direct I/O `data` must begin at a multiple of 4096 and reach to the next multiple of 4096 after
    `size_bytes`;
    otherwise the write is buffered. `path` is the entry's path (default: `name`). Blocks; the GIL is
    free meanwhile.
    Raises `Conflict` when the name is taken, `NoSpace`, or `StoreError` naming the file and the step
    that failed.
    """
    files = files or FileSystem()
    temp = directory / (name + TEMP_SUFFIX)
    with _cleaned_up(temp, directory / name):
        fd, direct = _open(files, temp, direct and _aligned(data, size_bytes))
        with _closed(files, fd):
            with ThreadPoolExecutor(1, thread_name_prefix="slackwater-hash") as hasher:
                crcs = hasher.map(crc64nvme, _chunks(data[:size_bytes]))
                _write_all(files, fd, data, size_bytes, direct)
                hashes = list(crcs)
            files.sync(fd)
        files.rename_new(temp, directory / name)
        files.sync_directory(directory)
    lengths = [min(CHUNK_BYTES, size_bytes - at) for at in range(0, size_bytes, CHUNK_BYTES)]
    whole = crc_text(combine_crcs(zip(hashes, lengths, strict=True)))
    return FileEntry(
        path=path or name,
        size_bytes=size_bytes,
        digest=sha256_text(data[:size_bytes]) if digest == "sha256" else whole,
        chunks=tuple(f"{crc:016x}" for crc in hashes),
    )


def write_small_file(
    target: Path, data: bytes, *, replace: bool = False, files: FileSystem | None = None
) -> None:
    """Write a small file atomically and durably. Errors as `write_file`; `replace` allows an existing
    name.
    """
    files = files or FileSystem()
    temp = target.with_name(target.name + TEMP_SUFFIX)
    with _cleaned_up(temp, target):
        temp.unlink(missing_ok=True)  # left by a killed writer of the same name
        fd = files.create(temp, direct=False)
        with _closed(files, fd):
            _write_all(files, fd, memoryview(data), len(data), direct=False)
            files.sync(fd)
        (files.replace if replace else files.rename_new)(temp, target)
        files.sync_directory(target.parent)


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES]


def _aligned(data: memoryview, size_bytes: int) -> bool:
    padded = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    if len(data) < padded or data.readonly or size_bytes == 0:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % _BLOCK_BYTES == 0


def _open(files: FileSystem, temp: Path, direct: bool) -> tuple[int, bool]:
    if direct:
        try:
            return files.create(temp, direct=True), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            temp.unlink(missing_ok=True)  # some file systems make the file and then refuse the flag
    return files.create(temp, direct=False), False


def _write_all(files: FileSystem, fd: int, data: memoryview, size_bytes: int, direct: bool) -> None:
    end = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES if direct else size_bytes
    offset = 0
    while offset < end:
        piece = data[offset : min(offset + CHUNK_BYTES, end)]
        try:
            count = files.write(fd, piece, offset)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct, end = _leave_direct(fd), size_bytes  # the device wants another alignment
            continue
        if count <= 0:
            raise OSError(errno.EIO, "nothing was written")
        if direct and count % _BLOCK_BYTES:
            direct, end = _leave_direct(fd), size_bytes
        if not direct:
            files.start_writeback(fd, offset, count)
        offset += count
    files.truncate(fd, size_bytes)


def _leave_direct(fd: int) -> bool:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


@contextlib.contextmanager
def _closed(files: FileSystem, fd: int) -> Iterator[None]:
    """Close once; an error of close counts, unless another one is already on its way."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    files.close(fd)


@contextlib.contextmanager
def _cleaned_up(temp: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, FileExistsError) and error.filename == str(temp)):
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise Conflict(f"{target}: the name is already taken") from error
        if isinstance(error, OSError):
            raise named_error(error, target) from error
        raise


def named_error(error: OSError, path: Path) -> StoreError:
    """The error of our tree for a failed system call, in one line that names the file."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{path}: {reason}")
    return StoreError(f"{path}: {reason}")
