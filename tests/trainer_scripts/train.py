"""A small training script: `run_rank` is one rank's process.

It writes one JSON line for each event to OUT.<rank>, with a digest of the whole state where that is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slackwater.adapters.trainer import attach
from slackwater.engine.errors import (
    AuthFailed,
    ConfigError,
    NotFound,
    Refused,
    SlackwaterError,
    StateMismatch,
    Unavailable,
)
from slackwater.engine.tensorfile import FileSystem


class Failing(FileSystem):
    """A disk that answers with an error of its own to every write of a data file."""

    def __init__(self, code: int, seconds: float = 0.0) -> None:
        self.code, self.seconds = code, seconds

    def create(self, path: Path, direct: bool) -> int:
        if "safetensors" in path.name and path.name.startswith("r0"):
            time.sleep(self.seconds)  # a slow disk
            if self.code:
                raise OSError(self.code, os.strerror(self.code), str(path))
        return super().create(path, direct)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.embed(x)))) * self.scale


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Over gathered tensors, so that it does not depend on the number of ranks."""
    found = hashlib.sha256()
    bare = model.module if isinstance(model, DistributedDataParallel) else model

    def add(name: str, value: torch.Tensor) -> None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())

    for name, value in sorted(bare.state_dict().items()):
        add(name, value)
    for name, parameter in sorted(bare.named_parameters()):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            add(f"{name}/{key}", value)
    return found.hexdigest()


def train(rank: int, world: int, config: Path, out: Path, options: dict[str, Any]) -> int:
    log = out.with_suffix(f".{rank}").open("a", encoding="utf-8")

    def say(event: str, **fields: Any) -> None:
        log.write(json.dumps({"event": event, **fields}) + "\n")
        log.flush()

    torch.set_num_threads(1)
    kind = options.get("kind", "fsdp")
    if kind != "plain":
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(options.get("seed", 0))
    model: nn.Module = Net(options.get("width", 6))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    failing = options.get("fail_rank") == rank
    files = Failing(options.get("fail_errno", 0), options.get("slow_s", 0.0)) if failing else None
    trained = {"steps": 0}
    sw = attach(model, optimizer, scheduler, config=config, extras={"trained": trained}, files=files)
    step = sw.restore()
    state = digest(model, optimizer)
    say("restored", step=step, digest=state, checkpoint=sw.restored_from, remarks=sw.remarks, extra=trained)
    generator = torch.Generator()
    slowest = []
    while step < options.get("steps", 10):
        generator.manual_seed(step)
        x = torch.randint(0, 7, (4, 3), generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        trained["steps"] = step + 1
        state = digest(model, optimizer) if options.get("digests", True) else ""
        if options.get("kill_at") == step + 1:
            say("dying", step=step + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        if (options.get("raise_rank"), options.get("raise_at")) == (rank, step + 1):
            with sw:
                raise RuntimeError("the loss is not a number")
        before = step
        step = sw.end_step()
        slowest.append(sw.blocked_s)
        say("step", step=step, digest=state, rewound=step != before + 1)
        time.sleep(options.get("step_s", 0.02))
    say("trained", blocked_s=sorted(slowest))
    sw.close()
    say("closed")
    if kind != "plain":
        dist.destroy_process_group()
    return 0


def run_rank(env: dict[str, str], said: Path, *args: Any) -> None:
    """Train as rank `args[0]`, with stdout and stderr appended to the file `said`; ends the process."""
    os.environ.update(env)
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = train(*args)
    except (ConfigError, Refused, AuthFailed, StateMismatch, NotFound, Unavailable) as error:
        sys.stderr.write(f"slackwater: {type(error).__name__}: {error}\n")
        code = 2
    except SlackwaterError as error:
        sys.stderr.write(f"slackwater: {type(error).__name__}: {error}\n")
        code = 1
    sys.exit(code)
