"""Which weight versions' records may go: only below everything that anything refers to. Pure.

The step map is looked up, never computed, so a version stays on record as long as a checkpoint, a route, a reader, a
round, or a sample that may still be trained on names it. Only the oldest go: a version that is missing *between*
recorded ones means to a buffer that a recovery abandoned it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .action import Action, delete
from .config import JobConfig
from .model import Pin, Serving, WeightVersion
from .ports import Compare
from .view import View

__all__ = ["decide_step_map", "expendable_versions"]

_BATCH = 48  # deletions in one transaction, beside its guards


def expendable_versions(
    versions: Iterable[WeightVersion], referred: Iterable[int], keep_newest: int, staleness_steps: int
) -> list[int]:
    """Versions that nothing needs any more, oldest first.

    `referred` are those that something names; a version is also needed while a sample that it made may be trained on at
    the step of a needed one, that is up to `staleness_steps` before it; so are the `keep_newest` newest.
    """
    known = sorted(versions, key=lambda record: record.version)
    named = {*referred, *(record.version for record in known[-max(1, keep_newest) :])}
    needed = [record for record in known if record.version in named]
    if not needed:
        return []
    oldest_step = min(record.step for record in needed) - staleness_steps
    floor = min(needed[0].version, *(r.version for r in known if r.step >= oldest_step))
    return [record.version for record in known if record.version < floor]


def decide_step_map(view: View, config: JobConfig) -> list[Action]:
    """Forget a batch of the oldest versions once there is one worth a transaction. Nothing during a recovery."""
    if view.recovery is not None or view.go is None:
        return []
    keys, keep = view.keys, config.weights.keep_versions
    versions = view.under(keys.weight_versions, WeightVersion).values()
    gone = expendable_versions(versions, _referred(view), keep, config.max_staleness_steps)[:_BATCH]
    if len(gone) < min(_BATCH, 2 * keep):
        return []
    guards = (
        view.same(keys.timeline),
        Compare(keys.recovery, "create", "=", 0),
        view.none_newer(keys.checkpoints),
        view.none_newer(keys.routes),
        view.none_newer(keys.pins),
    )
    text = f"forget versions {gone[0]} to {gone[-1]}"
    return [Action(text, guards, tuple(delete(keys.weight_version(version)) for version in gone))]


def _referred(view: View) -> set[int]:
    """Versions that a record names; every checkpoint counts, since a rebuilt or pinned one may be gone back to."""
    found = {record.weight_version for record in view.checkpoints().values()}
    found |= {route.version for route in view.routes().values()}
    found |= {pin.version for pin in view.under(view.keys.pins, Pin).values() if pin.version}
    for holder in (view.head, view.record(view.keys.serving, Serving), view.freeze, view.round):
        if holder is not None and holder.version:
            found.add(holder.version)
    return found
