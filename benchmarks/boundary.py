"""Measure what the end of a step costs: the one broadcast of a directive between gloo ranks; non-zero when short.

python benchmarks/boundary.py [--ranks 2] [--steps 3000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slackwater.adapters.trainer_gang import Command, Gang
from slackwater.backends.child import free_ports

GOAL_MICROSECONDS = 200.0


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.ranks, options.steps)
        return 0
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    command = [sys.executable, __file__, "--ranks", str(options.ranks), "--steps", str(options.steps)]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        print("a rank failed", file=sys.stderr)
        return 1
    figures = {**json.loads(answers[0]), "ranks": options.ranks, "goal_microseconds": GOAL_MICROSECONDS}
    print(f"{'broadcast at a step end':<28}{'median us':>12}{'p99 us':>12}{'bare us':>12}{'goal us':>12}")
    row = (
        figures["median_microseconds"],
        figures["p99_microseconds"],
        figures["bare_broadcast_microseconds"],
        GOAL_MICROSECONDS,
    )
    print(f"{f'{options.ranks} gloo ranks':<28}" + "".join(f"{value:>12.0f}" for value in row))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(figures["median_microseconds"] > GOAL_MICROSECONDS)


def measure(rank: int, world: int, steps: int) -> None:
    """One rank: `steps` broadcasts one after the other, as in a training loop without training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    gang = Gang()
    command = Command("go", step=3) if rank == 0 else None
    alike = torch.zeros(64, dtype=torch.uint8)
    seconds, bare = [], []
    for _ in range(steps):
        started = time.perf_counter()
        gang.broadcast(command)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        dist.broadcast(alike, 0)
        bare.append(time.perf_counter() - started)
    if rank == 0:
        p99 = sorted(seconds)[int(len(seconds) * 0.99)]
        figures = {
            "median_microseconds": statistics.median(seconds) * 1e6,
            "p99_microseconds": p99 * 1e6,
            "bare_broadcast_microseconds": statistics.median(bare) * 1e6,
        }
        print(json.dumps(figures))
    gang.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
