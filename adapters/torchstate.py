"""Capture and restore a trainer's state: models, optimizers, schedulers and whatever else has a state_dict.

Names are canonical (as torch.distributed.checkpoint.state_dict gives them), so a checkpoint does not
depend on wrappers, world size or mesh. A capture copies nothing and makes no collective; restoring checks
and verifies everything before it touches anything.

    model/<fqn>                   parameters and persistent buffers
    buffer/<fqn>                  buffers that a state_dict leaves out
    optim/<i>/state/<fqn>/<key>   optimizer state; groups are in the objects as optim/<i>
    optim/<i>/state/<fqn>         FSDP1 only: scalars of that parameter, as an object
    scheduler/<i>, extra/<name>   typed JSON, tensors inside pulled out under the same name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.jsonstate import decode_state, encode_state
from ..engine.pieces import Piece
from ..engine.reader import CheckpointReader
from .flatshard import FlatShard, canonical_name
from .modelstate import ModelState, Problems, local_pieces, written_pieces
from .optimstate import OptimizerState

__all__ = ["Capture", "TrainState", "canonical_name"]


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
        self.model = model
        self.optimizers = tuple(optimizers)
        self.rank, self.world_size = rank, world_size
        self.plain = {f"scheduler/{i}": item for i, item in enumerate(schedulers)}
        self.plain.update({f"extra/{name}": item for name, item in (extras or {}).items()})
        self.own = {f"rank/{rank}/{name}": item for name, item in (rank_extras or {}).items()}

    def capture(self) -> Capture:
        """Everything that this rank writes. Raises `UnsupportedState` by path. No copy, no collective."""
        tensors: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        slotted: dict[str, Any] = {}
        model = ModelState(self.model, self.world_size)
        aliases = model.ties()
        for name, value in model.items():
            if not isinstance(value, torch.Tensor | FlatShard):
                objects[name] = encode_state(value, name, tensors)
            elif name not in aliases:
                tensors[name] = value
        for index, optimizer in enumerate(self.optimizers):
            base = f"optim/{index}"
            objects[base] = OptimizerState(optimizer, model, base).capture(tensors, slotted)
        for name, item in self.plain.items():
            objects[name] = encode_state(_state_of(item), name, tensors)
        own_tensors: dict[str, Any] = {}
        own = {name: encode_state(_state_of(item), name, own_tensors) for name, item in self.own.items()}
        pieces = [
            piece
            for name, value in tensors.items()
            for piece in written_pieces(name, value, self.rank, self.world_size)
        ]
        pieces += [Piece.of(name, value.detach()) for name, value in own_tensors.items()]
        shared = objects if self.rank == 0 else {}
        return Capture(pieces=pieces, objects=shared | slotted, rank_objects=own, aliases=aliases)

    def restore(self, reader: CheckpointReader) -> list[str]:
        """Load this state in place from a checkpoint of any world size; return remarks for people.

        Strict: `StateMismatch` lists missing, unexpected and changed names, `CorruptCheckpoint` names a file;
        either way nothing was loaded. What can still fail after that is a copy to a device without memory for it,
        or a `load_state_dict` of the caller's own. Per-rank state is restored only when the world size is the same.
        """
        objects = reader.manifest.objects
        model = ModelState(self.model, self.world_size)
        problems = Problems()
        pieces, extra_names = self._model_pieces(model, reader, problems)
        optimizers = [
            OptimizerState(optimizer, model, f"optim/{index}").targets(reader, problems)
            for index, optimizer in enumerate(self.optimizers)
        ]
        bases = [f"optim/{index}" for index in range(len(self.optimizers))]
        expected = {*self.plain, *bases, *extra_names}
        slotted = tuple(f"{base}/state/" for base in bases)
        problems.missing += sorted(expected - set(objects))
        problems.unexpected += sorted(n for n in set(objects) - expected if not n.startswith(slotted))
        problems.raise_if_any()
        pieces += [piece for optimizer in optimizers for piece in optimizer.pieces]
        same_world = reader.manifest.world_size == self.world_size
        own = reader.manifest.rank_objects.get(str(self.rank), {}) if same_world else {}
        reader.prepare((p.name, p.offsets, tuple(p.tensor.shape)) for p in pieces)
        decoded = {n: decode_state(objects[n], reader.read, n) for n in (*self.plain, *extra_names)}
        decoded_own = {n: decode_state(own[n], reader.read, n) for n in self.own if n in own}
        # Everything has been found and verified: from here on the live state changes.
        for piece in pieces:
            reader.read_into(piece.name, piece.tensor, piece.offsets)
        model.loaded()
        for optimizer in optimizers:
            optimizer.install()
        model.set_extra_state(decoded)
        for name, item in self.plain.items():
            _load_state(item, decoded[name])
        for name, value in decoded_own.items():
            _load_state(self.own[name], value)
        lost = sorted(set(self.own) - set(decoded_own))
        return [f"{name} was not restored (world size differs or it was not saved)" for name in lost]

    def _model_pieces(
        self, model: ModelState, reader: CheckpointReader, problems: Problems
    ) -> tuple[list[Piece], list[str]]:
        """Where the model's tensors go, and the names of its extra state."""
        pieces: list[Piece] = []
        extra: list[str] = []
        names = set()
        ties = model.ties()
        for name, value in model.items():
            if not isinstance(value, torch.Tensor | FlatShard):
                extra.append(name)
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
                pieces += local_pieces(name, value)
        found = {name for name in reader.names if name.startswith(("model/", "buffer/"))}
        pulled_out = tuple(f"{n}/" for n in reader.manifest.objects if n.startswith("model/"))
        problems.unexpected += sorted(n for n in found - names if not n.startswith(pulled_out))
        return pieces, extra


def _state_of(item: Any) -> Any:
    return item if isinstance(item, dict) else item.state_dict()


def _load_state(item: Any, value: Any) -> None:
    if isinstance(item, dict):
        item.clear()
        item.update(value)
    else:
        item.load_state_dict(value)
