"""The smallest FSDP2 trainer (on CPU) with Slackwater attached; nothing to roll out, no buffer.

torchrun --nproc-per-node 2 examples/minimal_trainer.py job.toml [STEPS]

Kill it and start it again: it goes on from its newest checkpoint. A coordinator of the job must run.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slackwater.adapters.trainer import attach


def main(config: str, total_steps: int) -> None:
    """Fit a small network to a fixed function, for ever the same batches."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)

    sw = attach(model, optimizer, scheduler, config=config)
    step = sw.restore()
    print(f"rank {sw.rank}: from step {step}", flush=True)
    while step < total_steps:
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(dim=1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step = sw.end_step()
    sw.close()
    print(f"rank {sw.rank}: done at step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
