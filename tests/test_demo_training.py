"""The demo's task, loss and loop, without Slackwater around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.demo.events import EventTail
from examples.demo.task import ANSWER_TOKENS, Task, make_demo_model
from slackwater.backends.child import free_ports

ROOT = Path(__file__).parent.parent


def train_plain(work: Path, seed: int, steps: int) -> list[dict[str, float]]:
    """Train with two ranks in processes of their own; the fields of every step."""
    make_demo_model(work / "model", seed)
    port = free_ports(1)[0]
    ranks = []
    for rank in range(2):
        environment = dict(
            os.environ,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, "-m", "tests.demo_plain_trainer", str(work), str(seed), str(steps)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        assert [rank.wait(timeout=150) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [event.fields for event in EventTail(work / "events.jsonl").read() if event.kind == "step"]


def test_rewards_are_what_the_task_says(tmp_path: Path) -> None:
    """The perfect answer earns 1, other digits a little, other tokens and missing ones nothing."""
    task = Task.of(make_demo_model(tmp_path, 0))
    assert task.reward("8", [task.digits[9], task.digits[0], task.digits[1]]) == 1.0
    assert task.reward("8", [task.digits[5]] * ANSWER_TOKENS) == pytest.approx(0.2)
    assert task.reward("8", [task.bos] * ANSWER_TOKENS) == 0.0
    assert task.reward("8", []) == 0.0


@pytest.mark.real
def test_two_sharded_ranks_learn_to_count(tmp_path: Path) -> None:
    """90 steps of GRPO on two FSDP2 ranks raise the mean reward far above where it began, on fresh-enough samples."""
    steps = train_plain(tmp_path, seed=0, steps=90)
    assert [step["step"] for step in steps] == list(range(1, 91))
    first, last = fmean(s["reward"] for s in steps[:10]), fmean(s["reward"] for s in steps[-10:])
    assert first < 0.2
    assert last > 0.4
    assert all(step["mixed"] == 0 for step in steps)
