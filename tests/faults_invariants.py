"""What must hold of a job after it was broken: read from etcd as it is, from every change etcd has seen, and from disk.

It shares no code with what decided all that, except the names of keys and the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slackwater.backends.local import LocalTier
from slackwater.engine.keys import Keys
from slackwater.engine.ports import Event, StateStore

__all__ = ["check_disk", "check_history", "check_invariants", "changes"]

_PHASES = ("prepare", "ready", "save", "seal")


def changes(store: StateStore, keys: Keys, first: int) -> Iterator[list[Event]]:
    """Every change of the job since a revision, grouped by transaction."""
    last = store.range(keys.root).revision
    group: list[Event] = []
    with contextlib.closing(store.watch(keys.root, first)) as watch:
        while True:
            batch = watch.next(5.0)
            if batch is None:
                raise AssertionError("etcd does not give its history")
            for event in batch.events:
                if group and event.kv.mod_revision != group[0].kv.mod_revision:
                    yield group
                    group = []
                if event.kv.mod_revision <= last:
                    group.append(event)
            if batch.revision >= last:
                if group:
                    yield group
                return


def check_invariants(
    store: StateStore,
    keys: Keys,
    tier: LocalTier,
    first_revision: int,
) -> None:
    """Assert everything; the job must be at rest (nothing open)."""
    found = {kv.key[len(keys.root) :]: json.loads(kv.value) for kv in store.range(keys.root).kvs}
    records = _numbered(found, "checkpoints/")
    assert list(records) == list(range(1, len(records) + 1)), f"I2: checkpoints {list(records)}"
    assert found.get("checkpoint_head", {"checkpoint": 0})["checkpoint"] == len(records)
    versions = _numbered(found, "weights/version/")
    head = found["weights/head"]["version"]
    oldest = min(versions)  # older ones may be forgotten, but none in between
    assert list(versions) == list(range(oldest, head + 1)), f"I3: versions {list(versions)}, head {head}"
    attempts = {v["attempt"] for v in versions.values()}
    assert len(attempts) == len(versions), "I3: one attempt is two versions"
    _check_step_map(versions)
    for number, record in records.items():
        version = versions[record["weight_version"]]
        assert (version["step"], version["timeline"]) == (record["training_step"], record["timeline"]), (
            f"I1: checkpoint {number} of {record} has {version}"
        )
        check_disk(tier.root, record)
    left = {key: found[key] for key in found if key.startswith(("freeze", "rounds/", "recovery/"))}
    # An answer that was sent twice for want of a reply may come after the end; the next fence takes it away.
    late = f"recovery/acks/{found['timeline']['timeline']:08d}/"
    assert not [key for key in left if not key.startswith(late)], f"left behind: {left}"
    timelines = _numbered(found, "timelines/")
    top = found["timeline"]["timeline"]
    assert list(timelines) == list(range(1, top + 1))
    assert timelines[1]["parent"] == 0
    assert all(0 < record["parent"] < number for number, record in timelines.items() if number > 1)
    go, trainer = found["go"], found["participants/trainer"]
    assert (go["timeline"], go["incarnation"]) == (top, trainer["incarnation"]), "I8: the grant"
    check_history(store, keys, first_revision)
    _check_log(found, records)


def _numbered(found: dict[str, Any], prefix: str) -> dict[int, Any]:
    return {int(key[len(prefix) :]): value for key, value in sorted(found.items()) if key.startswith(prefix)}


def _check_step_map(versions: dict[int, Any]) -> None:
    last: dict[int, int] = {}
    for number, version in versions.items():
        assert version["version"] == number
        timeline, step = version["timeline"], version["step"]
        assert step > last.get(timeline, -1), f"I3: version {number} is of step {step} again or before"
        last[timeline] = step


def check_disk(root: Path, record: dict[str, Any]) -> None:
    """The manifest is the recorded one, and every file that it names has the recorded bytes."""
    directory = root / record["path"]
    raw = (directory / "manifest.json").read_bytes()
    assert "sha256:" + hashlib.sha256(raw).hexdigest() == record["manifest_digest"]
    manifest = json.loads(raw)
    vector = manifest["vector"]
    assert (vector["training_step"], vector["weight_version"]) == (
        record["training_step"],
        record["weight_version"],
    )
    assert manifest["timeline"] == record["timeline"]
    assert manifest["round"] == record["round"]
    assert {part["participant"] for part in manifest["parts"]} >= {"trainer"}
    assert len(manifest["files"]) == record["files"] > 0
    for entry in manifest["files"]:
        body = (directory / entry["path"]).read_bytes()
        assert len(body) == entry["size_bytes"]
        if entry["digest"].startswith("sha256:"):
            assert "sha256:" + hashlib.sha256(body).hexdigest() == entry["digest"], entry["path"]


def _check_log(found: dict[str, Any], records: dict[int, Any]) -> None:
    """The history says what happened: each commit once and truly, every recovery, and epochs never go back."""
    log = list(_numbered(found, "log/").values())
    epochs = [entry["epoch"] for entry in log]
    assert epochs == sorted(epochs), f"I4: an older leader wrote history: {epochs}"
    commits = {entry["fields"]["checkpoint"]: entry["fields"] for entry in log if entry["kind"] == "commit"}
    assert len(commits) == sum(entry["kind"] == "commit" for entry in log)
    for number, fields in commits.items():
        record = records[number]
        assert (fields["step"], fields["version"], fields["round"]) == (
            record["training_step"],
            record["weight_version"],
            record["round"],
        )
    assert set(records) == set(commits), f"the history knows only {sorted(commits)} of {len(records)}"
    begun = {e["fields"]["recovery"] for e in log if e["fields"].get("phase") == "fence"}
    assert begun == set(range(2, found["timeline"]["timeline"] + 1)), f"recoveries begun in the log: {begun}"


# -- every change that there was -----------------------------------------------------------------------------


def check_history(store: StateStore, keys: Keys, first: int) -> None:
    """Replay all changes since `first` and assert what each one was allowed to be, given what was there before it."""
    at_start = store.range(keys.root, revision=first - 1).kvs if first > 1 else ()
    now: dict[str, Any] = {kv.key[len(keys.root) :]: json.loads(kv.value) for kv in at_start}
    for group in changes(store, keys, first):
        before = dict(now)
        for event in group:
            key = event.kv.key[len(keys.root) :]
            if event.kind == "delete":
                now.pop(key, None)
            else:
                now[key] = json.loads(event.kv.value)
        revision = group[0].kv.mod_revision
        for event in group:
            key = event.kv.key[len(keys.root) :]
            if event.kind == "put":
                _judge(revision, key, before, now)


def _judge(revision: int, key: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    new, old, said = now[key], before.get(key), f"revision {revision}, {key}: {now[key]}"
    timeline = now["timeline"]["timeline"]
    if key.startswith("checkpoints/") and old is None:
        _judge_commit(said, new, before, now)
    elif key.startswith("weights/version/"):
        head = before.get("weights/head", {"version": 0})["version"]
        assert old is None, f"I3 {said}"
        assert new["version"] == head + 1 == now["weights/head"]["version"], f"I3 {said}"
        assert new["timeline"] == timeline, f"I5 {said}"
        assert "freeze" not in before, f"I6 {said}"
        author = before["participants/trainer"]
        if len(author["incarnation"]) == 12 and author["host"].startswith("host-"):  # ours name their author
            assert new["attempt"].startswith(author["incarnation"]), f"I5 {said}"
    elif key == "freeze":
        assert old is None, said
        assert now["rounds/current"]["timeline"] == timeline, said
        assert new["round"] == now["rounds/current"]["round"], said
    elif key == "rounds/current" and old is not None:
        assert new["round"] == old["round"], said
        assert _PHASES.index(new["phase"]) - _PHASES.index(old["phase"]) in (0, 1), said
    elif key.startswith("rounds/votes/"):
        registered = before[f"participants/{new['name']}"]
        assert new["incarnation"] == registered["incarnation"], f"I5 {said}"
        assert new["timeline"] == timeline == before["rounds/current"]["timeline"], f"I5 {said}"
    elif key.startswith("routes/"):
        registered = before[f"participants/{new['name']}"]
        assert new["incarnation"] == registered["incarnation"], f"I5 {said}"
        assert registered["timeline"] == new["timeline"] == timeline, f"I7 {said}"
        assert new["version"] == before["weights/head"]["version"], f"I7 {said}"
        health = before.get(f"health/{new['name']}")
        failed = health is not None and health["state"] == "failed"
        assert not failed or health["incarnation"] != new["incarnation"], f"I5 {said}"
    elif key == "go":
        assert old is None, f"I8 {said}"
        assert new["incarnation"] == before["participants/trainer"]["incarnation"], f"I8 {said}"
        assert new["timeline"] == timeline, f"I8 {said}"
    elif key == "timeline" and old is not None:
        assert new["timeline"] == old["timeline"] + 1, said
        assert not {"go", "freeze", "rounds/current"} & set(now), said
        assert not [other for other in now if other.startswith("routes/")], said
    elif key.startswith("recovery/acks/"):
        registered = now[f"participants/{new['name']}"]
        assert new["incarnation"] == registered["incarnation"], f"I5 {said}"
        assert new["recovery"] == timeline == registered["timeline"], f"I5 {said}"


def _judge_commit(said: str, new: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> None:
    head = before.get("checkpoint_head", {"checkpoint": 0})["checkpoint"]
    assert new["checkpoint"] == head + 1 == now["checkpoint_head"]["checkpoint"], f"I2 {said}"
    round_ = before["rounds/current"]
    assert round_["phase"] == "seal", f"I1 {said}"
    assert new["timeline"] == round_["timeline"] == now["timeline"]["timeline"], f"I5 {said}"
    assert "rounds/current" not in now, said
    assert "freeze" not in now, said
    cut = (round_["step"], round_["version"])
    assert (new["training_step"], new["weight_version"]) == cut, f"I1 {said}"
    assert "trainer" in round_["voters"], f"I1 {said}"
    for name, incarnation in round_["voters"].items():
        vote = before[f"rounds/votes/{round_['round']:08d}/{name}"]
        assert vote["state"] == ("sealed" if name == "trainer" else "saved"), f"I1 {said}: {vote}"
        assert vote["incarnation"] == incarnation, f"I1 {said}: {vote}"
        assert (vote["step"], vote["version"]) == cut, f"I1 {said}: {vote}"
