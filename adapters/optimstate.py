"""An optimizer's state by the canonical names of its parameters, out of it and back into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..engine.errors import UnsupportedState
from ..engine.jsonstate import decode_state, encode_state
from ..engine.pieces import Piece, dtype_of
from ..engine.reader import CheckpointReader
from .flatshard import FlatSlot
from .modelstate import ModelState, Problems, local_pieces

__all__ = ["OptimizerState", "OptimizerTargets"]


class OptimizerState:
    """One optimizer over a model's parameters; `base` begins all its names (`optim/0`)."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: ModelState, base: str) -> None:
        self.optimizer, self.base = optimizer, base
        self._held, self._names = model.held(), model.parameter_names()

    def names(self, parameter: torch.Tensor) -> list[str]:
        """The original parameters in one that the optimizer holds; empty when it is not the model's."""
        if id(parameter) in self._held:
            return [slot.name for slot in self._held[id(parameter)]]
        return [self._names[id(parameter)]] if id(parameter) in self._names else []

    def capture(self, tensors: dict[str, Any], objects: dict[str, Any]) -> Any:
        """The record of groups and scalars; tensors are added to `tensors`, FSDP1's scalars to `objects`."""
        groups: list[Any] = []
        for number, group in enumerate(self.optimizer.param_groups):
            rest = {key: value for key, value in group.items() if key != "params"}
            if unknown := [p for p in group["params"] if not self.names(p)]:
                raise UnsupportedState(
                    f"{self.base}: {len(unknown)} parameters are not the model's", self.base
                )
            groups.append(
                {
                    "params": [name for p in group["params"] for name in self.names(p)],
                    "options": encode_state(rest, f"{self.base}/group/{number}", tensors),
                }
            )
        scalars: dict[str, dict[str, Any]] = {}
        for parameter, state in self.optimizer.state.items():
            if id(parameter) in self._held:
                for slot in self._held[id(parameter)]:
                    self._capture_slot(slot, parameter, state, tensors, objects)
                continue
            name = self._names[id(parameter)]
            scalars.setdefault(name, {})
            for key, value in state.items():
                path = f"{self.base}/state/{name}/{key}"
                if isinstance(value, torch.Tensor):
                    tensors[path] = value
                else:
                    scalars[name][str(key)] = encode_state(value, path, tensors)
        return {"groups": groups, "state": scalars}

    def _capture_slot(
        self,
        slot: FlatSlot,
        parameter: torch.Tensor,
        state: dict[str, Any],
        tensors: dict[str, Any],
        objects: dict[str, Any],
    ) -> None:
        path = f"{self.base}/state/{slot.name}"
        scalars = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                scalars[str(key)] = encode_state(value, f"{path}/{key}", tensors)
            elif value.dim() and value.shape == parameter.shape:
                tensors[f"{path}/{key}"] = slot.of(value)
            elif slot.owner:
                tensors[f"{path}/{key}"] = slot.whole(value)
        if scalars and slot.owner:
            objects[path] = scalars

    def targets(self, reader: CheckpointReader, problems: Problems) -> OptimizerTargets:
        """Where everything goes; nothing is changed yet. Small whole values are read at once."""
        made = OptimizerTargets(self.optimizer)
        record = reader.manifest.objects.get(self.base)
        if not isinstance(record, dict):
            return made  # reported as missing by the caller
        groups = self.optimizer.param_groups
        ours = [sorted(name for p in group["params"] for name in self.names(p)) for group in groups]
        if ours != [sorted(group["params"]) for group in record["groups"]]:
            problems.changed.append(f"{self.base}: parameter groups differ")
            return made
        for number, group in enumerate(record["groups"]):
            path = f"{self.base}/group/{number}"
            made.options.append(decode_state(group["options"], reader.read, path))
        recorded = self._recorded(reader, record)
        for parameter in (p for group in groups for p in group["params"]):
            if id(parameter) in self._held:
                made.add_flat(parameter, self._held[id(parameter)], recorded, self.base, reader, problems)
            elif (name := self._names[id(parameter)]) in recorded:
                state = made.state.setdefault(parameter, {})
                for key, value in recorded[name].items():
                    path = f"{self.base}/state/{name}/{key}"
                    if value is _TENSOR:
                        made.add(path, parameter, key, reader)
                    else:
                        state[key] = decode_state(value, reader.read, path)
        return made

    def _recorded(self, reader: CheckpointReader, record: Any) -> dict[str, dict[str, Any]]:
        """name -> key -> encoded scalar or `_TENSOR`."""
        found: dict[str, dict[str, Any]] = {name: dict(s) for name, s in record["state"].items()}
        prefix = f"{self.base}/state/"
        for path, scalars in reader.manifest.objects.items():
            if path.startswith(prefix):
                found.setdefault(path.removeprefix(prefix), {}).update(scalars)
        ours = {name for group in record["groups"] for name in group["params"]}
        for path in sorted(n for n in reader.names if n.startswith(prefix)):
            name, _, key = path.removeprefix(prefix).rpartition("/")
            if name in ours:
                found.setdefault(name, {})[key] = _TENSOR
        return found


_TENSOR = object()


class OptimizerTargets:
    """New state for one optimizer, in the dtypes that were saved; installed only when all of it was read."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.pieces: list[Piece] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.options: list[dict[str, Any]] = []

    def add(self, path: str, parameter: torch.Tensor, key: str, reader: CheckpointReader) -> None:
        """A tensor of an ordinary or FSDP2 parameter: the live one when it fits, else a new one."""
        entry = reader.entry(path)
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
        self.pieces += local_pieces(path, value)

    def add_flat(
        self,
        parameter: torch.Tensor,
        slots: list[FlatSlot],
        recorded: dict[str, dict[str, Any]],
        base: str,
        reader: CheckpointReader,
        problems: Problems,
    ) -> None:
        """All state of a parameter that FSDP1 manages. One value must do for all originals in a flat parameter."""
        if not any(slot.count for slot in slots):
            return
        keys = [set(recorded.get(slot.name, ())) for slot in slots]
        if any(other != keys[0] for other in keys):
            problems.changed.append(f"{base}: only some parameters of one flat parameter have state")
            return
        if not keys[0]:
            return
        state = self.state.setdefault(parameter, {})
        for key in sorted(keys[0]):
            for slot in slots:
                path = f"{base}/state/{slot.name}/{key}"
                encoded = recorded[slot.name][key]
                if encoded is _TENSOR and reader.entry(path).shape == slot.shape:
                    dtype = dtype_of(reader.entry(path).dtype)
                    local = state.setdefault(
                        key, torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
                    )
                    if local.dtype != dtype or local.shape != parameter.shape:
                        problems.changed.append(
                            f"{path}: another dtype than its neighbours in a flat parameter"
                        )
                    elif slot.count:
                        self.pieces += local_pieces(path, slot.of(local))
                    continue
                if encoded is _TENSOR:
                    value = reader.read(path).to(self._device(parameter, key, reader.entry(path).shape))
                else:
                    value = decode_state(encoded, reader.read, path)
                if key in state and not _same(state[key], value):
                    problems.changed.append(f"{path}: differs inside one flat parameter; use use_orig_params")
                state.setdefault(key, value)

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


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
