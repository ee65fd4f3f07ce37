"""Export a trainer's parameters as a weight image: whole tensors, under the names that an engine loads.

    record = export_image(model, directory, hf_files=read_hf_files(base), dtype=torch.bfloat16, rank=rank)

Sharded tensors are gathered one at a time, so every rank calls this; only the writer's rank keeps and writes them.
"""

from __future__ import annotations

import collections
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.digest import digest_bytes
from ..engine.errors import CorruptCheckpoint, StateMismatch, UnsupportedState
from ..engine.image import IMAGE_NAME, Image, ImageRecord, ImageTensor
from ..engine.layout import FILE_LIMIT_BYTES, plan_layout
from ..engine.manifest import FileEntry, check_path, encode_json
from ..engine.pieces import Piece, dtype_name, form_of
from ..engine.tensorfile import FileSystem, named_error, write_file, write_small_file
from .modelstate import ModelState

__all__ = ["export_image", "export_model", "read_hf_files", "write_image"]

_TIED_HEAD = "lm_head.weight"
_HF_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
_HF_FILE_LIMIT_BYTES = 256 << 20
_INDEX_NAME = "model.safetensors.index.json"

Named = tuple[str, torch.Tensor]


def export_model(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    tie_word_embeddings: bool | None = None,
    rank: int = 0,
    writer: int = 0,
) -> Iterator[Named]:
    """Yield (name, whole tensor) of every parameter and persistent buffer, one at a time, detached.

    Every rank runs it to its end; it yields on the writer's rank alone. Floating point values are cast to
    `dtype`, if given, and to nothing else. With tied word embeddings (default: what `model.config` says) the
    output head is left out. Other names of one parameter are yielded each, unless the model's class says that
    they are tied. A yielded tensor may be the live one: copy or write it before training goes on.
    Raises `StateMismatch` when the head should be tied and is a parameter of its own, `UnsupportedState` for meta.
    """
    state = ModelState(model)
    left_out = {f"model/{name}" for name in _left_out(state, tie_word_embeddings)}
    aliases = state.ties()
    for unit in state.units:
        others = {owner: [a for a, b in aliases.items() if b == owner] for owner in aliases.values()}
        for name, whole in unit.gathered(dtype):
            for one in (f"model/{name}", *others.get(f"model/{name}", ())):
                if rank == writer and one not in left_out:
                    yield one.removeprefix("model/"), whole
    for name, value in state.items():
        if name in left_out or not name.startswith("model/") or not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            raise UnsupportedState(f"{name}: a meta tensor has no values to export", name)
        cast = value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()
        whole = _gathered(cast)
        if rank == writer:
            yield name.removeprefix("model/"), whole


def export_image(
    model: nn.Module,
    directory: Path | None,
    *,
    hf_files: Mapping[str, bytes],
    rank: int = 0,
    writer: int = 0,
    info: Mapping[str, Any] | None = None,
    **options: Any,
) -> ImageRecord | None:
    """`export_model` into `write_image`; the record on the writer's rank, None on the others.

    Every rank calls it. When writing fails the collectives still run to their end, then the writer raises;
    telling the other ranks is the caller's business.
    """
    tensors = export_model(model, rank=rank, writer=writer, **options)
    if rank != writer:
        collections.deque(tensors, maxlen=0)
        return None
    if directory is None:
        raise ValueError("the writer's rank needs a directory")
    return write_image(directory, tensors, hf_files, info=info)


def write_image(
    directory: Path,
    tensors: Iterator[Named],
    hf_files: Mapping[str, bytes],
    *,
    info: Mapping[str, Any] | None = None,
    file_limit_bytes: int = FILE_LIMIT_BYTES,
    files: FileSystem | None = None,
) -> ImageRecord:
    """Write a model directory, durable, `image.json` last; return its record. Blocks; `directory` is new or empty.

    One `model.safetensors`, or numbered files with Hugging Face's index above `file_limit_bytes`; memory is twice
    one file. `tensors` is always run to its end. Raises `Conflict`, `NoSpace`, `StoreError`, `UnsupportedState`.
    What was written before an error stays, without `image.json`: whoever made the directory removes it.
    """
    try:
        writer = _ImageWriter(directory, files or FileSystem(), file_limit_bytes)
        return writer.write(tensors, hf_files, dict(info or {}))
    finally:
        collections.deque(tensors, maxlen=0)  # other ranks may be waiting in a collective


def read_hf_files(directory: Path) -> dict[str, bytes]:
    """The small files of a model directory that belong beside weights: configuration and tokenizer."""
    found = {}
    for path in sorted(directory.iterdir()):
        weights = path.name.endswith(".index.json") or path.name == IMAGE_NAME
        if path.is_file() and path.suffix in _HF_SUFFIXES and not weights:
            if path.stat().st_size > _HF_FILE_LIMIT_BYTES:
                raise UnsupportedState(f"{path}: too large for a configuration or tokenizer file", path.name)
            found[path.name] = path.read_bytes()
    return found


class _ImageWriter:
    def __init__(self, directory: Path, files: FileSystem, file_limit_bytes: int) -> None:
        self._directory, self._files, self._limit = directory, files, file_limit_bytes
        self._entries: list[FileEntry] = []
        self._tensors: list[ImageTensor] = []

    def write(
        self, tensors: Iterator[Named], hf_files: Mapping[str, bytes], info: dict[str, Any]
    ) -> ImageRecord:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._files.sync_directory(self._directory.parent)
        except OSError as error:
            raise named_error(error, self._directory) from error
        for name, data in hf_files.items():
            self._small(_hf_name(name), data)
        group: list[Piece] = []
        size_bytes = 0
        for name, tensor in tensors:
            piece = Piece.of(name, tensor.cpu().contiguous())
            if group and size_bytes + tensor.nbytes > self._limit:
                self._write_group(group, numbered=True)
                group, size_bytes = [], 0
            group.append(piece)
            size_bytes += tensor.nbytes
        split = bool(self._tensors)
        self._write_group(group, numbered=split)
        if split:
            files = {tensor.name: tensor.file for tensor in self._tensors}
            self._small(_INDEX_NAME, encode_json({"metadata": {}, "weight_map": files}))
        image = Image(
            files=tuple(sorted(self._entries, key=lambda entry: entry.path)),
            tensors=tuple(sorted(self._tensors, key=lambda tensor: tensor.name)),
            info=info,
        )
        write_small_file(self._directory / IMAGE_NAME, encode_json(image), files=self._files)
        return ImageRecord.of(image)

    def _small(self, name: str, data: bytes) -> None:
        write_small_file(self._directory / name, data, files=self._files)
        self._entries.append(FileEntry(path=name, size_bytes=len(data), digest=digest_bytes(data)))

    def _write_group(self, group: list[Piece], *, numbered: bool) -> None:
        if not group:
            raise UnsupportedState("the model has no parameters to export", "model")
        name = f"model-{len(self._entries):05d}.safetensors" if numbered else "model.safetensors"
        forms = [form_of(piece) for piece in group]
        for piece, form in zip(group, forms, strict=True):
            if form.packing:
                raise UnsupportedState(f"{piece.name}: safetensors has no {piece.tensor.dtype}", piece.name)
        total = sum(form.item.size_bytes for form in forms)
        layout = plan_layout([form.item for form in forms], "model", file_limit_bytes=total + 1)
        if len(layout.files) != 1:
            raise UnsupportedState(f"{len(group)} tensors have too long a safetensors header", name)
        file = layout.files[0]
        memory = mmap.mmap(-1, layout.arena_bytes)
        memory[: len(file.header)] = file.header
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for slot in file.slots:
            source = group[slot.index].tensor
            if slot.key != group[slot.index].name:
                raise UnsupportedState(f"{slot.key}: the name occurs twice", slot.key)
            target = whole[slot.offset : slot.offset + slot.size_bytes].view(source.dtype).view(source.shape)
            target.copy_(source)
        view = memoryview(memory)
        entry = write_file(self._directory, name, view, file.size_bytes, files=self._files)
        self._entries.append(entry)
        self._tensors += [
            ImageTensor(name=p.name, dtype=dtype_name(p.tensor.dtype), shape=p.shape, file=name)
            for p in group
        ]


def _hf_name(name: str) -> str:
    check_path(name)
    if "/" in name or name in (IMAGE_NAME, _INDEX_NAME) or name.endswith(".safetensors"):
        raise CorruptCheckpoint(f"{name!r} cannot be a file beside the weights", name)
    return name


def _left_out(state: ModelState, tie_word_embeddings: bool | None) -> set[str]:
    """Names that the engine derives from others. Checked against the module: a tie on paper only is an error."""
    if tie_word_embeddings is None:
        tie_word_embeddings = bool(
            getattr(getattr(state.model, "config", None), "tie_word_embeddings", False)
        )
    if not tie_word_embeddings:
        return set()
    declared = getattr(state.model, "all_tied_weights_keys", None)
    wanted = {_TIED_HEAD, *(declared if isinstance(declared, Mapping) else ())}
    ties = state.ties()
    tied = {name.removeprefix("model/") for pair in ties.items() for name in pair}
    present = {name.removeprefix("model/") for name, _ in state.items()}
    for name in sorted((wanted & present) - tied):
        raise StateMismatch(f"{name}: tied by the configuration, but a parameter of its own", changed=[name])
    return wanted & present


def _gathered(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)  # a DTensor's; a collective
    whole: torch.Tensor = full() if full is not None else value
    return whole
