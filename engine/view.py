"""A job as etcd holds it at one revision, with typed and cached access to every record."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from . import model
from .errors import StoreError
from .keys import Keys
from .ports import KV, Compare

__all__ = ["FirstSeen", "View"]

R = TypeVar("R", bound=model.Record)


class View:
    """Read-only records of one job at one revision. Not for writing: it holds no store.

    `at` is the wall-clock time for people that records written from this view carry; it never decides anything.
    """

    at = ""

    def __init__(
        self, keys: Keys, kvs: Mapping[str, KV], revision: int, cache: dict[str, tuple[int, model.Record]]
    ):
        self.keys = keys
        self.kvs = kvs
        self.revision = revision
        self._cache = cache
        self._sorted: list[str] | None = None
        self._under: dict[tuple[str, type[Any]], dict[str, Any]] = {}

    # -- single keys ---------------------------------------------------------------------------------------

    def record(self, key: str, kind: type[R]) -> R | None:
        """The decoded record of a key, or None when it is absent."""
        kv = self.kvs.get(key)
        if kv is None:
            return None
        cached = self._cache.get(key)
        if cached is None or cached[0] != kv.mod_revision or not isinstance(cached[1], kind):
            cached = (kv.mod_revision, model.decode(kind, kv.value, key))
            self._cache[key] = cached
        found = cached[1]
        return found if isinstance(found, kind) else None

    def is_readable(self, key: str, kind: type[R]) -> bool:
        """Whether a key is absent or holds a record of this kind."""
        try:
            self.record(key, kind)
        except StoreError:
            return False
        return True

    def mod(self, key: str) -> int:
        """A key's mod-revision; 0 when absent."""
        kv = self.kvs.get(key)
        return kv.mod_revision if kv is not None else 0

    def create(self, key: str) -> int:
        """A key's create-revision; 0 when absent."""
        kv = self.kvs.get(key)
        return kv.create_revision if kv is not None else 0

    def same(self, key: str) -> Compare:
        """The guard that a key is still as this view has it, present or absent."""
        return Compare(key, "mod", "=", self.mod(key))

    def none_newer(self, prefix: str) -> Compare:
        """The guard that no key below a prefix was written after this view (deletions are not seen)."""
        return Compare(prefix, "mod", "<", self.revision + 1, prefix=True)

    def under(self, prefix: str, kind: type[R]) -> dict[str, R]:
        """All records below a prefix, by the rest of their key, in key order.

        Found once for a view; the dict is the caller's own.
        """
        known = self._under.get((prefix, kind))
        if known is None:
            known = self._under[prefix, kind] = self._find_under(prefix, kind)
        return dict(known)

    def keys_under(self, prefix: str) -> list[str]:
        """The keys below a prefix, in order."""
        if self._sorted is None:
            self._sorted = sorted(self.kvs)
        first = last = bisect_left(self._sorted, prefix)
        while last < len(self._sorted) and self._sorted[last].startswith(prefix):
            last += 1
        return self._sorted[first:last]

    def _find_under(self, prefix: str, kind: type[R]) -> dict[str, R]:
        found: dict[str, R] = {}
        for key in self.keys_under(prefix):
            if prefix == self.keys.requests and not self.is_readable(key, kind):
                continue  # a person's slip of the pen decides nothing
            record = self.record(key, kind)
            if record is not None:
                found[key[len(prefix) :]] = record
        return found

    # -- the job's records ---------------------------------------------------------------------------------

    @property
    def timeline(self) -> int:
        """The current timeline; 0 before the job's birth."""
        record = self.record(self.keys.timeline, model.Timeline)
        return record.timeline if record is not None else 0

    @property
    def config(self) -> model.ConfigRecord | None:
        """The job's configuration."""
        return self.record(self.keys.config, model.ConfigRecord)

    @property
    def go(self) -> model.Go | None:
        """The trainer's grant."""
        return self.record(self.keys.go, model.Go)

    @property
    def head(self) -> model.WeightHead | None:
        """The newest accepted weight version."""
        return self.record(self.keys.weight_head, model.WeightHead)

    @property
    def freeze(self) -> model.Freeze | None:
        """The freeze flag."""
        return self.record(self.keys.freeze, model.Freeze)

    @property
    def round(self) -> model.Round | None:
        """The open round."""
        return self.record(self.keys.round, model.Round)

    @property
    def recovery(self) -> model.Recovery | None:
        """The open recovery."""
        return self.record(self.keys.recovery, model.Recovery)

    @property
    def sampling(self) -> model.Sampling:
        """The sampling parameters in force."""
        return self.record(self.keys.sampling, model.Sampling) or model.Sampling()

    @property
    def last_checkpoint(self) -> int:
        """The last checkpoint's id; 0 when there is none."""
        record = self.record(self.keys.checkpoint_head, model.CheckpointHead)
        return record.checkpoint if record is not None else 0

    def participants(self) -> dict[str, model.Participant]:
        """Registrations by name."""
        return self.under(self.keys.participants, model.Participant)

    def participant(self, name: str) -> model.Participant | None:
        """One registration."""
        return self.record(self.keys.participant(name), model.Participant)

    def alive(self, name: str) -> model.Alive | None:
        """One liveness record."""
        return self.record(self.keys.alive(name), model.Alive)

    def health(self, name: str) -> model.Health | None:
        """The leader's verdict."""
        return self.record(self.keys.health(name), model.Health)

    def holds(self) -> dict[str, model.Hold]:
        """Reasons to hold the trainer."""
        return self.under(self.keys.holds, model.Hold)

    def routes(self) -> dict[str, model.Route]:
        """Routes by rollout."""
        return self.under(self.keys.routes, model.Route)

    def votes(self, number: int) -> dict[str, model.Vote]:
        """Votes of a round by participant."""
        return self.under(self.keys.votes(number), model.Vote)

    def acks(self, timeline: int) -> dict[str, model.Ack]:
        """Acknowledgements of a recovery by participant."""
        return self.under(self.keys.acks(timeline), model.Ack)

    def checkpoints(self) -> dict[int, model.Checkpoint]:
        """Checkpoint records by id, oldest first."""
        found = self.under(self.keys.checkpoints, model.Checkpoint)
        return {record.checkpoint: record for record in found.values()}

    def weight_version(self, version: int) -> model.WeightVersion | None:
        """One weight version."""
        return self.record(self.keys.weight_version(version), model.WeightVersion)

    def step_map(self) -> dict[int, int]:
        """Weight version -> training step, for every version on the lineage that is still recorded."""
        lineage = self.lineage()
        found = self.under(self.keys.weight_versions, model.WeightVersion).values()
        return {
            record.version: record.step
            for record in found
            if record.timeline in lineage and record.version <= lineage[record.timeline][1]
        }

    def lineage(self) -> dict[int, tuple[int, int]]:
        """Timeline -> (highest eligible checkpoint, highest eligible version), from now back to the root.

        The current timeline is unbounded; an ancestor counts up to where its child on the path left it. A timeline
        that was fenced before it selected anything is passed over: nothing happened on it.
        """
        found: dict[int, tuple[int, int]] = {}
        timeline = self.timeline
        checkpoint, version = 1 << 62, 1 << 62
        while timeline > 0 and timeline not in found:
            record = self.record(self.keys.timeline_record(timeline), model.Lineage)
            if record is None:
                break
            found[timeline] = (checkpoint, version)
            if record.selected:
                checkpoint = min(checkpoint, record.from_checkpoint)
                version = min(version, record.from_version)
            timeline = record.parent
        return found

    def eligible(self) -> list[model.Checkpoint]:
        """Checkpoints on the lineage that are not being deleted, newest first."""
        lineage = self.lineage()
        return [
            record
            for number, record in sorted(self.checkpoints().items(), reverse=True)
            if record.state != "deleting"
            and record.timeline in lineage
            and number <= lineage[record.timeline][0]
        ]


@dataclass(slots=True)
class FirstSeen:
    """When this process first saw each key as it is now, on its monotonic clock.

    The leader's only private memory: losing it may lengthen a wait, never shorten one.
    """

    times: dict[str, tuple[int, float]]

    def update(self, changed: Iterable[str], mod: Callable[[str], int], now: float) -> None:
        """Note the keys that changed; an absent key counts as revision 0 from the moment it was missed."""
        for key in changed:
            revision = mod(key)
            known = self.times.get(key)
            if known is None or known[0] != revision:
                self.times[key] = (revision, now)

    def elapsed(self, key: str, mod: int, now: float) -> float:
        """Seconds since the key was first seen at this revision; 0 when it was not seen yet."""
        known = self.times.get(key)
        return max(0.0, now - known[1]) if known is not None and known[0] == mod else 0.0
