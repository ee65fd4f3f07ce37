"""A model's tensors under canonical names, whatever wraps it: plain, DDP, FSDP2 (DTensor), FSDP1, compile."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from ..engine.errors import StateMismatch, UnsupportedState
from ..engine.pieces import Piece, dtype_name
from ..engine.reader import CheckpointReader
from .flatshard import FlatShard, FlatSlot, FlatUnit, canonical_name, flat_units

__all__ = ["ModelState", "Problems", "Value", "local_pieces", "written_pieces"]

Value = torch.Tensor | FlatShard


class ModelState:
    """Reads a model; holds a reference only. Nothing here makes a collective."""

    def __init__(self, model: nn.Module, world_size: int = 1) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.units: list[FlatUnit] = flat_units(self.model, world_size)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor, `FlatShard` or object of extra state): `model/…` and `buffer/…`, aliases too."""
        if self.units:
            yield from self._flat_items()
            return
        state = get_model_state_dict(self.model)
        for name, value in state.items():
            yield f"model/{canonical_name(name)}", value
        kept = {canonical_name(name) for name in state}
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if canonical_name(name) not in kept:
                yield f"buffer/{canonical_name(name)}", buffer

    def ties(self) -> dict[str, str]:
        """name -> first name, for parameters and buffers that are one object under several names."""
        first: dict[int, str] = {}
        ties = {f"model/{a}": f"model/{b}" for unit in self.units for a, b in unit.ties().items()}
        managed = self._managed()
        kept = {name for name, _ in self.items()}
        for name, value in [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]:
            full = f"model/{canonical_name(name)}"
            full = full if full in kept else f"buffer/{canonical_name(name)}"
            if full in kept and id(value) not in managed:
                owner = first.setdefault(id(value), full)
                if owner != full:
                    ties[full] = owner
        return ties

    def held(self) -> dict[int, list[FlatSlot]]:
        """id of a parameter that FSDP1 manages -> the original parameters in it."""
        return {id(p): slots for unit in self.units for p, slots in unit.held()}

    def parameter_names(self) -> dict[int, str]:
        """id of every other parameter -> its canonical name."""
        managed = self._managed()
        return {
            id(p): canonical_name(name) for name, p in self.model.named_parameters() if id(p) not in managed
        }

    def set_extra_state(self, found: dict[str, Any]) -> None:
        """Give modules their extra state back, by `model/…._extra_state`."""
        for name, module in self.model.named_modules():
            key = f"model/{canonical_name(f'{name}._extra_state' if name else '_extra_state')}"
            if key in found and _has_extra_state(module):
                module.set_extra_state(found[key])

    def loaded(self) -> None:
        """Call after parameters were changed in place."""
        for unit in self.units:
            unit.reshard()

    def _managed(self) -> set[int]:
        return {id(p) for unit in self.units for p in unit.parameters()}

    def _flat_items(self) -> Iterator[tuple[str, Any]]:
        for unit in self.units:
            found: dict[str, FlatShard] = {}
            for slot in unit.slots():
                found[slot.name] = slot.of(unit.local)
                yield f"model/{slot.name}", found[slot.name]
            for other, owner in unit.ties().items():
                yield f"model/{other}", found[owner]
        managed = self._managed()
        for prefix, module in self.model.named_modules():
            base = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in managed:
                    yield f"model/{canonical_name(base + name)}", parameter
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kind = "buffer" if name in module._non_persistent_buffers_set else "model"
                    yield f"{kind}/{canonical_name(base + name)}", buffer
            if _has_extra_state(module):
                yield f"model/{canonical_name(base + '_extra_state')}", module.get_extra_state()


class Problems:
    """What keeps a checkpoint from fitting, by name; raised all at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.changed: list[str] = []

    def compare(self, name: str, value: Value, reader: CheckpointReader) -> None:
        """Note another shape or dtype."""
        entry = reader.entry(name)
        if entry.shape != tuple(value.shape) or entry.dtype != dtype_name(value.dtype):
            self.changed.append(
                f"{name}: {entry.dtype}{list(entry.shape)} saved, "
                f"{dtype_name(value.dtype)}{list(value.shape)} here"
            )

    def raise_if_any(self) -> None:
        """`StateMismatch` with the three lists."""
        parts = [
            f"{kind}: {', '.join(names[:20])}{' …' if len(names) > 20 else ''}"
            for kind, names in (
                ("missing", self.missing), ("unexpected", self.unexpected), ("changed", self.changed)
            )
            if names
        ]  # fmt: skip
        if parts:
            raise StateMismatch(
                "the checkpoint does not fit; nothing was loaded; " + "; ".join(parts),
                missing=self.missing,
                unexpected=self.unexpected,
                changed=self.changed,
            )


def local_pieces(name: str, value: Value) -> list[Piece]:
    """What this rank holds of a tensor, as views of the live memory."""
    if isinstance(value, FlatShard):
        return value.pieces(name)
    if not isinstance(value, DTensor):
        return [Piece.of(name, value.detach())]
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [Piece(name, value.to_local().detach(), tuple(value.shape), tuple(offsets))]


def written_pieces(name: str, value: Value, rank: int, world_size: int) -> list[Piece]:
    """Those that this rank writes: replicas are spread by name."""
    replicas, mine = world_size, rank
    if isinstance(value, FlatShard):
        replicas, mine = value.replicas, value.replica
    elif isinstance(value, DTensor):
        replicas, mine = 1, 0
        coordinate = value.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        for dim, placement in enumerate(value.placements):
            if placement.is_partial():
                raise UnsupportedState(f"{name}: a partial DTensor is no state", name)
            if placement.is_replicate():
                mine = mine * value.device_mesh.size(dim) + coordinate[dim]
                replicas *= value.device_mesh.size(dim)
    return local_pieces(name, value) if zlib.crc32(name.encode()) % replicas == mine else []


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
