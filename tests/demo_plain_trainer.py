"""The demo's training loop without Slackwater: one rank, sampled by a copy of the model inside the process.

Run with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: python -m tests.demo_plain_trainer WORK SEED STEPS
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaForCausalLM

from examples.demo.driver import Driver
from examples.demo.events import EventLog
from examples.demo.task import ANSWER_TOKENS, Task
from examples.demo.train import BATCH, Loop, Trainer, driving, make_buffer, make_trainer
from slackwater.adapters.rolloutclient import Answer
from slackwater.engine.samples import Caller

PUBLISH_EVERY = 3


class LocalRollouts:
    """A copy of the model that answers from this process."""

    def __init__(self, model_directory: Path, seed: int) -> None:
        self.model = LlamaForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32)
        self.version = 1
        self.lock = threading.Lock()
        self.random = torch.Generator().manual_seed(seed)

    @property
    def timeline(self) -> int:
        return 1

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], *, timeout_seconds: float) -> list[Answer]:
        with self.lock:
            tokens, found = torch.tensor(prompts), []
            for _ in range(ANSWER_TOKENS):
                logprobs = self.model(tokens).logits[:, -1].log_softmax(-1)
                token = torch.multinomial(logprobs.exp(), 1, generator=self.random)
                found.append(logprobs.gather(1, token))
                tokens = torch.cat([tokens, token], 1)
            logprobs = torch.cat(found, 1)
            return [
                Answer(
                    token_ids=tuple(row[-ANSWER_TOKENS:].tolist()),
                    text="",
                    logprobs=tuple(logprobs[place].tolist()),
                    spans=((self.version, 0, ANSWER_TOKENS),),
                    timelines=frozenset({1}),
                    sampling_revision=1,
                    rollout="local",
                )
                for place, row in enumerate(tokens)
            ]

    def close(self) -> None:
        """Nothing to let go of."""


class Plain:
    """Publishes every third step to the local copy; never recovers."""

    def __init__(self, trainer: Trainer, rollouts: LocalRollouts | None, buffer: object) -> None:
        self.trainer, self.rollouts, self.buffer, self.step = trainer, rollouts, buffer, 0

    @property
    def caller(self) -> Caller:
        return Caller(timeline=1, incarnation="plain")

    def restore(self) -> int:
        if self.buffer is not None:
            self.buffer.fence(1, "plain")
            self.buffer.apply_freshness({1: 0}, 0)
        return 0

    def end_step(self) -> int:
        self.step += 1
        if self.step % PUBLISH_EVERY == 0:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.trainer.model, options=options)
            if self.rollouts is not None:
                with self.rollouts.lock:
                    self.rollouts.model.load_state_dict(state)
                    self.rollouts.version += 1
                    version = self.rollouts.version
                steps = {v: (v - 1) * PUBLISH_EVERY for v in range(1, version + 1)}
                self.buffer.apply_freshness(steps, self.step)
        return self.step

    def idle(self) -> int:
        return self.step

    def close(self) -> None:
        """Nothing to leave."""


def main() -> None:
    work, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model, task = work / "model", Task.of(work / "model")
    trainer = make_trainer(model)
    rollouts = LocalRollouts(model, seed) if first else None
    buffer = make_buffer(work / "buffer", task, max_staleness_steps=5, seed=seed) if first else None
    events = EventLog(work / "events.jsonl" if first else None)
    driver = Driver(buffer, rollouts, task, ahead_samples=2 * BATCH) if first else None
    loop = Loop(
        trainer, Plain(trainer, rollouts, buffer), buffer, events, 10, 0.0, lambda step: step >= steps
    )
    with driving(driver, lambda: None):
        loop.run()
    if buffer is not None:
        buffer.close()
    events.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
