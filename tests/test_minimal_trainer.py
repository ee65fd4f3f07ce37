"""The example of the README under torchrun: trains, ends, and goes on from its checkpoint at the next start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.backends.embedded import EtcdCluster
from tests.trainer_jobs import running_job

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).parent.parent / "examples" / "minimal_trainer.py"


def torchrun(config: Path, steps: int) -> str:
    """Run the example on two ranks to its end; what it printed."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = subprocess.run(
        [*command, str(EXAMPLE), str(config), str(steps)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_the_example_goes_on_where_it_ended(tmp_path: Path, etcd: EtcdCluster, job: str) -> None:
    """Two starts under torchrun: the second begins at the first one's newest checkpoint."""
    with running_job(tmp_path, job, etcd.endpoints) as running:
        assert "rank 0: from step 0" in torchrun(running.config, 9)
        newest = max(record.training_step for record in running.view().checkpoints().values())
        assert newest in (4, 8)  # so short a run may be over before its second round begins
        printed = torchrun(running.config, 12)
        assert f"rank 1: from step {newest}" in printed
        assert "rank 0: done at step 12" in printed
