"""FSDP1 (`FullyShardedDataParallel`): its flat parameters, seen as boxes of the original tensors.

A rank holds a range of each unit's flattened parameters. A range of a flattened tensor is a few boxes, so
FSDP1's state is written and read in place, under canonical names, without a collective. This reads private fields
of torch's FSDP1, whose public state dicts gather everything first; FSDP1 is deprecated and no longer changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.errors import UnsupportedState
from ..engine.pieces import Piece

__all__ = ["FlatShard", "FlatSlot", "FlatUnit", "boxes_of_range", "canonical_name", "flat_units"]

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers of FSDP1, compile and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def boxes_of_range(
    shape: Sequence[int], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offsets, lengths) that tile elements `start` to `end` of a flattened tensor, in order. Pure."""
    if not shape:
        yield (), ()
        return
    if start >= end:
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(end, row)
    if first == last:
        for offsets, lengths in boxes_of_range(shape[1:], head, tail):
            yield (first, *offsets), (1, *lengths)
        return
    if head:
        for offsets, lengths in boxes_of_range(shape[1:], head, row):
            yield (first, *offsets), (1, *lengths)
        first += 1
    if last > first:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if tail:
        for offsets, lengths in boxes_of_range(shape[1:], 0, tail):
            yield (last, *offsets), (1, *lengths)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements from `start` of a flattened tensor of `shape`; `local` is one-dimensional and live.

    `replicas` ranks hold the same; this one is number `replica`.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    start: int
    replicas: int = 1
    replica: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor's."""
        return self.local.dtype

    @property
    def is_meta(self) -> bool:
        """As a tensor's."""
        return self.local.is_meta

    def pieces(self, name: str) -> list[Piece]:
        """Views of `local`, one for each box."""
        made, at = [], 0
        if not self.shape or not math.prod(self.shape):
            return [Piece(name, self.local.reshape(self.shape), self.shape, (0,) * len(self.shape))]
        for offsets, lengths in boxes_of_range(self.shape, self.start, self.start + self.local.numel()):
            count = math.prod(lengths)
            made.append(Piece(name, self.local.narrow(0, at, count).view(lengths), self.shape, offsets))
            at += count
        return made


@dataclass(frozen=True, slots=True)
class FlatSlot:
    """One original parameter inside what an optimizer holds: `count` elements at `offset` of a local tensor,
    which are those from `start` of the original. `owner` is whether this rank speaks for the parameter's scalars.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int
    owner: bool
    replicas: int
    replica: int

    def of(self, local: torch.Tensor) -> FlatShard:
        """The part of a tensor as long as the local one."""
        part = local.detach().reshape(-1).narrow(0, self.offset, self.count)
        return FlatShard(part, self.shape, self.start, self.replicas, self.replica)

    def whole(self, value: torch.Tensor) -> FlatShard:
        """A value that belongs to the parameter as a whole, such as its step."""
        return FlatShard(value.detach().reshape(-1), tuple(value.shape), 0, self.replicas, self.replica)


class FlatUnit:
    """One FSDP1 module's own flat parameter."""

    def __init__(self, name: str, module: Any, world_size: int) -> None:
        self._handle = module._handle
        self._flat = self._handle.flat_param
        self._prefix = canonical_name(name)
        self._sharded = bool(self._handle.uses_sharded_strategy)
        between = getattr(module, "_inter_node_pg", None)
        group = self._handle.process_group
        if self._sharded:
            self._replicas = between.size() if between is not None else 1
            self._replica = between.rank() if between is not None else 0
        else:
            self._replicas, self._replica = group.size(), group.rank()
        if world_size > 1 and group.size() * (self._replicas if self._sharded else 1) != world_size:
            raise UnsupportedState(f"{self._prefix or 'model'}: FSDP1 over a part of the ranks", self._prefix)
        self.original = bool(self._handle._use_orig_params)

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements, padding included; the live ones."""
        found: torch.Tensor = getattr(self._flat, "_local_shard", self._flat.data)
        return found.detach()

    def slots(self) -> list[FlatSlot]:
        """The original parameters, as they lie in `local`."""
        made = []
        for fqn, shape, info in zip(
            self._flat._fqns, self._flat._shapes, self._flat._shard_param_infos, strict=True
        ):
            count = info.numel_in_shard if info.in_shard else 0
            made.append(
                FlatSlot(
                    name=self._named(fqn),
                    shape=tuple(shape),
                    start=info.intra_param_start_idx if count else 0,
                    offset=info.offset_in_shard if count else 0,
                    count=count,
                    owner=bool(count) and info.intra_param_start_idx == 0,
                    replicas=self._replicas,
                    replica=self._replica,
                )
            )
        return made

    def held(self) -> list[tuple[torch.Tensor, list[FlatSlot]]]:
        """(parameter that an optimizer holds, its slots): the originals, or the flat one."""
        slots = self.slots()
        if not self.original:
            return [(self._flat, slots)]
        moved = [
            FlatSlot(s.name, s.shape, s.start, 0, s.count, s.owner, s.replicas, s.replica) for s in slots
        ]
        return [(p, [slot]) for p, slot in zip(self._flat._params, moved, strict=True)]

    def ties(self) -> dict[str, str]:
        """Other name -> name, for parameters that are shared inside the unit."""
        found = {}
        for info in self._flat._shared_param_infos:
            other = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
            owner = (
                f"{info.prim_module_name}.{info.prim_param_name}"
                if info.prim_module_name
                else info.prim_param_name
            )
            found[self._named(other)] = self._named(owner)
        return found

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter object that this unit manages."""
        return [self._flat, *(self._flat._params or ()), *(self._flat._shared_params or ())]

    def gathered(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of each parameter, after one all-gather of the unit. Every rank calls it."""
        local = self.local
        local = local.to(dtype) if dtype is not None else local
        whole = local
        if self._sharded:
            group = self._handle.process_group
            whole = local.new_empty(local.numel() * group.size())
            dist.all_gather(list(whole.chunk(group.size())), local.contiguous(), group=group)
        real = [
            span
            for span, padding in zip(
                self._handle._get_flat_param_offsets(), self._flat._is_padding_mask, strict=True
            )
            if not padding
        ]
        for fqn, shape, (start, end) in zip(self._flat._fqns, self._flat._shapes, real, strict=True):
            yield self._named(fqn), whole[start : end + 1].view(shape)

    def reshard(self) -> None:
        """Drop gathered parameters that may be older than `local`."""
        if self._sharded:
            self._handle.reshard(True)

    def _named(self, fqn: str) -> str:
        return canonical_name(f"{self._prefix}.{fqn}" if self._prefix else fqn)


def flat_units(model: nn.Module, world_size: int) -> list[FlatUnit]:
    """Every FSDP1 unit of a model that has parameters of its own; empty for other models."""
    return [
        FlatUnit(name, module, world_size)
        for name, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel"
        and getattr(module, "_handle", None) is not None
    ]
