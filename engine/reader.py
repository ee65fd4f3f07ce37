"""Read tensors of a checkpoint, any box of any tensor, after every file that is needed has been verified."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .digest import combine_crcs, crc64nvme, crc_text
from .errors import CorruptCheckpoint, SlackwaterError
from .fetch import Sources
from .manifest import FileEntry, Manifest, ShardEntry, TensorEntry
from .pieces import dtype_of, unpack

__all__ = ["Box", "CheckpointReader", "VerifiedFile"]

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offsets, lengths


class VerifiedFile:
    """A safetensors file, mapped privately and checked against its entry. Close it after the last
    tensor is used.

    Raises `CorruptCheckpoint` when size, digest or header are not what was recorded.
    """

    def __init__(self, path: Path, entry: FileEntry, workers: int = 2) -> None:
        self.entry = entry
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size != entry.size_bytes or size < 8:
                    raise CorruptCheckpoint(f"{path}: {size} bytes, recorded {entry.size_bytes}", entry.path)
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: unreadable: {error.strerror}", entry.path) from error
        self.view = memoryview(self._map)
        try:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_SEQUENTIAL)
            self._verify(path, workers)
            self._slots, self._data = self._header(path)
        except BaseException:
            self.close()
            raise

    def _verify(self, path: Path, workers: int) -> None:
        entry = self.entry
        step = entry.chunk_bytes
        pieces = [self.view[at : at + step] for at in range(0, entry.size_bytes, step)]
        with ThreadPoolExecutor(workers, "slackwater-verify") as pool:
            crcs = list(pool.map(crc64nvme, pieces))
        for number, (found, recorded) in enumerate(zip(crcs, entry.chunks, strict=False)):
            if f"{found:016x}" != recorded:
                raise CorruptCheckpoint(f"{path}: wrong checksum in the chunk at {number * step}", entry.path)
        if entry.digest.startswith("sha256:"):
            whole = "sha256:" + hashlib.sha256(self.view).hexdigest()
        else:
            whole = crc_text(combine_crcs((c, len(p)) for c, p in zip(crcs, pieces, strict=True)))
        if whole != entry.digest:
            raise CorruptCheckpoint(f"{path}: digest {whole}, recorded {entry.digest}", entry.path)

    def _header(self, path: Path) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self.view[:8], "little")
        if length > min(100_000_000, self.entry.size_bytes - 8):
            raise CorruptCheckpoint(f"{path}: a header of {length} bytes", self.entry.path)
        try:
            header = json.loads(bytes(self.view[8 : 8 + length]))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{path}: the header is not JSON", self.entry.path) from error
        if not isinstance(header, dict):
            raise CorruptCheckpoint(f"{path}: the header is not an object", self.entry.path)
        return header, 8 + length

    def tensor(self, shard: ShardEntry, dtype: torch.dtype) -> torch.Tensor:
        """The stored box; a view of the mapped file where possible, so do not write to it."""
        try:
            begin, end = self._slots[shard.key]["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CorruptCheckpoint(f"{self.entry.path}: no tensor {shard.key!r}", self.entry.path) from None
        if not (isinstance(begin, int) and isinstance(end, int)):
            raise CorruptCheckpoint(f"{self.entry.path}: bad offsets of {shard.key!r}", self.entry.path)
        if not 0 <= begin <= end <= self.entry.size_bytes - self._data:
            raise CorruptCheckpoint(
                f"{self.entry.path}: {shard.key!r} lies outside the file", self.entry.path
            )
        return unpack(
            self.view[self._data + begin : self._data + end],
            dtype,
            shard.lengths,
            shard.packing,
            shard.stored,
        )

    def close(self) -> None:
        """Unmap, once no tensor looks at the file any more; idempotent."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class CheckpointReader:
    """Reads one checkpoint from the copies that `sources` offers. Use as a context manager, or close it.

    `used` says which tier each file came from, and why others were passed over.
    """

    def __init__(self, manifest: Manifest, sources: Sources, *, workers: int = 2) -> None:
        self.manifest = manifest
        self.used: dict[str, str] = {}
        self._sources, self._workers = sources, workers
        self._tensors = {entry.name: entry for entry in manifest.tensors}
        self._entries = {entry.path: entry for entry in manifest.files}
        self._open: dict[str, VerifiedFile] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> frozenset[str]:
        """Every name of a tensor, aliases included."""
        return frozenset(self._tensors) | frozenset(self.manifest.aliases)

    def owner(self, name: str) -> str:
        """The name under which a tensor's bytes are stored."""
        return self.manifest.aliases.get(name, name)

    def entry(self, name: str) -> TensorEntry:
        """The record of a tensor; KeyError when the checkpoint has none of that name."""
        return self._tensors[self.owner(name)]

    def prepare(self, boxes: Iterable[Box]) -> None:
        """Fetch and verify every file that any of `boxes` touches, and find every tensor in them.

        After it `read_into` for these boxes does nothing but copy: only the device's memory, or a disk that no
        longer gives back what it just gave, can still fail. `CorruptCheckpoint` lists what was tried.
        """
        needed: dict[str, list[tuple[ShardEntry, str]]] = {}
        for name, offsets, lengths in boxes:
            entry = self.entry(name)
            for shard in entry.shards:
                if _meet(offsets, lengths, shard.offsets, shard.lengths) is not None:
                    needed.setdefault(shard.file, []).append((shard, entry.dtype))
        for path in sorted(needed):
            file = self.file(path)
            for shard, dtype in needed[path]:
                file.tensor(shard, dtype_of(dtype))

    def file(self, path: str) -> VerifiedFile:
        """The verified file of a recorded path, from the first copy that is good."""
        if path not in self._open:
            self._open[path] = self._first_good(self._entries[path])
        return self._open[path]

    def _first_good(self, entry: FileEntry) -> VerifiedFile:
        reasons = []
        try:
            for tier, path in self._sources.copies(entry):
                try:
                    opened = VerifiedFile(path, entry, self._workers)
                except CorruptCheckpoint as error:
                    reasons.append(f"{tier}: {error}")
                    continue
                self.used[entry.path] = "; ".join([tier, *reasons])
                return opened
        except SlackwaterError as error:
            reasons.append(f"remote: {error}")
            raise CorruptCheckpoint(
                f"{entry.path}: no good copy ({'; '.join(reasons)})", entry.path
            ) from error
        raise CorruptCheckpoint(f"{entry.path}: no good copy ({'; '.join(reasons) or 'missing'})", entry.path)

    def read_into(self, name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fill `target` (any device, any strides) with the box of its shape at `offsets` of the tensor
        `name`.
        """
        entry = self.entry(name)
        dtype = dtype_of(entry.dtype)
        if target.dtype != dtype:
            raise ValueError(f"{name}: {target.dtype} cannot take {dtype}; a cast must be asked for")
        lengths = tuple(target.shape)
        with torch.no_grad():
            for shard in entry.shards:
                box = _meet(offsets, lengths, shard.offsets, shard.lengths)
                if box is None:
                    continue
                source = self.file(shard.file).tensor(shard, dtype)
                into = target.detach()
                for dim, (start, length) in enumerate(zip(*box, strict=True)):
                    source = source.narrow(dim, start - shard.offsets[dim], length)
                    into = into.narrow(dim, start - offsets[dim], length)
                _copy(into, source)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, in new CPU memory."""
        entry = self.entry(name)
        made = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        self.read_into(name, made, (0,) * len(entry.shape))
        return made

    def close(self) -> None:
        """Unmap all files; idempotent."""
        opened, self._open = self._open, {}
        for file in opened.values():
            file.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.is_contiguous() and target.is_contiguous() and target.device.type == "cpu":
        import ctypes

        if source.numel():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        return
    target.copy_(source)


def _meet(
    a_offsets: Sequence[int], a_lengths: Sequence[int], b_offsets: Sequence[int], b_lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The common box of two boxes as (offsets, lengths), None when they share no element."""
    starts, lengths = [], []
    for ao, al, bo, bl in zip(a_offsets, a_lengths, b_offsets, b_lengths, strict=True):
        start, end = max(ao, bo), min(ao + al, bo + bl)
        if end <= start:
            return None
        starts.append(start)
        lengths.append(end - start)
    return tuple(starts), tuple(lengths)
