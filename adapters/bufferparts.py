"""The experience buffer's part of a checkpoint on this host's local tier, and where it is found again."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..engine.digest import digest_file, sha256_text
from ..engine.errors import CorruptCheckpoint, SlackwaterError
from ..engine.filetier import FileTier
from ..engine.manifest import FileEntry, Manifest, Part, check_path, encode_json
from ..engine.model import Checkpoint
from ..engine.ports import ObjectStore
from ..engine.samples import BufferPart
from .trainer_manifest import open_sources, read_manifest

__all__ = ["PART_NAME", "TieredParts"]

PART_NAME = "part-buffer.json"
_FOLDER = "buffer"
_OBJECT = "buffer/part"


class TieredParts:
    """`BufferParts` on a local tier, with an object store behind it for what is not here any more."""

    def __init__(self, tier: FileTier, objects: ObjectStore | None) -> None:
        self._tier, self._objects = tier, objects

    def directory(self, path: str) -> Path:
        """The directory for the buffer's files of an attempt; made durable."""
        self._tier.create(path)
        directory = self._tier.path(f"{path}/{_FOLDER}")
        directory.mkdir(exist_ok=True)
        self._tier.files.sync_directory(directory.parent)
        return directory

    def store(self, path: str, part: BufferPart) -> tuple[str, int, int]:
        """Write the list beside the files; (its digest, bytes, number of files)."""
        files = tuple(
            FileEntry(
                path=f"{_FOLDER}/{check_path(file.name)}", size_bytes=file.size_bytes, digest=file.digest
            )
            for file in part.files
        )
        record = Part(
            participant="buffer",
            host=socket.gethostname(),
            files=files,
            rank_objects={_OBJECT: msgspec.to_builtins(part)},
        )
        encoded = encode_json(record)
        self._tier.write_json(f"{path}/{PART_NAME}", encoded)
        return sha256_text(encoded), sum(file.size_bytes for file in files), len(files)

    def load(self, checkpoint: Checkpoint) -> tuple[Path, BufferPart] | None:
        """See `BufferParts.load`; files that are not here (or not good) come from the object store into `.fetch`."""
        manifest = read_manifest(checkpoint, self._tier, self._objects)
        part = _part_of(manifest)
        if part is None:
            return None
        cache = self._tier.root / ".fetch" / "buffer" / checkpoint.manifest_digest.partition(":")[2][:16]
        sources = open_sources(checkpoint, self._tier, self._objects, cache)
        entries = {entry.path: entry for entry in manifest.files}
        found: dict[Path, None] = {}
        for file in part.files:
            entry = entries.get(f"{_FOLDER}/{file.name}")
            if entry is None or entry.digest != file.digest:
                raise CorruptCheckpoint(
                    f"the manifest does not list the buffer's file {file.name}", file.name
                )
            found[_good_copy(sources.copies(entry), entry).parent] = None
        if len(found) > 1:
            # Some are here and some were fetched: the buffer wants one directory.
            directory = cache / _FOLDER
            for file in part.files:
                entry = entries[f"{_FOLDER}/{file.name}"]
                if not (directory / file.name).is_file():
                    source = self._tier.path(f"{checkpoint.path}/{entry.path}")
                    directory.mkdir(parents=True, exist_ok=True)
                    (directory / file.name).hardlink_to(source)
            return directory, part
        return next(iter(found), self._tier.path(f"{checkpoint.path}/{_FOLDER}")), part


def _part_of(manifest: Manifest) -> BufferPart | None:
    objects: Mapping[str, Any] = manifest.rank_objects.get("0", {})
    if _OBJECT not in objects:
        return None
    try:
        return msgspec.convert(objects[_OBJECT], BufferPart)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"the manifest's record of the buffer is not valid: {error}") from error


def _good_copy(copies: Any, entry: FileEntry) -> Path:
    tried = []
    try:
        for tier, path in copies:
            size, digest = digest_file(path, entry.digest.split(":", 1)[0])
            if (size, digest) == (entry.size_bytes, entry.digest):
                return Path(path)
            tried.append(f"{tier}: {size} bytes of digest {digest}")
    except (SlackwaterError, OSError) as error:
        tried.append(str(error))
    raise CorruptCheckpoint(f"{entry.path}: no good copy ({'; '.join(tried) or 'missing'})", entry.path)
