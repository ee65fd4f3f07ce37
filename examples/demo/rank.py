"""One rank of the demo's trainer: python -m examples.demo.rank --config job.toml --model DIR --steps N --work DIR."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from slackwater.adapters.rolloutclient import RolloutClient
from slackwater.adapters.stores import open_store
from slackwater.adapters.trainer import attach
from slackwater.engine.config import load_config
from slackwater.engine.errors import AuthFailed, ConfigError, Refused, StateMismatch

from .driver import Driver
from .events import EventLog
from .task import Task
from .train import BATCH, Loop, driving, make_buffer, make_trainer

__all__ = ["main"]


def main() -> None:
    """Attach, restore, train until the steps are done and the file `finish` lies in the work directory, close."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us ends us
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        _train(arguments)
    except (AuthFailed, ConfigError, Refused, StateMismatch) as error:
        sys.stderr.write(f"trainer: {error}\n")
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(arguments: argparse.Namespace) -> None:
    first = dist.get_rank() == 0
    config, site = load_config(arguments.config)
    torch.manual_seed(config.seed)
    task = Task.of(arguments.model)
    trainer = make_trainer(arguments.model)
    buffer = (
        make_buffer(
            arguments.work / "buffer", task, max_staleness_steps=config.max_staleness_steps, seed=config.seed
        )
        if first
        else None
    )
    sync = attach(
        trainer.model,
        trainer.optimizer,
        trainer.scheduler,
        config=(config, site),
        buffer=buffer,
        hf_files=arguments.model,
    )
    with contextlib.ExitStack() as stack:
        events = EventLog(arguments.work / "events.jsonl" if first else None)
        stack.callback(events.close)
        driver, close_rollouts = None, lambda: None
        if buffer is not None:
            store = open_store(site)
            stack.callback(store.close)
            rollouts = RolloutClient(store, config.job, request_timeout_seconds=20.0).start()
            driver = Driver(
                buffer,
                rollouts,
                task,
                ahead_samples=2 * BATCH,
                on_refused=lambda refused: events.write("refused", **refused),
            )
            close_rollouts = rollouts.close
        events.write("trainer", pid=os.getpid(), world_size=dist.get_world_size())
        check = driver.check if driver is not None else lambda: None
        finish = arguments.work / "finish"
        loop = Loop(
            trainer=trainer,
            sync=sync,
            buffer=buffer,
            events=events,
            checkpoint_every=config.checkpoint.every_steps,
            step_seconds=arguments.step_seconds,
            finished=lambda step: step >= arguments.steps and finish.exists(),
            check=check,
        )
        with driving(driver, close_rollouts):
            step = loop.run()
        sync.close()
        events.write("end", step=step, **(driver.counts if driver is not None else {}))


if __name__ == "__main__":
    main()
