"""A whole job whose etcd is lost for good: rebuilt from its files, it goes on with the same commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster, S3Server
from tests.test_bad_input import slackwater
from tests.trainer_jobs import Job, running_job, wait_until

pytestmark = pytest.mark.real


def newest_etcd(directory: Path) -> EtcdCluster:
    """An etcd that has never seen anything."""
    cluster = EtcdCluster(directory, unsafe_no_fsync=True)
    cluster.start()
    return cluster


def train(job: Job, steps: int) -> tuple[int, int]:
    """Run the trainer on two ranks until it ends; (the step that it began at, the checkpoint that it came from)."""
    gang = job.start(steps=steps)
    assert gang.wait(90) == [0, 0], gang.errors()
    (restored,) = gang.events("restored")
    return restored["step"], restored["checkpoint"]


def rebuild(job: Job, s3: S3Server, *options: str) -> str:
    """Run `slackwater rebuild`, which must succeed; what it printed."""
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    done = slackwater("rebuild", "--config", job.config, *options, **keys)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("host_lost", [False, True], ids=["local_tier", "bucket_alone"])
def test_a_job_without_its_etcd_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, job: str, keyed_s3: S3Server, host_lost: bool
) -> None:
    """Nothing starts by itself over the data; after `rebuild` the same commands go on, above every old number."""
    first = newest_etcd(tmp_path / "etcd-a")
    try:
        with running_job(tmp_path / "job", job, first.endpoints, keyed_s3) as running:
            assert train(running, 9) == (0, 0)
            wait_until(lambda: all(r.state == "durable" for r in running.view().checkpoints().values()))
            before = running.view()
    finally:
        first.kill()
    records = before.checkpoints()
    newest = records[max(records)]
    assert before.head is not None
    if host_lost:
        shutil.rmtree(running.local)

    second = newest_etcd(tmp_path / "etcd-b")
    try:
        with running_job(tmp_path / "job", job, second.endpoints, keyed_s3) as unknown:
            gang = unknown.start(steps=12)
            held = wait_until(
                lambda: (r := unknown.view().recovery) is not None and r.phase == "needs_operator" and r
            )
            assert "slackwater rebuild" in held.note
            assert not gang.events("step")
        assert "say --yes" in rebuild(unknown, keyed_s3)
        assert "rebuilt" in rebuild(unknown, keyed_s3, "--yes")
        with running_job(tmp_path / "job", job, second.endpoints, keyed_s3) as again:
            assert train(again, 14) == (newest.training_step, newest.checkpoint)
            after = again.view()
    finally:
        second.kill()
    assert after.config is not None
    assert before.config is not None
    assert after.config.job_uid == before.config.job_uid
    assert after.timeline > before.timeline
    assert after.head is not None
    assert after.head.version > before.head.version
    fresh = set(after.checkpoints()) - set(records)
    assert fresh
    assert min(fresh) > max(records)
    assert {n: r.manifest_digest for n, r in after.checkpoints().items() if n in records} == {
        n: r.manifest_digest for n, r in records.items() if n in after.checkpoints()
    }
