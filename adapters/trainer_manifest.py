"""Where a checkpoint's manifest and files are found: this host's directory first, then the object store."""

from __future__ import annotations

from pathlib import Path

from ..engine.errors import CorruptCheckpoint, NotFound
from ..engine.fetch import TieredSources
from ..engine.filetier import FileTier
from ..engine.manifest import MANIFEST_NAME, Manifest, decode_manifest, manifest_digest
from ..engine.model import Checkpoint
from ..engine.ports import ObjectStore

__all__ = ["open_sources", "read_manifest"]


def read_manifest(record: Checkpoint, tier: FileTier, objects: ObjectStore | None) -> Manifest:
    """The manifest that the record names, from the first tier that has it. `CorruptCheckpoint` says what was tried."""
    tried = []
    where = f"{record.path}/{MANIFEST_NAME}"
    for name in ("local", "remote"):
        try:
            if name == "local":
                raw = tier.read_json(where)
            elif objects is not None:
                raw = objects.get(where)
            else:
                raise NotFound("no object store is configured")
        except (NotFound, CorruptCheckpoint) as error:
            tried.append(f"{name}: {error}")
            continue
        if manifest_digest(raw) == record.manifest_digest:
            return decode_manifest(raw, where)
        tried.append(f"{name}: not the manifest that was recorded")
    raise CorruptCheckpoint(f"checkpoint {record.checkpoint}: no good manifest ({'; '.join(tried)})", where)


def open_sources(
    record: Checkpoint, tier: FileTier, objects: ObjectStore | None, cache: Path
) -> TieredSources:
    """Where the record's files are read: this host's directory, then the object store by way of `cache`."""
    return TieredSources(tier.path(record.path), objects, record.path, cache)
