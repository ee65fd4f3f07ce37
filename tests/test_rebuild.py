"""A job whose etcd was lost comes back from its files, with numbers above everything that was ever used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slackwater.adapters.cli_rebuild import apply
from slackwater.backends.memory import MemoryStore
from slackwater.engine.config import JobConfig
from slackwater.engine.errors import ConfigError, CorruptCheckpoint, Refused
from slackwater.engine.keys import Keys
from slackwater.engine.manifest import Committed
from slackwater.engine.model import Checkpoint, Lineage
from slackwater.engine.rebuild import Found, plan_rebuild
from slackwater.engine.settings import bootstrap
from slackwater.engine.view import View

CONFIG = JobConfig(job="job")
KEYS = Keys("job")


def found(number: int, timeline: int, *, remote: bool = False, uid: str = "u", digest: str = "d") -> Found:
    """One committed.json of checkpoint `number` on `timeline`, whose parent is the timeline before."""
    record = Checkpoint(
        checkpoint=number,
        timeline=timeline,
        round=number + 1,
        training_step=number * 10,
        weight_version=number * 3,
        buffer_version=number,
        path=f"job/{uid}/t{timeline}/s{number}",
        manifest_digest=digest,
    )
    lineage: list[dict[str, Any]] = [
        msgspec.to_builtins(
            Lineage(timeline=t, parent=t - 1, selected=True, from_checkpoint=t - 1, from_version=99)
        )
        for t in range(timeline, 0, -1)
    ]
    committed = Committed(
        checkpoint=number,
        job="job",
        job_uid=uid,
        timeline=timeline,
        manifest_digest=digest,
        record=msgspec.to_builtins(record),
        lineage=tuple(lineage),
    )
    return Found(committed, record.path, f"s3://b/{record.path}" if remote else "")


def view_of(store: MemoryStore) -> View:
    """What the store holds of the job."""
    kvs = store.range(KEYS.root)
    return View(KEYS, {kv.key: kv for kv in kvs.kvs}, kvs.revision, {})


def test_records_come_back_and_numbers_jump() -> None:
    """Every record is there again, durable where S3 has it; timeline, versions and ids go on above all of them."""
    store = MemoryStore()
    files = [found(1, 1), found(2, 2), found(2, 2, remote=True), found(3, 2)]
    plan = plan_rebuild(CONFIG, view_of(store), files, {6: 20, 9: 30})
    apply(store, plan)
    view = view_of(store)
    assert sorted(view.checkpoints()) == [1, 2, 3]
    assert view.checkpoints()[2].state == "durable"
    assert view.timeline == plan.timeline == 1000
    assert view.head is not None
    assert view.head.version == 1_000_000
    assert view.last_checkpoint == 1000
    assert [record.checkpoint for record in view.eligible()] == [3, 2, 1]
    assert view.step_map() == {6: 20, 9: 30}
    assert view.recovery is not None
    assert view.recovery.phase == "fence"
    assert bootstrap(store, CONFIG).job_uid == "u"


def test_an_interrupted_rebuild_starts_nothing_and_can_be_repeated() -> None:
    """Without `config` no process of the job starts; the second run ends where the first would have."""
    store = MemoryStore()
    plan = plan_rebuild(CONFIG, view_of(store), [found(n, 1) for n in range(1, 60)], {})
    for txn in plan.txns[:-1]:
        assert store.txn(txn).succeeded
    with pytest.raises(Refused, match="rebuild"):
        bootstrap(store, CONFIG)
    apply(store, plan_rebuild(CONFIG, view_of(store), [found(n, 1) for n in range(1, 60)], {}))
    assert len(view_of(store).checkpoints()) == 59


def test_a_job_that_was_started_anew_over_old_data_is_replaced() -> None:
    """Somebody started coordinators on the empty etcd first: that job has no checkpoint and gives way."""
    store = MemoryStore()
    fresh = bootstrap(store, CONFIG)
    apply(store, plan_rebuild(CONFIG, view_of(store), [found(1, 1)], {}))
    assert bootstrap(store, CONFIG).job_uid == "u" != fresh.job_uid


def test_a_living_job_is_never_rebuilt() -> None:
    """With checkpoints in etcd there is nothing to rebuild, whatever lies on disk."""
    store = MemoryStore()
    apply(store, plan_rebuild(CONFIG, view_of(store), [found(1, 1)], {}))
    with pytest.raises(Refused, match="nothing to rebuild"):
        plan_rebuild(CONFIG, view_of(store), [found(1, 1)], {})


def test_nothing_is_guessed() -> None:
    """No files, two jobs of one name, or two contents for one id: one clear line, nothing planned."""
    view = view_of(MemoryStore())
    with pytest.raises(Refused, match=r"no committed\.json"):
        plan_rebuild(CONFIG, view, [], {})
    with pytest.raises(ConfigError, match="--job-uid"):
        plan_rebuild(CONFIG, view, [found(1, 1), found(2, 1, uid="v")], {})
    assert plan_rebuild(CONFIG, view, [found(1, 1), found(2, 1, uid="v")], {}, job_uid="v").checkpoints == (
        2,
    )
    with pytest.raises(CorruptCheckpoint, match="twice"):
        plan_rebuild(CONFIG, view, [found(1, 1), found(1, 1, remote=True, digest="e")], {})
