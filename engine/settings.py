"""A job's birth in etcd, and the comparison of what a joining process brings with what is there."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import msgspec

from .action import put
from .config import JobConfig, differing
from .errors import ConfigError, Refused, Unavailable
from .keys import Keys
from .model import ConfigRecord, Lineage, Recovery, Sampling, Timeline
from .ports import Compare, StateStore, Txn

__all__ = ["bootstrap", "read_config"]


def read_config(record: ConfigRecord) -> JobConfig:
    """The settings of a job as etcd has them; `ConfigError` when they are not valid for this program."""
    try:
        return msgspec.convert(record.settings, JobConfig).checked()
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings in etcd are not valid for this version: {error}") from error


def bootstrap(store: StateStore, config: JobConfig, *, create: bool = True) -> ConfigRecord:
    """Create the job in one transaction, or compare our settings with those it was created with.

    Returns the job's configuration record. Blocks for a few calls. Raises `Refused` naming the settings that differ,
    or when data of this job exist without a configuration (etcd was lost or edited); with `create=False` also when
    there is no such job.
    """
    keys = Keys(config.job)
    for _ in range(3):
        kv = store.get(keys.config)
        if kv is not None:
            return _compare(config, msgspec.json.decode(kv.value, type=ConfigRecord))
        if not create:
            raise Refused(f"there is no job {config.job!r} in this etcd")
        present = [
            found.key for found in store.range(keys.root).kvs if not found.key.startswith(keys.leaders)
        ]
        if present:
            raise Refused(
                f"job {config.job!r} has no configuration but {len(present)} keys ({present[0]}): "
                "use `slackwater rebuild`"
            )
        try:
            store.txn(_birth(keys, config))
        except Unavailable:
            continue  # the next read tells
    raise Unavailable(f"job {config.job!r} could not be created: etcd does not answer reliably")


def _birth(keys: Keys, config: JobConfig) -> Txn:
    record = ConfigRecord(
        job_uid=uuid.uuid4().hex,
        settings=msgspec.to_builtins(config),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return Txn(
        (Compare(keys.config, "create", "=", 0),),
        (
            put(keys.config, record),
            put(keys.timeline, Timeline(timeline=1)),
            put(keys.timeline_record(1), Lineage(timeline=1, parent=0, cause="birth")),
            put(keys.recovery, Recovery(recovery=1, cause="birth")),
            put(keys.sampling, Sampling(revision=1, parameters=dict(config.sampling))),
        ),
    )


def _compare(config: JobConfig, record: ConfigRecord) -> ConfigRecord:
    ours: dict[str, Any] = msgspec.to_builtins(config)
    theirs: dict[str, Any] = msgspec.to_builtins(read_config(record))
    names = differing(ours, theirs)
    if names:
        raise Refused(
            f"job {config.job!r} runs with other settings: {', '.join(names)} differ from what is in etcd"
        )
    return record
