"""Every random generator of one rank as one object with a state_dict: python, numpy, torch on CPU and
CUDA.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["RngState"]


class RngState:
    """The process-wide generators. Give it to `TrainState` as a per-rank extra."""

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators; the next draws after `load_state_dict` of it are the same."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if torch.cuda.is_available():
            state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all generators back; CUDA's only when this process sees as many devices."""
        random.setstate(state["python"])
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(state["torch"]))
        cuda = state.get("cuda")
        if cuda and torch.cuda.is_available() and torch.cuda.device_count() == len(cuda):
            torch.cuda.set_rng_state_all([_tensor(raw) for raw in cuda])

    @staticmethod
    def derive(seed: int, step: int, rank: int) -> None:
        """Seed all generators from (seed, step, rank), for a world size that has no saved states."""
        raw = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
        random.seed(raw)
        np.random.seed(int.from_bytes(raw[:4], "little"))
        torch.manual_seed(int.from_bytes(raw[4:12], "little", signed=True))


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
