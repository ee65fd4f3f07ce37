"""A training script attached to a real job: etcd, a coordinator, and ranks that are really killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster

from .trainer_jobs import running_job

pytestmark = pytest.mark.real


def test_killed_gang_comes_back_bit_equal(tmp_path: Path, etcd: EtcdCluster, job: str) -> None:
    """Two FSDP2 ranks train, checkpoint, die by SIGKILL in a step, and restart with the state of the checkpoint."""
    with running_job(tmp_path, job, etcd.endpoints) as running:
        first = running.start(steps=1000)
        first.until(lambda: len(running.view().checkpoints()) >= 2)
        first.kill()
        record = max(running.view().checkpoints().values(), key=lambda r: r.checkpoint)
        steps = {event["step"]: event["digest"] for event in first.events("step")}
        second = running.start(steps=record.training_step + 6)
        assert second.wait() == [0, 0], second.errors()
        restored = [second.events("restored", rank)[0] for rank in (0, 1)]
        assert [event["step"] for event in restored] == [record.training_step] * 2
        assert [event["digest"] for event in restored] == [steps[record.training_step]] * 2
        assert restored[0]["extra"] == {"steps": record.training_step}
        assert running.view().participant("trainer").ended == "left"
