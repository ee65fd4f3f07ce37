"""A digest of a trainer's whole state, read back from the tensors that it trains with."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

__all__ = ["state_digest"]


def state_digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over every parameter and optimizer tensor, gathered and in the order of names. Every rank calls it.

    Rank 0 has the digest; what the others return says nothing.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = hashlib.sha256()
    for part in get_state_dict(model, optimizer, options=options):
        for name, value in sorted(_leaves(part, "")):
            found.update(f"{name}\0".encode())
            if isinstance(value, torch.Tensor):
                found.update(f"{value.dtype}{tuple(value.shape)}".encode())
                found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(value).encode())
    return found.hexdigest()


def _leaves(value: object, name: str) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{name}/{key}")]
    if isinstance(value, (list, tuple)):
        return [leaf for place, inner in enumerate(value) for leaf in _leaves(inner, f"{name}/{place}")]
    return [(name, value)]
