"""Capture and restore a trainer's state: models, optimizers, schedulers and whatever else has a state_dict.

Names are canonical (as torch.distributed.checkpoint.state_dict gives them), so a checkpoint does not
depend on wrappers, world size or mesh. A capture copies nothing and makes no collective; restoring checks
everything first.

    model/<fqn>                   parameters and persistent buffers
    buffer/<fqn>                  buffers that a state_dict leaves out
    optim/<i>/state/<fqn>/<key>   optimizer state; groups are in the objects as optim/<i>
    scheduler/<i>, extra/<name>   typed JSON, tensors inside pulled out under the same name
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from ..engine.errors import StateMismatch, UnsupportedState
from ..engine.jsonstate import decode_state, encode_state
from ..engine.pieces import Piece, dtype_name, dtype_of
from ..engine.reader import CheckpointReader

__all__ = ["Capture", "TrainState", "canonical_name"]

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One rank's share of a state: tensors to stage (still the live ones), typed JSON, and ties
    between names.
    """

    pieces: list[Piece]
    objects: dict[str, Any] = field(default_factory=dict)
    rank_objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


class TrainState:
    """What one trainer saves and restores. Holds references only; the objects stay the caller's.

    `extras` are objects with state_dict / load_state_dict, or plain dicts (restored in place).
    `rank_extras` are the same but differ from rank to rank, such as RNG or a data loader's position.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        extras: Mapping[str, Any] | None = None,
        rank_extras: Mapping[str, Any] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = tuple(optimizers)
        self.rank, self.world_size = rank, world_size
        self.plain = {f"scheduler/{i}": item for i, item in enumerate(schedulers)}
        self.plain.update({f"extra/{name}": item for name, item in (extras or {}).items()})
        self.own = {f"rank/{rank}/{name}": item for name, item in (rank_extras or {}).items()}
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise UnsupportedState("FSDP1 modules cannot be captured; use fully_shard", "model")

    def capture(self) -> Capture:
        """Everything that this rank writes. Raises `UnsupportedState` by path. No copy, no collective."""
        tensors: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        aliases = self._ties()
        for name, value in self._model_items():
            if isinstance(value, torch.Tensor):
                if name not in aliases:
                    tensors[name] = value
            else:
                objects[name] = encode_state(value, name, tensors)
        for index, optimizer in enumerate(self.optimizers):
            objects[f"optim/{index}"] = self._optimizer_state(index, optimizer, tensors)
        for name, item in self.plain.items():
            objects[name] = encode_state(_state_of(item), name, tensors)
        own_tensors: dict[str, Any] = {}
        own = {name: encode_state(_state_of(item), name, own_tensors) for name, item in self.own.items()}
        pieces = [piece for name, value in tensors.items() for piece in self._pieces(name, value)]
        pieces += [Piece.of(name, value.detach()) for name, value in own_tensors.items()]
        return Capture(
            pieces=pieces, objects=objects if self.rank == 0 else {}, rank_objects=own, aliases=aliases
        )

    def restore(self, reader: CheckpointReader) -> list[str]:
        """Load this state in place from a checkpoint of any world size; return remarks for people.

        Strict: `StateMismatch` lists missing, unexpected and changed names, `CorruptCheckpoint` names
        a file; either
        way nothing was loaded. Per-rank state is restored only when the world size is the same.
        """
        objects = reader.manifest.objects
        targets, problems = self._model_targets(reader)
        states = [self._optimizer_targets(i, o, reader, problems) for i, o in enumerate(self.optimizers)]
        expected = set(self.plain) | {f"optim/{i}" for i in range(len(self.optimizers))}
        expected |= {name for name, value in self._model_items() if not isinstance(value, torch.Tensor)}
        problems.missing += sorted(expected - set(objects))
        problems.unexpected += sorted(set(objects) - expected)
        problems.raise_if_any()
        for state in states:
            targets += state.targets
        same_world = reader.manifest.world_size == self.world_size
        own = reader.manifest.rank_objects.get(str(self.rank), {}) if same_world else {}
        reader.prepare((t.name, t.offsets, tuple(t.tensor.shape)) for t in targets)
        decoded = {n: decode_state(objects[n], reader.read, n) for n in objects if n in self.plain}
        decoded_own = {n: decode_state(own[n], reader.read, n) for n in self.own if n in own}
        extra_state = {
            n: decode_state(objects[n], reader.read, n) for n in objects if n.endswith("_extra_state")
        }
        for target in targets:
            reader.read_into(target.name, target.tensor, target.offsets)
        for state in states:
            state.install()
        if extra_state:
            for name, module in self.model.named_modules():
                key = f"model/{canonical_name(f'{name}._extra_state' if name else '_extra_state')}"
                if key in extra_state:
                    module.set_extra_state(extra_state[key])
        for name, value in decoded.items():
            _load_state(self.plain[name], value)
        for name, value in decoded_own.items():
            _load_state(self.own[name], value)
        lost = sorted(set(self.own) - set(decoded_own))
        return [f"{name} was not restored (world size differs or it was not saved)" for name in lost]

    def _model_items(self) -> Iterator[tuple[str, Any]]:
        state = get_model_state_dict(self.model)
        for name, value in state.items():
            yield f"model/{name}", value
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            clean = canonical_name(name)
            if clean not in state:
                yield f"buffer/{clean}", buffer

    def _ties(self) -> dict[str, str]:
        """name -> first name, for parameters and buffers that are one object under several names."""
        first: dict[int, str] = {}
        ties = {}
        kept = {name for name, _ in self._model_items()}
        for name, value in [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]:
            full = f"model/{canonical_name(name)}"
            full = full if full in kept else f"buffer/{canonical_name(name)}"
            if full in kept:
                owner = first.setdefault(id(value), full)
                if owner != full:
                    ties[full] = owner
        return ties

    def _model_targets(self, reader: CheckpointReader) -> tuple[list[Piece], _Problems]:
        problems, targets, names = _Problems(), [], set()
        ties = self._ties()
        for name, value in self._model_items():
            if not isinstance(value, torch.Tensor):
                continue
            names.add(name)
            if value.is_meta:
                problems.changed.append(f"{name}: on the meta device; materialise the model first")
            elif name not in reader.names:
                problems.missing.append(name)
            elif name in ties and reader.owner(name) != reader.owner(ties[name]):
                problems.changed.append(f"{name}: tied to {ties[name]} here, not in the checkpoint")
            else:
                problems.compare(name, value, reader)
                targets.append(_piece(name, value))
        found = {name for name in reader.names if name.startswith(("model/", "buffer/"))}
        pulled_out = tuple(f"{n}/" for n in reader.manifest.objects if n.startswith("model/"))
        problems.unexpected += sorted(n for n in found - names if not n.startswith(pulled_out))
        return targets, problems

    def _parameter_names(self) -> dict[int, str]:
        return {id(p): canonical_name(name) for name, p in self.model.named_parameters()}

    def _optimizer_state(self, index: int, optimizer: torch.optim.Optimizer, tensors: dict[str, Any]) -> Any:
        names = self._parameter_names()
        base = f"optim/{index}"
        groups: list[Any] = []
        scalars: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            rest = {key: value for key, value in group.items() if key != "params"}
            if unknown := [p for p in group["params"] if id(p) not in names]:
                raise UnsupportedState(f"{base}: {len(unknown)} parameters are not the model's", base)
            groups.append(
                {
                    "params": [names[id(p)] for p in group["params"]],
                    "options": encode_state(rest, f"{base}/group/{number}", tensors),
                }
            )
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                path = f"{base}/state/{name}/{key}"
                if isinstance(value, torch.Tensor):
                    tensors[path] = value
                else:
                    scalars.setdefault(name, {})[str(key)] = encode_state(value, path, tensors)
            scalars.setdefault(name, {})
        return {"groups": groups, "state": scalars}

    def _optimizer_targets(
        self, index: int, optimizer: torch.optim.Optimizer, reader: CheckpointReader, problems: _Problems
    ) -> _OptimizerTargets:
        base = f"optim/{index}"
        made = _OptimizerTargets(optimizer)
        record = reader.manifest.objects.get(base)
        if not isinstance(record, dict):
            return made  # reported as missing by the caller
        names = self._parameter_names()
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if ours != [group["params"] for group in record["groups"]]:
            problems.changed.append(f"{base}: parameter groups differ")
            return made
        for number, group in enumerate(record["groups"]):
            made.options.append(decode_state(group["options"], reader.read, f"{base}/group/{number}"))
        for name, scalars in record["state"].items():
            state = made.state.setdefault(parameters[name], {})
            for key, value in scalars.items():
                state[key] = decode_state(value, reader.read, f"{base}/state/{name}/{key}")
        prefix = f"{base}/state/"
        for full in sorted(n for n in reader.names if n.startswith(prefix)):
            name, _, key = full.removeprefix(prefix).rpartition("/")
            if name in parameters:
                made.add(full, parameters[name], key, reader)
        return made

    def _pieces(self, name: str, value: torch.Tensor) -> Iterator[Piece]:
        """This rank's piece of a tensor, unless another rank writes it: replicas are spread by name."""
        if isinstance(value, DTensor):
            replicas, mine = 1, 0
            coordinate = value.device_mesh.get_coordinate()
            if coordinate is None:
                return
            for dim, placement in enumerate(value.placements):
                if placement.is_partial():
                    raise UnsupportedState(f"{name}: a partial DTensor is no state", name)
                if placement.is_replicate():
                    mine = mine * value.device_mesh.size(dim) + coordinate[dim]
                    replicas *= value.device_mesh.size(dim)
        else:
            replicas, mine = self.world_size, self.rank
        if zlib.crc32(name.encode()) % replicas == mine:
            yield _piece(name, value)


class _Problems:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.changed: list[str] = []

    def compare(self, name: str, value: torch.Tensor, reader: CheckpointReader) -> None:
        entry = reader.entry(name)
        if entry.shape != tuple(value.shape) or entry.dtype != dtype_name(value.dtype):
            self.changed.append(
                f"{name}: {entry.dtype}{list(entry.shape)} saved, "
                f"{dtype_name(value.dtype)}{list(value.shape)} here"
            )

    def raise_if_any(self) -> None:
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


class _OptimizerTargets:
    """New state for one optimizer, in the dtypes that were saved; installed only when all of it was read."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.targets: list[Piece] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.options: list[dict[str, Any]] = []

    def add(self, full: str, parameter: torch.Tensor, key: str, reader: CheckpointReader) -> None:
        entry = reader.entry(full)
        dtype = dtype_of(entry.dtype)
        old = self.optimizer.state.get(parameter, {}).get(key)
        value: torch.Tensor
        if isinstance(old, torch.Tensor) and old.dtype == dtype and tuple(old.shape) == entry.shape:
            value = old
        elif isinstance(parameter, DTensor) and entry.shape == tuple(parameter.shape) and entry.shape:
            value = torch.zeros_like(parameter, dtype=dtype).detach()
        else:
            value = torch.zeros(entry.shape, dtype=dtype, device=self._device(parameter, key, entry.shape))
        self.state.setdefault(parameter, {})[key] = value
        self.targets.append(_piece(full, value))

    def _device(self, parameter: torch.Tensor, key: str, shape: tuple[int, ...]) -> torch.device:
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_cpu = key == "step" and shape == () and not (group.get("capturable") or group.get("fused"))
        return torch.device("cpu") if on_cpu else parameter.device

    def install(self) -> None:
        """Replace the optimizer's state; nothing is cast to the parameters' dtype."""
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(options)
            group["params"] = parameters


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers of compile, activation checkpointing and DDP."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts)


def _piece(name: str, value: torch.Tensor) -> Piece:
    if not isinstance(value, DTensor):
        return Piece.of(name, value.detach())
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local = value.to_local().detach()
    return Piece(name, local, tuple(value.shape), tuple(offsets))


def _state_of(item: Any) -> Any:
    return item if isinstance(item, dict) else item.state_dict()


def _load_state(item: Any, value: Any) -> None:
    if isinstance(item, dict):
        item.clear()
        item.update(value)
    else:
        item.load_state_dict(value)
