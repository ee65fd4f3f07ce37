"""Storage for torch.distributed.checkpoint: plain `dcp.load` and `dcp.save` read and write our files
and manifest.

Tensors are safetensors shards; other objects are typed JSON in the manifest, so nothing is pickled.
"""

from __future__ import annotations

import io
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..engine.errors import CorruptCheckpoint, UnsupportedState
from ..engine.fetch import Sources
from ..engine.jsonstate import decode_state, encode_state
from ..engine.manifest import (
    Header,
    Part,
    TensorEntry,
    VersionVector,
    decode_manifest,
    decode_part,
    encode_json,
    merge_manifest,
)
from ..engine.pieces import Piece, dtype_of
from ..engine.reader import CheckpointReader
from ..engine.snapshot import Snapshotter
from ..engine.tensorfile import write_small_file

__all__ = ["SlackwaterReader", "SlackwaterWriter"]


class SlackwaterReader(StorageReader):
    """Reads the checkpoint in `directory` (with its `manifest.json`), at any world size and mesh.

    Every file that a rank needs is verified before its first byte is used. `strip` is removed from the
    front of the
    recorded names (`model/` loads a model's state dict as the trainer adapter saved it). Non-tensor
    objects are only offered when nothing is stripped.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, strip: str = "", sources: Sources | None = None
    ) -> None:
        self._directory = Path(directory)
        self._strip, self._sources = strip, sources
        self._reader: CheckpointReader | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageReader."""
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _opened(self) -> CheckpointReader:
        if self._reader is None:
            try:
                encoded = (self._directory / "manifest.json").read_bytes()
            except OSError as error:
                raise CorruptCheckpoint(f"{self._directory}/manifest.json: {error.strerror}") from error
            self._reader = CheckpointReader(
                decode_manifest(encoded), self._sources or Sources(self._directory)
            )
        return self._reader

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """See StorageReader."""
        reader = self._opened()
        found: dict[str, Any] = {}
        for name in sorted(reader.names):
            if name.startswith(self._strip):
                found[name.removeprefix(self._strip)] = _tensor_metadata(reader.entry(name))
        if not self._strip:
            found.update({name: BytesStorageMetadata() for name in reader.manifest.objects})
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See StorageReader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader. Verification of all files that the plan needs comes first."""
        reader = self._opened()
        items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        boxes = []
        for item in items:
            base = item.storage_index.offset or (0,) * len(item.lengths)
            start = tuple(a + b for a, b in zip(base, item.storage_offsets, strict=True))
            boxes.append((self._strip + item.storage_index.fqn, start, tuple(item.lengths)))
        reader.prepare(boxes)
        for item, (name, start, _) in zip(items, boxes, strict=True):
            target = planner.resolve_tensor(item).detach()
            dtype = dtype_of(reader.entry(name).dtype)
            if target.dtype == dtype:
                reader.read_into(name, target, start)
            else:  # the caller asked DCP for another dtype: this is its explicit cast
                own = torch.empty(target.shape, dtype=dtype)
                reader.read_into(name, own, start)
                target.copy_(own)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = decode_state(reader.manifest.objects[item.storage_index.fqn], reader.read)
                buffer = io.BytesIO()
                torch.save(value, buffer)  # in memory only: the planner takes objects in this form
                buffer.seek(0)
                planner.load_bytes(item, buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See StorageReader."""
        return (Path(checkpoint_id) / "manifest.json").is_file()


class SlackwaterWriter(StorageWriter):
    """Writes a DCP save as our files and manifest into `directory`, durable when the save returns.

    It is a checkpoint of no job: the record and its commit are the trainer adapter's. `directory` must
    be seen by all ranks, and must not hold a manifest yet.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._snapshotters: dict[str, Snapshotter] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageWriter."""
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # torch's name
        """See StorageWriter."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See StorageWriter; gives every rank its file prefix."""
        return [replace(plan, storage_data=f"r{rank:05d}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter."""
        prefix = str(plan.storage_data)
        snapshotter = self._snapshotters.setdefault(prefix, Snapshotter(prefix))
        pieces, objects = [], {}
        for item in plan.items:
            value = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn] = _typed(item.index.fqn, value)
            else:
                pieces.append(_piece(item, value))
        part = snapshotter.stage(pieces).write_part(
            self._directory,
            participant="dcp",
            rank=int(prefix[1:]),
            host=socket.gethostname(),
            objects=objects,
        )
        results = [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        if results:
            results[0] = WriteResult(results[0].index, results[0].size_in_bytes, encode_json(part))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002  # torch's name
        """See StorageWriter; the manifest is written last."""
        parts: list[Part] = [
            decode_part(result.storage_data)
            for rank in results
            for result in rank
            if result.storage_data is not None
        ]
        header = Header(
            job="dcp",
            job_uid="none",
            timeline=0,
            round=0,
            attempt="none",
            vector=VersionVector(training_step=0, weight_version=0, buffer_version=0),
            world_size=len(results),
        )
        write_small_file(self._directory / "manifest.json", encode_json(merge_manifest(header, parts)))

    def storage_meta(self) -> StorageMeta | None:
        """See StorageWriter."""
        return StorageMeta(checkpoint_id=str(self._directory))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See StorageWriter."""
        return not (Path(checkpoint_id) / "manifest.json").exists()


def _typed(name: str, value: Any) -> Any:
    """What the planner hands over for an object is its own serialised form; read it back without code
    in it.
    """
    if isinstance(value, io.BytesIO):
        value.seek(0)
        try:
            value = torch.load(value, weights_only=True)
        except Exception as error:  # the unpickler raises many kinds; all mean the same
            raise UnsupportedState(f"{name}: {error}", name) from error
    tensors: dict[str, Any] = {}
    encoded = encode_state(value, name, tensors)
    if tensors:
        raise UnsupportedState(f"{name}: tensors inside an object; give them names of their own", name)
    return encoded


def _piece(item: WriteItem, value: Any) -> Piece:
    data = item.tensor_data
    if data is None:
        raise UnsupportedState(f"{item.index.fqn}: a tensor without a shape", item.index.fqn)
    return Piece(item.index.fqn, value.detach(), tuple(data.size), tuple(data.chunk.offsets))


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(s.offsets), sizes=torch.Size(s.lengths))
            for s in entry.shards
        ],
    )
