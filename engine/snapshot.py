"""Snapshot tensors into staging memory that already has the layout of the files, and write it from a
background thread.

`Snapshotter.stage` is the only part that training waits for. The plan (order, offsets, addresses) is
made once and
only checked at later saves; CPU tensors are copied like all others, so the trainer may update in place
at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from .arena import Arena, ArenaPool
from .layout import FILE_LIMIT_BYTES, HEADER_LIMIT_BYTES, Layout, plan_layout
from .manifest import FileEntry, Part, ShardEntry, TensorEntry, check_path
from .pieces import Form, Piece, distinct, dtype_name, form_of
from .tensorfile import FileSystem, write_file

__all__ = ["Snapshotter", "Staged"]

_SMALL_BYTES = 256 << 10
_move_holding_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)
Signature = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device, bool]
Move = tuple[int, int, int]  # offset in the arena, source address, bytes


@dataclass(frozen=True, slots=True)
class _Plan:
    """Layout of one structure. Holds no tensor: addresses are checked against the pieces at every save."""

    layout: Layout
    names: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    owners: tuple[int, ...]  # index of the piece of each stored item
    packings: tuple[str, ...]
    entries: tuple[TensorEntry, ...]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Moves:
    """How to copy pieces of exactly these signatures: big and small plain memory, and what torch has
    to copy.
    """

    signatures: list[Signature]
    big: tuple[Move, ...]
    small: tuple[Move, ...]
    strided: tuple[tuple[int, int, str], ...]  # offset in the arena, index of the piece, packing


class Snapshotter:
    """Stages one rank's pieces. Not thread-safe: one trainer thread calls `stage`; writes may run beside it.

    `prefix` begins this rank's file names (`r00003` gives `r00003-000.safetensors`); `folder` is put
    before them in
    the recorded paths. At most `arenas` snapshots exist at a time. Close it after the last write.
    """

    def __init__(
        self,
        prefix: str = "r00000",
        *,
        folder: str = "",
        arenas: int = 2,
        pin: bool | None = None,
        file_limit_bytes: int = FILE_LIMIT_BYTES,
        header_limit_bytes: int = HEADER_LIMIT_BYTES,
        digest: str = "crc64nvme",
        files: FileSystem | None = None,
    ) -> None:
        self._prefix = check_path(prefix)
        self._folder = check_path(folder) + "/" if folder else ""
        self._limits = (file_limit_bytes, header_limit_bytes)
        self._pool = ArenaPool(arenas, pin=torch.cuda.is_available() if pin is None else pin)
        self._plan: _Plan | None = None
        self._moves: _Moves | None = None
        self.digest = digest
        self.files = files or FileSystem()
        self.plans_made = 0

    def estimate_bytes(self, pieces: Sequence[Piece]) -> int:
        """Bytes that a save of `pieces` needs on disk, before anything is staged."""
        return self._planned(pieces)[0].layout.arena_bytes

    def stage(self, pieces: Sequence[Piece], aliases: Mapping[str, str] | None = None) -> Staged:
        """Copy all pieces; when this returns they may be changed. Blocks for one memory copy.

        Raises `UnsupportedState` (naming a tensor, nothing copied) or `StagingBusy` (two snapshots are
        in flight).
        """
        plan, moves = self._planned(pieces)
        arena = self._pool.take(plan.layout.arena_bytes)
        try:
            _fill(plan, moves, pieces, arena)
        except BaseException:
            self._pool.give_back(arena)
            raise
        return Staged(self, plan, arena, {**plan.aliases, **(aliases or {})})

    def close(self) -> None:
        """Free the staging memory that no write uses any more."""
        self._pool.close()
        self._plan = self._moves = None

    def _planned(self, pieces: Sequence[Piece]) -> tuple[_Plan, _Moves]:
        names = tuple((piece.name, piece.shape, piece.offsets) for piece in pieces)
        signatures = [_signature(piece.tensor) for piece in pieces]
        plan, moves = self._plan, self._moves
        if plan is None or moves is None or not _same_structure(plan, moves, names, signatures, pieces):
            self.plans_made += 1
            plan, moves = self._make_plan(pieces, names, signatures), None
        if moves is None or moves.signatures != signatures:
            moves = _plan_moves(plan, pieces, signatures)
        self._plan, self._moves = plan, moves
        return plan, moves

    def _make_plan(self, pieces: Sequence[Piece], names: Any, signatures: list[Signature]) -> _Plan:
        owners, aliases = _owners(pieces, signatures)
        forms = [form_of(pieces[index]) for index in owners]
        file_limit, header_limit = self._limits
        layout = plan_layout(
            [form.item for form in forms],
            self._prefix,
            file_limit_bytes=file_limit,
            header_limit_bytes=header_limit,
        )
        entries = _joined(
            _entry(pieces[owners[slot.index]], forms[slot.index], self._folder + file.name, slot.key)
            for file in layout.files
            for slot in file.slots
        )
        packings = tuple(form.packing for form in forms)
        return _Plan(layout, names, tuple(owners), packings, entries, aliases)

    def _written(self, arena: Arena) -> None:
        self._pool.give_back(arena)

    def path_of(self, name: str) -> str:
        """The recorded path of one of our files."""
        return self._folder + name


class Staged:
    """One snapshot in staging memory. Call `write` once, in any thread, or `release` to drop it."""

    def __init__(self, snapshotter: Snapshotter, plan: _Plan, arena: Arena, aliases: dict[str, str]) -> None:
        self._owner = snapshotter
        self._plan = plan
        self._arena: Arena | None = arena
        self.aliases = aliases
        self.size_bytes = sum(file.size_bytes for file in plan.layout.files)

    def write(self, directory: Path) -> tuple[list[FileEntry], list[TensorEntry]]:
        """Write the files into `directory` (which exists), durable, then give the memory back.

        After a failure files that were already complete are removed too. Raises `NoSpace`, `Conflict`,
        `StoreError`.
        """
        if self._arena is None:
            raise ValueError("this snapshot was already written or released")
        written: list[FileEntry] = []
        done: list[Path] = []
        try:
            for file in self._plan.layout.files:
                padded = -(-file.size_bytes // 4096) * 4096
                entry = write_file(
                    directory,
                    file.name,
                    self._arena.view[file.start : file.start + padded],
                    file.size_bytes,
                    path=self._owner.path_of(file.name),
                    digest=self._owner.digest,
                    files=self._owner.files,
                )
                done.append(directory / file.name)
                written.append(entry)
        except BaseException:
            for path in done:
                path.unlink(missing_ok=True)
            raise
        finally:
            self.release()
        return written, list(self._plan.entries)

    def write_part(self, directory: Path, **fields: Any) -> Part:
        """`write`, as the `Part` that a manifest is merged from; `fields` are its rank, host, objects, …"""
        files, tensors = self.write(directory)
        return Part(files=tuple(files), tensors=tuple(tensors), aliases=self.aliases, **fields)

    def release(self) -> None:
        """Give the staging memory back unwritten; idempotent."""
        arena, self._arena = self._arena, None
        if arena is not None:
            self._owner._written(arena)


def _signature(tensor: torch.Tensor) -> Signature:
    return (
        tensor.data_ptr() if tensor.layout is torch.strided else 0,
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.device,
        tensor.is_conj() or tensor.is_neg(),
    )


def _same_structure(
    plan: _Plan, moves: _Moves, names: Any, signatures: list[Signature], pieces: Sequence[Piece]
) -> bool:
    """Whether the layout still fits, even where memory has moved."""
    if plan.names != names:
        return False
    if moves.signatures == signatures:
        return True
    if any(old[1:] != new[1:] for old, new in zip(moves.signatures, signatures, strict=True)):
        return False
    owners, aliases = _owners(pieces, signatures)
    return tuple(owners) == plan.owners and aliases == plan.aliases


def _plan_moves(plan: _Plan, pieces: Sequence[Piece], signatures: list[Signature]) -> _Moves:
    big: list[Move] = []
    small: list[Move] = []
    strided = []
    for file in plan.layout.files:
        for slot in file.slots:
            index = plan.owners[slot.index]
            tensor = pieces[index].tensor
            if not slot.size_bytes:
                continue
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not signatures[index][5]:
                move = (slot.offset, tensor.data_ptr(), slot.size_bytes)
                (small if slot.size_bytes <= _SMALL_BYTES else big).append(move)
            else:
                strided.append((slot.offset, index, plan.packings[slot.index]))
    return _Moves(signatures, tuple(big), tuple(small), tuple(strided))


def _owners(pieces: Sequence[Piece], signatures: Sequence[Signature]) -> tuple[list[int], dict[str, str]]:
    """Indexes of the pieces to store, and name -> owner for those that are the same memory as an
    earlier one.
    """
    seen: dict[Any, int] = {}
    owners, aliases = [], {}
    for index, (piece, signature) in enumerate(zip(pieces, signatures, strict=True)):
        key = (signature, piece.shape, piece.offsets) if signature[0] and piece.tensor.numel() else index
        first = seen.setdefault(key, index)
        if first == index:
            owners.append(index)
        else:
            aliases[piece.name] = pieces[first].name
    return owners, aliases


def _entry(piece: Piece, form: Form, path: str, key: str) -> TensorEntry:
    shard = ShardEntry(
        file=path,
        key=key,
        offsets=piece.offsets,
        lengths=tuple(piece.tensor.shape),
        packing=form.packing,
        stored=form.item.shape if form.packing == "expand" else (),
    )
    return TensorEntry(
        name=piece.name, dtype=dtype_name(piece.tensor.dtype), shape=piece.shape, shards=(shard,)
    )


def _joined(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """One entry a name: a rank may hold several boxes of one tensor."""
    found: dict[str, TensorEntry] = {}
    for entry in entries:
        first = found.get(entry.name)
        if first is not None:
            entry = msgspec.structs.replace(first, shards=first.shards + entry.shards)
        found[entry.name] = entry
    return tuple(found.values())


def _fill(plan: _Plan, moves: _Moves, pieces: Sequence[Piece], arena: Arena) -> None:
    base = arena.address
    for file in plan.layout.files:
        arena.view[file.start : file.start + len(file.header)] = file.header
    devices = set()
    if moves.strided:
        whole = torch.frombuffer(arena.view, dtype=torch.uint8)
        for offset, index, packing in moves.strided:
            source = pieces[index].tensor.detach()
            if packing == "expand":
                source = distinct(source)
            target = whole[offset : offset + source.numel() * source.element_size()].view(source.dtype)
            on_device = source.device.type != "cpu"
            target.view(source.shape).copy_(source, non_blocking=on_device and arena.pinned)
            if on_device:
                devices.add(source.device)
    for offset, address, size_bytes in moves.big:
        ctypes.memmove(base + offset, address, size_bytes)
    for offset, address, size_bytes in moves.small:
        _move_holding_gil(base + offset, address, size_bytes)
    for device in devices:
        torch.accelerator.synchronize(device)
