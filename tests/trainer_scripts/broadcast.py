"""Measure the broadcast at a step's end: `broadcast.py RANK WORLD`; rank 0 prints the median in microseconds."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from slackwater.adapters.trainer_gang import Command, Gang

if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    gang = Gang()
    command = Command("go", step=3) if rank == 0 else None
    seconds = []
    for _ in range(3000):
        started = time.perf_counter()
        gang.broadcast(command)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        print(sorted(seconds)[len(seconds) // 2] * 1e6)
    gang.close()
    dist.destroy_process_group()
