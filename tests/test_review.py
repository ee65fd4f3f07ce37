"""Sequences that once ended training or stopped every coordinator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slackwater.adapters.trainer_rounds import OpenSave, RoundDriver
from slackwater.adapters.trainer_uploads import Uploader
from slackwater.adapters.trainer_writer import PartWriter, SaveJob
from slackwater.engine.errors import DeadlineExceeded, NoSpace, StoreError
from slackwater.engine.keys import Keys
from slackwater.engine.model import Checkpoint, LogEntry, Record, Request, encode
from slackwater.engine.ports import KV
from slackwater.engine.view import View

KEYS = Keys("job")


class Link:
    """What a rank is told."""

    def __init__(self) -> None:
        self.told: dict[int, str] = {}

    def tell(self, number: int, outcome: str) -> None:
        """Note an outcome."""
        self.told[number] = outcome

    def forget(self, number: int) -> None:
        """Nothing is kept."""

    def send_part(self, number: int, part: bytes) -> None:
        """Nobody listens."""

    send_failure = send_part

    def outcome(self, number: int, timeout_seconds: float) -> str:
        """Rank 0 never says."""
        raise DeadlineExceeded("rank 0 did not say")


def make_view(*records: tuple[str, Record]) -> View:
    """A view of these keys."""
    kvs = {key: KV(key, encode(record), at, at) for at, (key, record) in enumerate(records, 1)}
    return View(KEYS, kvs, len(kvs), {})


def make_driver(link: Link, tier: Any = None) -> RoundDriver:
    """A driver whose role has written nothing."""
    role: Any = SimpleNamespace(membership=SimpleNamespace(written_revision=0))
    return RoundDriver(role, tier, link, 1, lambda record: None)  # type: ignore[arg-type]


def make_save(number: int, token: int) -> OpenSave:
    """A save of a round."""
    header: Any = SimpleNamespace(round=number, job="job", job_uid="u")
    return OpenSave(header=header, token=token, path=f"job/u/t1/s1-r{number}-a", blocked_s=0.1)


def aborted(number: int) -> tuple[str, Record]:
    """The leader's line about an abort."""
    entry = LogEntry(kind="abort", text="", fields={"round": number, "reason": "late"}, timeline=1, epoch=1)
    return KEYS.log(number), entry


def test_a_cut_before_the_last_round_was_served_forgets_neither() -> None:
    """Both rounds' ends are told; a save that is forgotten leaves its writer waiting until training ends."""
    link = Link()
    driver = make_driver(link)
    driver.begin(make_save(1, 5))
    driver.begin(make_save(2, 9))
    driver.step(make_view(aborted(1), aborted(2)))
    assert link.told == {1: "late", 2: "late"}
    assert not driver.open
    assert driver.wait_closed(0.0)


def test_a_full_disk_at_committed_json_does_not_end_training() -> None:
    """The commit stands, its record is repaired later."""

    def full(*args: object) -> None:
        raise NoSpace("full")

    link, tier = Link(), SimpleNamespace(write_json=full)
    driver, save = make_driver(link, tier), make_save(1, 5)
    driver.begin(save)
    record = Checkpoint(
        checkpoint=1,
        timeline=1,
        round=1,
        training_step=1,
        weight_version=1,
        buffer_version=0,
        path=save.path,
        manifest_digest="d",
    )
    driver.step(make_view((KEYS.checkpoint(1), record)))
    assert link.told == {1: ""}
    assert not driver.open


def test_an_end_that_nobody_tells_leaves_the_files_and_training_alone() -> None:
    """The round may be committed when etcd is back."""
    removed: list[str] = []

    def fail(*args: object) -> Path:
        raise StoreError("a disk error")

    tier: Any = SimpleNamespace(create=fail, remove=removed.append)
    writer = PartWriter(tier, Link(), 0, 0.1)  # type: ignore[arg-type]
    staged: Any = SimpleNamespace(release=lambda: None)
    writer.submit(SaveJob(round=1, step=1, path="p", staged=staged))
    assert writer.drain(10)
    writer.close()
    assert writer.crashed is None
    assert "did not say" in writer.last_error
    assert not removed


@pytest.mark.parametrize("error", [NoSpace("etcd is full"), OSError(5, "bad disk")])
def test_an_upload_that_fails_does_not_end_training(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full etcd or a bad disk is an error of the upload, not of the training."""
    monkeypatch.setattr("slackwater.adapters.trainer_uploads._FIRST_WAIT_S", 0.001)

    def fail(*args: object) -> Any:
        raise error

    told = fail if isinstance(error, NoSpace) else lambda upload: True
    role: Any = SimpleNamespace(membership=SimpleNamespace(incarnation="i"), upload=told)
    tier: Any = SimpleNamespace(path=fail)
    uploader = Uploader(role, tier, SimpleNamespace(), "s3://b/{}".format)  # type: ignore[arg-type]
    if isinstance(error, NoSpace):
        tier.path = lambda path: (_ for _ in ()).throw(error)
    uploader.submit(
        Checkpoint(
            checkpoint=1,
            timeline=1,
            round=1,
            training_step=1,
            weight_version=1,
            buffer_version=0,
            path="p",
            manifest_digest="d",
        )
    )
    assert uploader.drain(10)
    uploader.close()
    assert uploader.crashed is None
    assert uploader.error is not None


def test_a_request_that_cannot_be_read_hides_no_other() -> None:
    """One bad key of an operator stops nothing."""
    view = make_view((KEYS.request("b"), Request(kind="hold")))
    kvs = {**view.kvs, KEYS.request("a"): KV(KEYS.request("a"), b"{", 1, 1)}
    view = View(KEYS, kvs, 2, {})
    assert list(view.under(KEYS.requests, Request)) == ["b"]
