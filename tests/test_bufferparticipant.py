"""The experience buffer as a participant: it is cut in rounds, and comes back with the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slackwater.adapters.trainer import attach
from slackwater.backends.embedded import EtcdCluster
from slackwater.engine.config import load_config
from slackwater.engine.experience import ExperienceBuffer
from slackwater.engine.samples import PromptOrder, Sample, SampleId

from .trainer_jobs import running_job

pytestmark = pytest.mark.real


def make_buffer(directory: Path) -> ExperienceBuffer:
    """Two samples a step, from ten prompts."""
    order = PromptOrder([f"p{i}" for i in range(10)], seed=1)
    return ExperienceBuffer(directory, prompts=order, batch_size=2, max_staleness_steps=6)


def test_buffer_returns_to_the_cut_of_the_checkpoint(tmp_path: Path, etcd: EtcdCluster, job: str) -> None:
    """Samples trained after the checkpoint are not lost: each step trains the same samples again, each exactly once."""
    with running_job(tmp_path, job, etcd.endpoints, slots={"buffer": True}) as running:
        trained: dict[int, list[SampleId]] = {}
        again: dict[int, list[SampleId]] = {}
        config = load_config(running.config)
        for life, found in enumerate((trained, again)):
            buffer = make_buffer(tmp_path / f"buffer{life}")
            model = torch.nn.Linear(2, 2)
            sw = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, buffer=buffer)
            step = sw.restore()
            first = step
            while step < first + 6:
                for dispatch in buffer.next_prompts(sw.caller, 2):
                    samples = [Sample(id=one, spans=((1, 0, 1),), payload=b"{}") for one in dispatch.ids()]
                    buffer.land(sw.caller, samples)
                leased = buffer.lease(sw.caller, step + 1, 2)
                found[step + 1] = sorted(sample.id for sample in leased)
                buffer.trained(sw.caller, step + 1)
                buffer.step_done(sw.caller, step + 1)
                step = sw.end_step()
            sw.close()
            buffer.close()
            record = max(running.view().checkpoints().values(), key=lambda r: r.checkpoint)
            assert record.buffer_version > 0
        assert min(again) == 5, "from the checkpoint of step 4, in another directory"
        kept = [one for number in range(1, 5) for one in trained[number]]
        later = [one for ids in again.values() for one in ids]
        assert len(set(kept + later)) == len(kept + later), "no sample is trained twice on the lineage"
