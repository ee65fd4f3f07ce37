"""Which checkpoints may go: first marked `deleting` by a guarded transaction, only then removed. Pure.

Never marked: what uploads, is pinned or read, the newest committed, the newest durable, the newest on the lineage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .model import Checkpoint, Pin, Upload
from .ports import Compare
from .view import View

__all__ = ["decide_retention", "expendable"]


def expendable(
    records: Sequence[Checkpoint], lineage: Sequence[Checkpoint], keep_last: int, in_use: Collection[int]
) -> list[int]:
    """Ids that may be marked, oldest first.

    `records` are all that are not being deleted, `lineage` those of them that a recovery could choose; order does not
    matter. `keep_last` newest of the lineage stay (-1: all of it); of abandoned timelines everything goes once the
    lineage has something newer.
    """
    on_lineage = sorted((record.checkpoint for record in lineage), reverse=True)
    if not on_lineage:
        return []
    durable = [record.checkpoint for record in records if record.state == "durable"]
    kept = set(on_lineage if keep_last < 0 else on_lineage[: max(1, keep_last)])
    kept |= {max(durable, default=0), max(record.checkpoint for record in records), *in_use}
    kept |= {record.checkpoint for record in records if record.pinned}
    newest = on_lineage[0]
    return sorted(r.checkpoint for r in records if r.checkpoint not in kept and r.checkpoint < newest)


def decide_retention(view: View, config: JobConfig) -> list[Action]:
    """Mark at most one checkpoint, and forget those whose files are reported gone. Nothing during a recovery."""
    keys = view.keys
    actions = []
    uploads = view.under(keys.uploads, Upload)
    for rest, upload in uploads.items():
        record = view.checkpoints().get(upload.checkpoint)
        if upload.state == "removed" and record is not None and record.state == "deleting":
            key, upload_key = keys.checkpoint(upload.checkpoint), keys.uploads + rest
            guards = (view.same(key), view.same(upload_key))
            text = f"checkpoint {upload.checkpoint} removed"
            log = ("removed", text, {"checkpoint": upload.checkpoint})
            actions.append(Action("forget checkpoint", guards, (delete(key), delete(upload_key)), log))
    if view.recovery is not None or view.go is None:
        return actions
    records = [record for record in view.checkpoints().values() if record.state != "deleting"]
    in_use = {upload.checkpoint for upload in uploads.values() if upload.state == "uploading"}
    in_use |= {pin.checkpoint for pin in view.under(keys.pins, Pin).values()}
    numbers = expendable(records, view.eligible(), config.checkpoint.keep_last, in_use)
    if numbers:
        key = keys.checkpoint(numbers[0])
        record = view.checkpoints()[numbers[0]]
        still = (
            view.same(key),
            view.same(keys.timeline),
            view.same(keys.checkpoint_head),
            view.none_newer(keys.pins),
            view.none_newer(keys.uploads),
            Compare(keys.recovery, "create", "=", 0),
        )
        marked = msgspec.structs.replace(record, state="deleting")
        actions.append(Action(f"mark {numbers[0]}", still, (put(key, marked),)))
    return actions
