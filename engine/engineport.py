"""The port to a rollout engine: what a rollout participant needs from the server that generates.

Errors: `EngineGone` is hard evidence that no process answers; `Unavailable` means silence or a lost reply
(the engine may or may not have acted); `EngineFault` is an answer that is anything but a proven success, kept
in `.reply`. After `Unavailable` or `EngineFault` from `load`, `flush` or `prove` the engine is fit for
nothing but a full, proven load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from .errors import EngineFault

__all__ = ["EngineGone", "EngineStatus", "PauseMode", "Proof", "RolloutEngine"]

PauseMode = Literal["abort", "retract", "in_place"]


class EngineGone(EngineFault):
    """Nothing listens at the engine's address: the process is dead (its host refused the connection)."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says about itself. `start_id` changes when the process starts anew; None is unknown."""

    label: str
    start_id: str
    model_path: str
    paused: bool | None
    requests_running: int | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The label that a freshly generated token carried, and how many prompt tokens were cached (0)."""

    label: str
    token: int
    cached_tokens: int


class RolloutEngine(Protocol):
    """One rollout engine. Every method blocks up to a deadline of its own and is safe to call from one thread
    at a time; `status` may be called beside another call.
    """

    def describe(self) -> str:
        """Name and version of the engine, such as `sglang 0.5.23`."""
        ...

    def status(self) -> EngineStatus:
        """Ask for label and state without touching the scheduler's queue; cheap enough for every beat."""
        ...

    def round_trip(self) -> None:
        """Send one token through the scheduler. Not while paused: it would wait for the continue."""
        ...

    def check_image(self, image: Path) -> None:
        """Compare an image's names, shapes, dtypes and file lengths with the served model's, before any call.

        Raises `StateMismatch` or `CorruptCheckpoint`; the engine is not contacted with the image.
        """
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generation. `abort` ends running requests with what they have, `retract` recomputes them after
        `resume`, `in_place` goes on over the old cache. Idempotent.
        """
        ...

    def resume(self) -> None:
        """Let generation go on. Idempotent; the caller sends it whatever happened before."""
        ...

    def load(self, image: Path, label: str) -> None:
        """Load a checked image under `label` and drop the cache. Returns only on a stated success."""
        ...

    def flush(self, deadline_seconds: float) -> None:
        """Drop the prefix cache, asking again with growing pauses while the engine refuses.

        Raises `EngineFault` with the last refusal once the deadline is over.
        """
        ...

    def prove(self, label: str) -> Proof:
        """Prove `label` by what the server says and by a fresh token of a fixed prompt with nothing cached.

        Only after `load` and `resume`. Asking twice without a flush fails: the first proof fills the cache.
        """
        ...

    def close(self) -> None:
        """Release connections; idempotent. The engine goes on."""
        ...
