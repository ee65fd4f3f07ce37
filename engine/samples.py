"""Records of the experience buffer: who calls, what was sampled, what a lease, a cut and a tidy-up return.

A sample's identity is (prompt, index), given at dispatch. `ordinal` is the prompt's place in the dispatch
order,
counted over all epochs, so that the same prompt in two epochs is two identities.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from .digest import crc64nvme, crc_text

__all__ = [
    "SampleId",
    "Caller",
    "Dispatch",
    "Span",
    "Sample",
    "LandReport",
    "LeasedSample",
    "FreshnessReport",
    "PartFile",
    "BufferPart",
    "PromptSource",
    "PromptOrder",
]


class SampleId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Identity of one sample: answer `index` to the prompt dispatched as number `ordinal`."""

    prompt: str
    ordinal: int
    index: int


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls: the timeline and incarnation that the buffer checks in every call."""

    timeline: int
    incarnation: str = ""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be answered; `indices` are the answers wanted, `attempt` counts from 1."""

    prompt: str
    ordinal: int
    epoch: int
    indices: tuple[int, ...]
    attempt: int = 1

    def ids(self) -> tuple[SampleId, ...]:
        """The identities of the wanted answers."""
        return tuple(
            SampleId(prompt=self.prompt, ordinal=self.ordinal, index=index) for index in self.indices
        )


Span = tuple[int, int, int]
"""(weight version, first token, token after the last) of a piece that one version generated."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout as its driver hands it in. `payload` is opaque (JSON by convention)."""

    id: SampleId
    spans: tuple[Span, ...]
    payload: bytes
    reward: float = 0.0
    sampling_revision: int = 0


class LandReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the samples of one `land`; the three numbers add up to what was given."""

    accepted: int = 0
    duplicates: int = 0
    dropped: int = 0


class LeasedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample leased for a step; `weight` is below 1.0 only while stale samples are weighted down."""

    id: SampleId
    step: int
    spans: tuple[Span, ...]
    oldest_version: int
    timeline: int
    reward: float
    sampling_revision: int
    payload: bytes
    weight: float = 1.0


class FreshnessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a freshness pass found among the landed, unleased samples and what it did."""

    pending: int
    stale: int
    dead: int
    action: str
    dropped: int = 0

    @property
    def stale_fraction(self) -> float:
        """Stale share of what was pending, dead ones left out; 0.0 when nothing was."""
        return self.stale / self.pending if self.pending else 0.0


class PartFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a cut. `digest` is CRC64NVME in the manifest's form (`digest.py`); `kind` is `log`
    (core) or `payload`
    (auxiliary)."""

    name: str
    kind: str
    size_bytes: int
    digest: str


class BufferPart(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer's part of a checkpoint: the log's prefix up to `step_done(step)` and the payloads it
    needs."""

    step: int
    version: int
    files: tuple[PartFile, ...]
    counts: dict[str, int]
    blocked_seconds: float = 0.0


class PromptSource(Protocol):
    """The order in which prompts are dispatched: a pure function of a number, so a cursor is one integer."""

    @property
    def digest(self) -> str:
        """Identity of the data set and its order; a restore under another one is refused."""
        ...

    def prompt(self, ordinal: int) -> str:
        """The prompt id at this place; raises IndexError after the last one."""
        ...

    def epoch(self, ordinal: int) -> int:
        """The epoch, from 0, that this place belongs to."""
        ...


class PromptOrder:
    """Every id once an epoch, in the given order or, with a seed, shuffled anew each epoch."""

    def __init__(self, ids: Sequence[str], *, seed: int | None = None, epochs: int | None = None) -> None:
        self._ids = tuple(ids)
        self._seed = seed
        self._epochs = epochs
        self._shuffled: dict[int, tuple[str, ...]] = {}
        names = msgspec.json.encode([seed, epochs, *self._ids])
        self._digest = crc_text(crc64nvme(names))

    @property
    def digest(self) -> str:
        """Identity of ids, seed and number of epochs."""
        return self._digest

    def epoch(self, ordinal: int) -> int:
        """The epoch, from 0, of this place."""
        return ordinal // len(self._ids) if self._ids else 0

    def prompt(self, ordinal: int) -> str:
        """The prompt id at this place; IndexError when all epochs are over."""
        epoch = self.epoch(ordinal)
        if not self._ids or ordinal < 0 or (self._epochs is not None and epoch >= self._epochs):
            raise IndexError(f"no prompt {ordinal}: the data set is over")
        return self._order(epoch)[ordinal % len(self._ids)]

    def _order(self, epoch: int) -> tuple[str, ...]:
        if self._seed is None:
            return self._ids
        if epoch not in self._shuffled:
            if len(self._shuffled) >= 2:
                self._shuffled.pop(min(self._shuffled))
            mixed = list(self._ids)
            Random(f"{self._seed}/{epoch}").shuffle(mixed)  # noqa: S311 - an order, not a secret
            self._shuffled[epoch] = tuple(mixed)
        return self._shuffled[epoch]
