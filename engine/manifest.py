"""The manifest: what one checkpoint consists of, as JSON that another program can read.

`encode` is canonical (sorted keys, no spaces), so the digest of its bytes names a checkpoint's content.
`decode` treats its input as hostile: bounded sizes, strict types, no path that leaves the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from .digest import CHUNK_BYTES, is_digest, sha256_text
from .errors import CorruptCheckpoint

__all__ = [
    "COMMITTED_NAME",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "Committed",
    "FileEntry",
    "Header",
    "Manifest",
    "Part",
    "ShardEntry",
    "TensorEntry",
    "VersionVector",
    "attempt_path",
    "check_path",
    "decode_json",
    "decode_manifest",
    "decode_part",
    "encode_json",
    "manifest_digest",
    "merge_manifest",
]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"  # written last of all that a checkpoint consists of
COMMITTED_NAME = "committed.json"  # beside it, once etcd has the record
MAX_MANIFEST_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 50
MAX_DIMENSIONS = 64
MAX_DEPTH = 128
_MAX_NAME = 4096
_SEGMENT = re.compile(r"[A-Za-z0-9_=+,@-][A-Za-z0-9._=+,@-]{0,199}")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: its path relative to the checkpoint's directory, its size and digest.

    `chunks` are CRC64NVMEs (16 hex digits) of consecutive pieces of `chunk_bytes`, the last one
    shorter; an uploader combines them into checksums of its parts without reading the file for it.
    """

    path: str
    size_bytes: int
    digest: str
    chunk_bytes: int = CHUNK_BYTES
    chunks: tuple[str, ...] = ()


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One box of a tensor: `lengths` elements at `offsets`, stored under `key` of a safetensors file.

    `packing` is "" (stored as it is), "raw" (its bytes in a flat U8 tensor, for dtypes that
    safetensors lacks) or "expand" (only the distinct values, of shape `stored`; broadcast to `lengths`).
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    packing: str = ""
    stored: tuple[int, ...] = ()


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One global tensor and the shards that tile it. `dtype` is torch's name for it, as in `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank of one participant wrote: the unit that travels to rank 0 before a manifest is made."""

    participant: str = "trainer"
    rank: int = 0
    host: str = ""
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    aliases: dict[str, str] = {}  # msgspec copies a default of an empty dict
    objects: dict[str, Any] = {}
    rank_objects: dict[str, Any] = {}


class PartSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who wrote which files, and where."""

    participant: str
    rank: int
    host: str
    files: tuple[str, ...]


class VersionVector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The consistent state that a checkpoint holds."""

    training_step: int
    weight_version: int
    buffer_version: int


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a manifest that do not come from the parts."""

    job: str
    job_uid: str
    timeline: int
    round: int
    attempt: str
    vector: VersionVector
    world_size: int
    step_map: dict[str, int] = {}
    sampling: dict[str, Any] = {}
    identity: dict[str, Any] = {}


class Manifest(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint. Files and tensors are sorted by path and name; `objects` are typed JSON (see
    jsonstate).

    `objects` hold what is the same on every rank, `rank_objects[rank]` what is each rank's own, such
    as its RNG.
    """

    format_version: int = FORMAT_VERSION
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    aliases: dict[str, str] = {}
    objects: dict[str, Any] = {}
    rank_objects: dict[str, dict[str, Any]] = {}
    parts: tuple[PartSummary, ...] = ()


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """`committed.json`: the record in etcd and its lineage, put beside the data after the commit."""

    checkpoint: int
    job: str
    job_uid: str
    timeline: int
    manifest_digest: str
    record: dict[str, Any] = {}
    lineage: tuple[dict[str, Any], ...] = ()


def encode_json(record: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. The same record always gives the same bytes."""
    return msgspec.json.encode(record, order="sorted")


def manifest_digest(encoded: bytes) -> str:
    """`sha256:<hex>` of an encoded manifest; this is what votes and checkpoint records carry."""
    return sha256_text(encoded)


def decode_json(data: bytes, kind: type[Any], what: str, limit_bytes: int = MAX_MANIFEST_BYTES) -> Any:
    """Decode bounded JSON into a record; `CorruptCheckpoint` names `what` when it is anything else."""
    if len(data) > limit_bytes:
        raise CorruptCheckpoint(f"{what}: {len(data)} bytes is above the limit of {limit_bytes}", what)
    _check_depth(data, what)
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{what}: not a valid {kind.__name__}: {error}", what) from error


def decode_manifest(data: bytes, what: str = "manifest.json") -> Manifest:
    """Decode and check a manifest: version, bounds, paths, digests, and that every shard fits its tensor."""
    manifest: Manifest = decode_json(data, Manifest, what)
    if manifest.format_version != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{what}: format_version {manifest.format_version}; this program reads {FORMAT_VERSION}", what
        )
    if not 0 < manifest.world_size <= 1 << 24:
        raise CorruptCheckpoint(f"{what}: world_size {manifest.world_size} is out of range", what)
    _check_content(manifest.files, manifest.tensors, manifest.aliases, what)
    return manifest


def decode_part(data: bytes, what: str = "part") -> Part:
    """Decode and check the list that one rank wrote."""
    part: Part = decode_json(data, Part, what)
    _check_content(part.files, part.tensors, part.aliases, what, partial=True)
    return part


def check_path(path: str, what: str = "path") -> str:
    """Return a relative path of plain segments unchanged; `CorruptCheckpoint` for anything that could
    leave its directory.
    """
    segments = path.split("/")
    if len(path) > 1024 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise CorruptCheckpoint(f"{what}: {path[:200]!r} is not a plain relative path", path[:200])
    return path


def attempt_path(header: Header) -> str:
    """`<job>/<job_uid>/t<T>/s<step>-r<round>-<attempt>`: the directory of an attempt, the same on both
    tiers.
    """
    name = f"s{header.vector.training_step}-r{header.round}-{header.attempt}"
    return check_path(f"{header.job}/{header.job_uid}/t{header.timeline}/{name}")


def merge_manifest(header: Header, parts: Iterable[Part]) -> Manifest:
    """Join what every rank wrote into one manifest. Pure; the order of `parts` does not matter.

    Raises `CorruptCheckpoint` when two ranks disagree on a tensor or an object, or shards do not tile
    a tensor.
    """
    ordered = sorted(parts, key=lambda part: (part.participant, part.rank))
    files = sorted((entry for part in ordered for entry in part.files), key=lambda entry: entry.path)
    aliases: dict[str, str] = {}
    objects: dict[str, Any] = {}
    ranks: dict[str, dict[str, Any]] = {}
    for part in ordered:
        _join(aliases, part.aliases, "alias")
        _join(objects, part.objects, "object")
        if part.rank_objects:
            _join(ranks.setdefault(str(part.rank), {}), part.rank_objects, f"object of rank {part.rank}")
    tensors = _merge_tensors(ordered, aliases)
    fields = {name: getattr(header, name) for name in Header.__struct_fields__}
    manifest = Manifest(
        **fields,
        files=tuple(files),
        tensors=tensors,
        aliases=aliases,
        objects=objects,
        rank_objects=ranks,
        parts=tuple(
            PartSummary(
                participant=p.participant, rank=p.rank, host=p.host, files=tuple(f.path for f in p.files)
            )
            for p in ordered
        ),
    )
    _check_content(manifest.files, manifest.tensors, manifest.aliases, "merged manifest")
    return manifest


def _join(into: dict[str, Any], other: Mapping[str, Any], what: str) -> None:
    for name, value in other.items():
        if name in into and encode_json(into[name]) != encode_json(value):
            raise CorruptCheckpoint(f"two ranks disagree on {what} {name!r}", name)
        into[name] = value


def _merge_tensors(parts: Sequence[Part], aliases: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    found: dict[str, TensorEntry] = {}
    shards: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], ShardEntry]] = {}
    for part in parts:
        for entry in part.tensors:
            if entry.name in aliases:
                continue  # an empty shard has no address, so its rank cannot see that the tensor is tied
            first = found.setdefault(entry.name, entry)
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise CorruptCheckpoint(
                    f"two ranks disagree on the dtype or shape of {entry.name!r}", entry.name
                )
            boxes = shards.setdefault(entry.name, {})
            for shard in entry.shards:
                boxes.setdefault((shard.offsets, shard.lengths), shard)
    return tuple(
        TensorEntry(
            name=name,
            dtype=found[name].dtype,
            shape=found[name].shape,
            shards=tuple(shards[name][box] for box in sorted(shards[name])),
        )
        for name in sorted(found)
    )


def _check_depth(data: bytes, what: str) -> None:
    """Refuse nesting that a recursive reader could not survive; cheap unless the text has many brackets."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    run = re.search(rb"(?:\[\s*){%d}|(?:\{\s*\"[^\"]{0,64}\"\s*:\s*){%d}" % (MAX_DEPTH, MAX_DEPTH), data)
    if run is not None:
        raise CorruptCheckpoint(f"{what}: nested deeper than {MAX_DEPTH}", what)


def _check_content(
    files: Sequence[FileEntry],
    tensors: Sequence[TensorEntry],
    aliases: Mapping[str, str],
    what: str,
    partial: bool = False,
) -> None:
    paths = set()
    for file in files:
        _check_file(file, what)
        if file.path in paths:
            raise CorruptCheckpoint(f"{what}: {file.path!r} is listed twice", file.path)
        paths.add(file.path)
    names = set()
    for tensor in tensors:
        if tensor.name in names:
            raise CorruptCheckpoint(f"{what}: tensor {tensor.name[:200]!r} is listed twice", what)
        names.add(tensor.name)
        _check_tensor(tensor, paths, what, partial)
    for name, owner in aliases.items():
        if not partial and (owner not in names or name in names):
            raise CorruptCheckpoint(f"{what}: alias {name[:200]!r} has no owner {owner[:200]!r}", what)


def _check_file(file: FileEntry, what: str) -> None:
    check_path(file.path, what)
    if not 0 <= file.size_bytes <= MAX_FILE_BYTES:
        raise CorruptCheckpoint(f"{what}: {file.path!r} claims {file.size_bytes} bytes", file.path)
    if not is_digest(file.digest):
        raise CorruptCheckpoint(f"{what}: {file.path!r} has no valid digest", file.path)
    if not 4096 <= file.chunk_bytes <= 1 << 32:
        raise CorruptCheckpoint(f"{what}: {file.path!r} has chunks of {file.chunk_bytes} bytes", file.path)
    if file.chunks:
        if len(file.chunks) != -(-file.size_bytes // file.chunk_bytes):
            raise CorruptCheckpoint(f"{what}: {file.path!r} lists {len(file.chunks)} chunks", file.path)
        if not all(is_digest("crc64nvme:" + chunk) for chunk in file.chunks):
            raise CorruptCheckpoint(f"{what}: {file.path!r} has a malformed chunk checksum", file.path)


def _check_tensor(tensor: TensorEntry, paths: set[str], what: str, partial: bool) -> None:
    label = tensor.name[:200]
    rank = len(tensor.shape)
    if not tensor.name or len(tensor.name) > _MAX_NAME or rank > MAX_DIMENSIONS:
        raise CorruptCheckpoint(f"{what}: tensor {label!r} has an impossible name or rank", what)
    total = _count(tensor.shape)
    if min(tensor.shape, default=0) < 0 or total > MAX_FILE_BYTES:
        raise CorruptCheckpoint(f"{what}: tensor {label!r} has an impossible shape", what)
    covered = 0
    for shard in tensor.shards:
        if shard.file not in paths:
            raise CorruptCheckpoint(
                f"{what}: tensor {label!r} names the unknown file {shard.file[:200]!r}", what
            )
        if (
            len(shard.offsets) != rank
            or len(shard.lengths) != rank
            or shard.packing not in ("", "raw", "expand")
        ):
            raise CorruptCheckpoint(f"{what}: tensor {label!r} has a malformed shard", what)
        for offset, length, size in zip(shard.offsets, shard.lengths, tensor.shape, strict=True):
            if offset < 0 or length < 0 or offset + length > size:
                raise CorruptCheckpoint(f"{what}: a shard of {label!r} lies outside the tensor", what)
        if any(size < 0 for size in shard.stored) or len(shard.stored) > MAX_DIMENSIONS:
            raise CorruptCheckpoint(f"{what}: tensor {label!r} has a malformed shard", what)
        covered += _count(shard.lengths)
    if not partial and covered != total:
        raise CorruptCheckpoint(f"{what}: the shards of {label!r} hold {covered} of {total} elements", what)
    if not partial and len(tensor.shards) > 1 and _overlap(tensor.shards):
        raise CorruptCheckpoint(f"{what}: shards of {label!r} overlap", what)


def _count(lengths: Sequence[int]) -> int:
    total = 1
    for length in lengths:
        total *= length
    return total


def _overlap(shards: Sequence[ShardEntry]) -> bool:
    """Whether two boxes share an element: a sweep along the dimension that separates most of them."""
    boxes = [(s.offsets, s.lengths) for s in shards if _count(s.lengths)]
    if not boxes:
        return False
    dim = max(range(len(boxes[0][0])), key=lambda d: len({b[0][d] for b in boxes}), default=None)
    if dim is None:
        return len(boxes) > 1
    boxes.sort(key=lambda b: b[0][dim])
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in boxes:
        active = [a for a in active if a[0][dim] + a[1][dim] > box[0][dim]]
        if any(_boxes_meet(a, box) for a in active):
            return True
        active.append(box)
    return False


def _boxes_meet(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(ao < bo + bl and bo < ao + al for ao, al, bo, bl in zip(a[0], a[1], b[0], b[1], strict=True))
