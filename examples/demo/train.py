"""The trainer: GRPO on the counting task, sharded by FSDP2 over the ranks of one gloo gang.

Run once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them. Rank 0 also has the
buffer and the rollout driver.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from slackwater.engine.errors import Conflict
from slackwater.engine.experience import ExperienceBuffer
from slackwater.engine.samples import Caller, LeasedSample, PromptOrder

from .driver import Driver, Payload
from .events import EventLog
from .statedigest import state_digest
from .task import ANSWER_TOKENS, Task

__all__ = ["BATCH", "GROUP", "Synchronised", "Trainer", "make_buffer", "make_trainer"]

GROUP = 16  # answers of one prompt
PROMPTS = 5  # prompts of one step
BATCH = GROUP * PROMPTS
PROMPT_TOKENS = 2
LEARNING_RATE = 5e-3
CLIP = 0.2
WARM_UP_STEPS = 5
LEASE_SECONDS = 1.0


class Synchronised(Protocol):
    """What the loop needs of Slackwater: what `slackwater.adapters.trainer.attach` returns."""

    @property
    def caller(self) -> Caller:
        """Timeline and incarnation, for calls to the buffer. Rank 0."""
        ...

    def restore(self) -> int:
        """Block until training may go on; the training step. Every rank."""
        ...

    def end_step(self) -> int:
        """A step is done: the next step's number, or after a recovery the restored one. Every rank."""
        ...

    def idle(self) -> int:
        """No step could be done (nothing to train on): as `end_step`, without counting one. Every rank."""
        ...

    def close(self) -> None:
        """The job is done. Every rank."""
        ...


@dataclass(frozen=True)
class Batch:
    """One step's samples on every rank. Tokens are [samples, prompt + answer], the rest is [samples]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor  # [samples, answer], by the policy that sampled
    rewards: torch.Tensor
    weights: torch.Tensor
    mixed: int = 0


class Trainer:
    """Model, optimizer and scheduler of one rank, and one GRPO step over them."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def step(
        self, batch: Batch, rank: int, world_size: int, on_gradients: Callable[[], None] = lambda: None
    ) -> float:
        """One optimizer update on this rank's share of the batch; the loss. `on_gradients` is called in its middle."""
        loss = grpo_loss(self.model, batch, slice(rank, None, world_size))
        self.optimizer.zero_grad()
        loss.backward()
        on_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


def grpo_loss(model: torch.nn.Module, batch: Batch, share: slice) -> torch.Tensor:
    """The clipped policy gradient with advantages normalised in each group of answers (DeepSeekMath, 2024)."""
    tokens, sampled = batch.tokens[share], batch.logprobs[share]
    grouped = batch.rewards.view(-1, GROUP)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantage = (advantages.flatten() * batch.weights)[share].unsqueeze(1)
    logits = model(tokens[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, PROMPT_TOKENS:, None]).squeeze(2)
    ratio = (logprobs - sampled).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def make_trainer(model_directory: Path) -> Trainer:
    """The sharded model with its first weights, its optimizer and scheduler. Every rank calls it."""
    model = LlamaForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32)
    if not isinstance(model.config, LlamaConfig):
        raise TypeError(f"{model_directory}: not a Llama model")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
    )
    return Trainer(model, optimizer, scheduler)


def make_buffer(directory: Path, task: Task, *, max_staleness_steps: int, seed: int) -> ExperienceBuffer:
    """The job's buffer: every prompt once an epoch, in whole groups, in the order of dispatch."""
    return ExperienceBuffer(
        directory,
        prompts=PromptOrder(task.prompt_names, seed=seed),
        batch_size=BATCH,
        group_size=GROUP,
        max_staleness_steps=max_staleness_steps,
        seed=seed,
        lost_payloads="redispatch",
    )


# -- one batch for every rank -------------------------------------------------------------------------------

_HEADER = 3  # whether there is a batch, whether the job is over, mixed samples


def lease_batch(buffer: ExperienceBuffer, caller: Caller, step: int) -> Batch | None:
    """Lease what step `step` trains on; None when there is not enough yet, or a recovery has begun. Rank 0."""
    try:
        leased = buffer.lease(caller, step, BATCH, key=f"step-{step}", timeout_seconds=LEASE_SECONDS)
    except Conflict:
        return None
    return _batch(leased) if leased else None


def _batch(leased: list[LeasedSample]) -> Batch:
    payloads = [msgspec.json.decode(sample.payload, type=Payload) for sample in leased]
    return Batch(
        tokens=torch.tensor([[*p.prompt_ids, *p.answer_ids] for p in payloads]),
        logprobs=torch.tensor([p.logprobs for p in payloads]),
        rewards=torch.tensor([sample.reward for sample in leased]),
        weights=torch.tensor([sample.weight for sample in leased]),
        mixed=sum(len({version for version, _, _ in sample.spans}) > 1 for sample in leased),
    )


def share_batch(batch: Batch | None, *, over: bool) -> tuple[Batch | None, bool]:
    """Rank 0's batch, or None, and whether the job is over, on every rank."""
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[0], header[1] = batch is not None, over
    header[2] = batch.mixed if batch is not None else 0
    dist.broadcast(header, 0)
    found, ended, mixed = header.tolist()
    if not found:
        return None, bool(ended)
    if batch is None:
        batch = Batch(
            tokens=torch.zeros(BATCH, PROMPT_TOKENS + ANSWER_TOKENS, dtype=torch.int64),
            logprobs=torch.zeros(BATCH, ANSWER_TOKENS),
            rewards=torch.zeros(BATCH),
            weights=torch.zeros(BATCH),
            mixed=mixed,
        )
    for tensor in (batch.tokens, batch.logprobs, batch.rewards, batch.weights):
        dist.broadcast(tensor, 0)
    return batch, bool(ended)


# -- the loop -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """The training loop of one rank. `buffer` and `events` are rank 0's; `finished` tells rank 0 when to stop,
    `check` raises what has gone wrong beside it."""

    trainer: Trainer
    sync: Synchronised
    buffer: ExperienceBuffer | None
    events: EventLog
    checkpoint_every: int
    step_seconds: float
    finished: Callable[[int], bool]
    check: Callable[[], None] = lambda: None

    def run(self) -> int:
        """Train until rank 0 says that it is over; the last step."""
        step = self._restored(self.sync.restore())
        while True:
            self.check()
            began = time.monotonic()
            lease = lease_batch(self.buffer, self.sync.caller, step + 1) if self.buffer is not None else None
            batch, over = share_batch(lease, over=self.buffer is not None and self.finished(step))
            if over:
                return step
            if batch is None:
                step = self._after(step, self.sync.idle())
                continue
            pace = functools.partial(self._pace, step + 1, began)
            loss = self.trainer.step(batch, dist.get_rank(), dist.get_world_size(), pace)
            self.events.write("updated", step=step + 1)
            if self._record(step + 1):
                self._report(step + 1, batch, loss, time.monotonic() - began)
                ended = time.monotonic()
                following = self.sync.end_step()
                self.events.write("boundary", step=step + 1, seconds=time.monotonic() - ended)
                step = self._after(step + 1, following)
            else:
                step = self._after(step, self.sync.idle())

    def _pace(self, step: int, began: float) -> None:
        """Between gradients and update. A real step takes minutes; here one lasts `step_seconds`, to be followed."""
        self.events.write("gradients", step=step)
        left = self.step_seconds - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)

    def _record(self, step: int) -> bool:
        """Say in the buffer's log that the step is done. False on every rank when a recovery has begun meanwhile."""
        done = torch.ones(1, dtype=torch.int64)
        if self.buffer is not None:
            try:
                self.buffer.trained(self.sync.caller, step)
                self.buffer.step_done(self.sync.caller, step)
            except Conflict:
                done.zero_()
        dist.broadcast(done, 0)
        return bool(done.item())

    def _report(self, step: int, batch: Batch, loss: float, seconds: float) -> None:
        reward = float(batch.rewards.mean())
        self.events.write("step", step=step, reward=reward, loss=loss, seconds=seconds, mixed=batch.mixed)
        if step % self.checkpoint_every == 0:
            self._write_digest(step, "checkpoint")

    def _after(self, expected: int, step: int) -> int:
        return step if step == expected else self._restored(step)

    def _restored(self, step: int) -> int:
        self._write_digest(step, "restore")
        return step

    def _write_digest(self, step: int, when: str) -> None:
        digest = state_digest(self.trainer.model, self.trainer.optimizer)
        self.events.write("digest", step=step, when=when, digest=digest)


@contextlib.contextmanager
def driving(driver: Driver | None, close_rollouts: Callable[[], None]) -> Iterator[None]:
    """Keep the rollout driver running in the block, if this rank has one."""
    if driver is None:
        yield
        return
    driver.start()
    try:
        yield
    finally:
        close_rollouts()
        driver.close()
