"""The local tier: one directory on NVMe, with a directory for every attempt at a checkpoint.

Names are never reused. Small JSON (`manifest.json`, `committed.json`) is written atomically and
durably. Nothing here follows a symbolic link, and nothing outside the root is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..engine.digest import digest_file
from ..engine.errors import ConfigError, CorruptCheckpoint, NoSpace, NotFound, StoreError
from ..engine.manifest import COMMITTED_NAME, MANIFEST_NAME, FileEntry, check_path
from ..engine.tensorfile import FileSystem, named_error, write_small_file

__all__ = ["LocalTier"]

_JSON_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LocalTier:
    """Checkpoint directories below `root`, addressed by paths relative to it. The constructor does no I/O."""

    root: Path
    files: FileSystem = FileSystem()  # noqa: RUF009  # it holds no state

    def prepare(self, needed_bytes: int = 0) -> None:
        """Make the root and prove that it can be written. `ConfigError` or `NoSpace` in one clear line."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_small_file(self.root / f".probe-{os.getpid()}", b"probe", replace=True, files=self.files)
            (self.root / f".probe-{os.getpid()}").unlink()
        except NoSpace:
            raise NoSpace(f"the local checkpoint directory {self.root} is full") from None
        except (OSError, StoreError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"cannot write to the local checkpoint directory {self.root}: {reason}"
            ) from error
        free = self.free_bytes()
        if free < needed_bytes:
            raise NoSpace(f"{self.root} has {free} bytes free; a checkpoint needs {needed_bytes}")

    def free_bytes(self) -> int:
        """Bytes that an unprivileged writer can still use."""
        return shutil.disk_usage(self.root).free

    def path(self, relative: str) -> Path:
        """The absolute path of a checked relative one; `CorruptCheckpoint` if it crosses a symbolic link."""
        path = self.root
        for segment in check_path(relative).split("/"):
            path = path / segment
            if path.is_symlink():
                raise CorruptCheckpoint(f"{path} is a symbolic link", relative)
        return path

    def create(self, relative: str) -> Path:
        """Make the directory of one attempt, durable in its parents; an existing one is fine (other
        ranks).
        """
        path = self.path(relative)
        try:
            path.mkdir(parents=True, exist_ok=True)
            step = path
            while step != self.root.parent:
                self.files.sync_directory(step)
                step = step.parent
        except OSError as error:
            raise named_error(error, path) from error
        return path

    def write_json(self, relative: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small file atomically; `Conflict` when it exists with other bytes and `replace` is off."""
        target = self.path(relative)
        if not replace and target.is_file() and target.read_bytes() == data:
            return
        write_small_file(target, data, replace=replace, files=self.files)

    def read_json(self, relative: str) -> bytes:
        """Read a small file. `NotFound`, `CorruptCheckpoint` (a link, not a file, too large), or
        `StoreError`.
        """
        path = self.path(relative)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size > _JSON_LIMIT_BYTES:
                    raise CorruptCheckpoint(f"{path} is not a file of a possible size", relative)
                return file.read()
        except FileNotFoundError:
            raise NotFound(f"{path} does not exist") from None
        except OSError as error:
            raise named_error(error, path) from error

    def attempts(self, prefix: str = "") -> Iterator[str]:
        """Relative paths of every attempt directory (`<job>/<uid>/t<T>/<attempt>`) below a prefix of
        that depth.
        """
        base = self.path(prefix) if prefix else self.root
        depth = 4 - (len(prefix.split("/")) if prefix else 0)
        if depth < 0 or not base.is_dir():
            return
        for path in sorted(base.glob("/".join("*" * depth)) if depth else [base]):
            if path.is_dir() and not path.is_symlink():
                relative = str(path.relative_to(self.root))
                with contextlib.suppress(CorruptCheckpoint):
                    check_path(relative)
                    yield relative

    def committed(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        """(relative path, bytes of `committed.json`) of every attempt that has one."""
        for relative in self.attempts(prefix):
            with contextlib.suppress(NotFound):
                yield relative, self.read_json(f"{relative}/{COMMITTED_NAME}")

    def verify(self, relative: str, entry: FileEntry) -> Path:
        """Read a file of an attempt and compare size and digest; return its path or raise
        `CorruptCheckpoint`.
        """
        path = self.path(f"{relative}/{entry.path}")
        try:
            if not path.is_file() or path.stat().st_size != entry.size_bytes:
                found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
                raise CorruptCheckpoint(f"{path}: {found}, recorded {entry.size_bytes} bytes", entry.path)
            _, digest = digest_file(path, entry.digest.split(":", 1)[0])
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: unreadable: {error.strerror}", entry.path) from error
        if digest != entry.digest:
            raise CorruptCheckpoint(f"{path}: digest {digest}, recorded {entry.digest}", entry.path)
        return path

    def remove(self, relative: str) -> None:
        """Remove an attempt: manifest and record first, then the data. A missing one is no error."""
        path = self.path(relative)
        if len(relative.split("/")) != 4:
            raise ValueError(f"{relative!r} is not the path of an attempt")
        try:
            for name in (MANIFEST_NAME, COMMITTED_NAME):
                (path / name).unlink(missing_ok=True)
            if path.exists():
                self.files.sync_directory(path)
                shutil.rmtree(path)
                self.files.sync_directory(path.parent)
        except FileNotFoundError:
            return  # another process of this host removes it too
        except OSError as error:
            raise named_error(error, path) from error

    def leftovers(self, prefix: str = "") -> Iterator[str]:
        """Attempts without `committed.json`; the caller decides which of them no open round still writes."""
        for relative in self.attempts(prefix):
            if not (self.root / relative / COMMITTED_NAME).exists():
                yield relative
