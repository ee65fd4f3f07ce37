"""Upload one committed checkpoint directory: data files, then the manifest, then `committed.json` as
the very last.

Every step may be repeated: what the store already has, verified, is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from .errors import CorruptCheckpoint
from .manifest import FileEntry, Manifest, decode_manifest, manifest_digest
from .ports import ObjectInfo, ObjectStore

__all__ = ["UploadProgress", "UploadStore", "publish_committed", "upload_checkpoint", "upload_files"]

UploadProgress = Callable[[int, int], None]


class UploadStore(ObjectStore, Protocol):
    """An object store that takes whole files, resumably."""

    def upload_file(
        self, key: str, path: Path, entry: FileEntry, progress: Callable[[int], None] | None = None
    ) -> ObjectInfo:
        """Store `path` under `key`, verify the stored object by its own size and checksum, and describe it.

        Idempotent, resumable after a kill; blocks. `progress(bytes)` may be called from several threads.
        """
        ...

    def verify(self, key: str, entry: FileEntry) -> ObjectInfo:
        """Prove that a stored object is the recorded file; `NotFound` or `CorruptCheckpoint`."""
        ...


def upload_files(
    store: UploadStore,
    directory: Path,
    prefix: str,
    entries: Sequence[FileEntry],
    progress: UploadProgress | None = None,
) -> int:
    """Upload and verify `entries` of `directory` under `prefix`; return their bytes.

    `progress(sent_bytes, total_bytes)` is called as parts arrive. Raises the errors of `ObjectStore`.
    """
    total = sum(entry.size_bytes for entry in entries)
    sent = 0

    def arrived(size_bytes: int) -> None:
        nonlocal sent
        sent += size_bytes
        if progress is not None:
            progress(min(sent, total), total)

    for entry in entries:
        store.upload_file(f"{prefix}/{entry.path}", directory / entry.path, entry, arrived)
    if progress is not None:
        progress(total, total)
    return total


def upload_checkpoint(
    store: UploadStore,
    directory: Path,
    prefix: str,
    expected_digest: str,
    progress: UploadProgress | None = None,
    *,
    own_files: Callable[[FileEntry], bool] = lambda _entry: True,
) -> Manifest:
    """Upload the checkpoint in `directory`: its data, then `manifest.json` if nobody put another there.

    `expected_digest` is the manifest's digest in the record. Files for which `own_files` is false
    belong to another
    host: they must be in the store already and are verified. Returns the manifest; the checkpoint may
    then be called
    durable. Raises `CorruptCheckpoint`, `NotFound`, `Conflict` (another manifest is there), or the
    store's errors.
    """
    encoded = (directory / "manifest.json").read_bytes()
    if manifest_digest(encoded) != expected_digest:
        raise CorruptCheckpoint(
            f"{directory}/manifest.json is not the one that was recorded", "manifest.json"
        )
    manifest = decode_manifest(encoded)
    upload_files(store, directory, prefix, [entry for entry in manifest.files if own_files(entry)], progress)
    for entry in manifest.files:
        if not own_files(entry):
            store.verify(f"{prefix}/{entry.path}", entry)
    store.put(f"{prefix}/manifest.json", encoded, if_absent=True)
    return manifest


def publish_committed(store: ObjectStore, prefix: str, committed: bytes) -> None:
    """Put `committed.json`, the very last object of a checkpoint; repeating it is harmless."""
    store.put(f"{prefix}/committed.json", committed, if_absent=True)
