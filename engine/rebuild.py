"""A job whose etcd was lost is put back from the `committed.json` files of both tiers, never from guesses. Pure.

Records are written first, in small transactions, and `config` last: a job without it does not start, so a rebuild that
was interrupted is simply begun again. Numbers jump, and only here: what was used after the newest file is not known,
so timelines, weight versions and checkpoint ids go on from the next round number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .action import delete, put
from .config import JobConfig
from .errors import ConfigError, CorruptCheckpoint, Refused
from .keys import Keys
from .manifest import Committed
from .model import (
    Checkpoint,
    CheckpointHead,
    ConfigRecord,
    Lineage,
    Recovery,
    RoundHead,
    Sampling,
    Timeline,
    WeightHead,
    WeightVersion,
)
from .ports import Compare, Op, Txn
from .view import View

__all__ = ["Found", "Rebuild", "plan_rebuild"]

_TIMELINE_JUMP = 1000
_VERSION_JUMP = 1_000_000
_CHECKPOINT_JUMP = 1000
_BATCH = 40


@dataclass(frozen=True, slots=True)
class Found:
    """One `committed.json`: where it lies (`remote` is the attempt's address in S3, or "" for the local tier)."""

    committed: Committed
    path: str
    remote: str = ""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What will be written: the transactions in order (the last one makes the job), and the new numbers."""

    job_uid: str
    checkpoints: tuple[int, ...]
    timeline: int
    next_version: int
    next_checkpoint: int
    txns: tuple[Txn, ...]


def plan_rebuild(
    config: JobConfig, view: View, found: Sequence[Found], step_map: dict[int, int], *, job_uid: str = ""
) -> Rebuild:
    """Plan the rebuild of `config.job` from what was found; `step_map` is the newest manifest's.

    `view` is what etcd holds below the job's prefix: nothing, the remains of an earlier rebuild, or a job that was
    started anew and waits for an operator. Raises `Refused` when a living job has checkpoints, when nothing was found,
    or when the files are of several jobs of this name and `job_uid` does not say which.
    """
    if view.config is not None and view.checkpoints():
        raise Refused(f"job {config.job!r} has its checkpoints in etcd: there is nothing to rebuild")
    uids = sorted({one.committed.job_uid for one in found if one.committed.job == config.job})
    if not uids:
        raise Refused(f"no committed.json of job {config.job!r} on the local tier or in the bucket")
    if job_uid not in ("", *uids) or (not job_uid and len(uids) > 1):
        raise ConfigError(
            f"the files are of {len(uids)} jobs of this name ({', '.join(uids)}): say --job-uid"
        )
    uid = job_uid or uids[0]
    ours = [one for one in found if (one.committed.job, one.committed.job_uid) == (config.job, uid)]
    records = _records(ours)
    lineages = _lineages(ours)
    newest = records[max(records)]
    keys = Keys(config.job)
    timeline = _jump(max(max(lineages, default=0), newest.timeline), _TIMELINE_JUMP)
    version = _jump(
        max([record.weight_version for record in records.values()] + list(step_map)), _VERSION_JUMP
    )
    checkpoint = _jump(max(records), _CHECKPOINT_JUMP)
    ops: list[Op] = [put(keys.checkpoint(number), record) for number, record in records.items()]
    ops += [put(keys.timeline_record(number), record) for number, record in lineages.items()]
    for old, step in step_map.items():
        entry = WeightVersion(version=old, step=step, timeline=newest.timeline)
        ops.append(put(keys.weight_version(old), entry))
    first = Txn((view.same(keys.config), view.same(keys.checkpoint_head)), (delete(keys.root, prefix=True),))
    # Once the old keys are gone `config` is absent until the last transaction.
    absent = Compare(keys.config, "create", "=", 0)
    batches = [Txn((absent,), tuple(ops[at : at + _BATCH])) for at in range(0, len(ops), _BATCH)]
    last = Txn((absent,), _birth(keys, config, uid, newest, timeline, version, checkpoint))
    return Rebuild(
        job_uid=uid,
        checkpoints=tuple(sorted(records)),
        timeline=timeline,
        next_version=version + 1,
        next_checkpoint=checkpoint + 1,
        txns=(first, *batches, last),
    )


def _records(found: Sequence[Found]) -> dict[int, Checkpoint]:
    """Checkpoint records by id; a copy in S3 makes one durable."""
    records: dict[int, Checkpoint] = {}
    for one in found:
        record = _convert(one.committed.record, Checkpoint, one.path)
        if record.path != one.path or record.checkpoint != one.committed.checkpoint:
            raise CorruptCheckpoint(
                f"{one.path}: committed.json is of another checkpoint ({record.path})", one.path
            )
        old = records.get(record.checkpoint)
        if old is not None and old.manifest_digest != record.manifest_digest:
            raise CorruptCheckpoint(
                f"checkpoint {record.checkpoint} exists twice with different content", one.path
            )
        remote = one.remote or (old.remote if old is not None else "")
        state = "durable" if remote else "committed"
        records[record.checkpoint] = msgspec.structs.replace(record, state=state, remote=remote, pinned=False)
    return records


def _lineages(found: Sequence[Found]) -> dict[int, Lineage]:
    lineages: dict[int, Lineage] = {}
    for one in found:
        for raw in one.committed.lineage:
            record = _convert(raw, Lineage, one.path)
            lineages[record.timeline] = record
    return lineages


def _convert(raw: dict[str, Any], kind: type[Any], path: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"{path}: committed.json: {error}", path) from error


def _jump(number: int, step: int) -> int:
    return (number // step + 1) * step


def _birth(
    keys: Keys, config: JobConfig, uid: str, newest: Checkpoint, timeline: int, version: int, checkpoint: int
) -> tuple[Op, ...]:
    cause = "rebuilt from committed.json files"
    return (
        put(keys.config, ConfigRecord(job_uid=uid, settings=msgspec.to_builtins(config))),
        put(keys.timeline, Timeline(timeline=timeline)),
        put(
            keys.timeline_record(timeline),
            Lineage(timeline=timeline, parent=newest.timeline, head_at_fence=version, cause=cause),
        ),
        put(keys.recovery, Recovery(recovery=timeline, cause=cause)),
        put(
            keys.weight_head, WeightHead(version=version, step=newest.training_step, timeline=newest.timeline)
        ),
        put(keys.checkpoint_head, CheckpointHead(checkpoint=checkpoint)),
        put(keys.round_head, RoundHead(round=_jump(newest.round, _CHECKPOINT_JUMP))),
        put(keys.sampling, Sampling(revision=newest.sampling_revision, parameters=dict(config.sampling))),
    )
