"""What a person sees with etcdctl alone: every key of the job, every value JSON, none large."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster, find_etcd
from slackwater.engine.keys import Keys
from tests.trainer_jobs import running_job

pytestmark = pytest.mark.real


def etcdctl(cluster: EtcdCluster, *arguments: str) -> str:
    """What the program beside our etcd prints."""
    program = Path(find_etcd()).with_name("etcdctl")
    command = [str(program), f"--endpoints={','.join(cluster.endpoints)}", *arguments]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env=environment
    ).stdout


def test_the_whole_job_is_readable(tmp_path: Path, etcd: EtcdCluster, job: str) -> None:
    """While a job trains and checkpoints, `get --prefix` shows versions, grant, checkpoints and history as JSON."""
    with running_job(tmp_path, job, etcd.endpoints) as running:
        gang = running.start(steps=100000)
        gang.until(lambda: len(running.view().checkpoints()) >= 2)
        lines = etcdctl(etcd, "get", "--prefix", f"/slackwater/{job}/").splitlines()
    shown = dict(zip(lines[::2], lines[1::2], strict=True))
    assert all(isinstance(json.loads(value), dict) and len(value) < 65536 for value in shown.values())
    keys = Keys(job)
    expected = (
        keys.config,
        keys.timeline,
        keys.go,
        keys.weight_head,
        keys.checkpoint_head,
        keys.checkpoint(1),
    )
    assert set(expected) <= shown.keys()
    assert json.loads(shown[keys.participant("trainer")])["role"] == "trainer"
    assert json.loads(shown[keys.alive("trainer")])["training_step"] >= 0
    assert any(
        json.loads(value).get("kind") == "commit" for key, value in shown.items() if key.startswith(keys.logs)
    )
    assert any(key.startswith(keys.leaders) for key in shown)
