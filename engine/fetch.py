"""Where a reader finds the files of a checkpoint: this host's own copy first, else the object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import NotFound
from .manifest import FileEntry, check_path
from .ports import ObjectStore
from .tensorfile import TEMP_SUFFIX, named_error

__all__ = ["Sources", "TieredSources"]

_RANGE_BYTES = 16 << 20


class Sources:
    """Copies of a file, best first; each is verified by who asks before it is used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copies(self, entry: FileEntry) -> Iterator[tuple[str, Path]]:
        """(tier, path) of each copy. Lazy: a later one is fetched only when an earlier one was no good."""
        path = self.directory / check_path(entry.path)
        if path.is_file():
            yield "local", path


class TieredSources(Sources):
    """The local directory, then `store` under `prefix`, downloaded into `cache` by ranges in parallel.

    The cache may be shared by the ranks of a host; files appear in it complete. Who made it removes it.
    """

    def __init__(
        self, directory: Path | None, store: ObjectStore | None, prefix: str, cache: Path, workers: int = 4
    ) -> None:
        super().__init__(directory if directory is not None else cache)
        self._store, self._prefix, self._cache, self._workers = store, prefix, cache, workers

    def copies(self, entry: FileEntry) -> Iterator[tuple[str, Path]]:
        """See `Sources.copies`. Raises `NotFound` or the store's errors when a download fails."""
        yield from super().copies(entry)
        cached = self._cache / check_path(entry.path)
        if self._cache != self.directory and cached.is_file():
            yield "cache", cached
        if self._store is not None:
            yield "remote", self._download(self._store, entry)

    def _download(self, store: ObjectStore, entry: FileEntry) -> Path:
        target = self._cache / check_path(entry.path)
        key = f"{self._prefix}/{entry.path}"
        info = store.head(key)
        if info is None or info.size_bytes != entry.size_bytes:
            raise NotFound(f"{key}: {'missing' if info is None else 'of another size'} in the object store")
        temp = target.with_name(f"{target.name}.{os.getpid()}{TEMP_SUFFIX}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("wb") as file, ThreadPoolExecutor(self._workers, "slackwater-fetch") as pool:
                file.truncate(entry.size_bytes)

                def fetch(offset: int) -> None:
                    data = store.get(key, offset, min(_RANGE_BYTES, entry.size_bytes - offset))
                    os.pwrite(file.fileno(), data, offset)

                for _ in pool.map(fetch, range(0, entry.size_bytes, _RANGE_BYTES)):
                    pass
            temp.replace(target)
        except OSError as error:
            raise named_error(error, target) from error
        finally:
            temp.unlink(missing_ok=True)
        return target
