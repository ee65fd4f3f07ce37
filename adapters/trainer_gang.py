"""The gang of ranks: one small broadcast from rank 0, and an agreement on errors.

Everything here uses a gloo group of its own, never the group that training uses.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from ..engine import errors
from ..engine.errors import SlackwaterError

__all__ = ["Command", "Failure", "Gang", "as_error", "first_failure"]

Failure = tuple[int, str, str]
"""Rank, class name and message of an error."""

Kind = Literal["go", "publish", "cut", "hold", "rewind", "stop", "wait", "restore", "error", "done"]
_KINDS: tuple[Kind, ...] = (
    "go",
    "publish",
    "cut",
    "hold",
    "rewind",
    "stop",
    "wait",
    "restore",
    "error",
    "done",
)
_WIDTH = 6
_ERROR_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Command:
    """What every rank does next, as rank 0 says it. `payload` is small JSON and costs a second broadcast."""

    kind: Kind
    round: int = 0
    token: int = 0
    step: int = 0
    timeline: int = 0
    payload: bytes = b""

    def decoded(self) -> dict[str, Any]:
        """The payload as a dict."""
        found: dict[str, Any] = msgspec.json.decode(self.payload) if self.payload else {}
        return found


def _from_rank_0(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """`dist.broadcast` on the group itself: torch's wrapper costs a quarter of so small a broadcast."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class Gang:
    """This process's place among the ranks. Its collectives must be called by every rank, in the same order.

    Without an initialised process group it is a gang of one. `timeout_seconds` bounds how far ranks may be apart.
    """

    def __init__(self, timeout_seconds: float = 1800.0) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                wait = datetime.timedelta(seconds=timeout_seconds)
                self._group = dist.new_group(backend="gloo", timeout=wait)
        self._record = torch.zeros(_WIDTH, dtype=torch.int64)
        self._fields = self._record.numpy()  # the same memory

    def broadcast(self, command: Command | None) -> Command:
        """Rank 0's command, on every rank; the others pass None. Blocks until rank 0 speaks."""
        if self._group is None:
            if command is None:
                raise ValueError("a gang of one needs a command")
            return command
        record = self._record
        if command is not None:
            size = len(command.payload)
            fields = (_KINDS.index(command.kind), command.round, command.token, command.step)
            self._fields[:] = (*fields, command.timeline, size)
        _from_rank_0(self._group, record)
        if command is not None and not command.payload:
            return command
        kind, round_, token, step, timeline, size = record.tolist()
        payload = b"" if command is None else command.payload
        if size:
            body = torch.zeros(size, dtype=torch.uint8)
            if command is not None:
                body[:] = torch.frombuffer(bytearray(command.payload), dtype=torch.uint8)
            _from_rank_0(self._group, body)
            payload = body.numpy().tobytes()
        return Command(_KINDS[kind], round_, token, step, timeline, payload)

    def gather(self, text: str) -> list[str]:
        """Every rank's short text (cut at 2 kB), by rank. Blocks for all ranks."""
        if self._group is None:
            return [text]
        raw = text.encode()[: _ERROR_BYTES - 8]
        mine = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else mine[:0]
        found = [torch.zeros(_ERROR_BYTES, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(found, mine, group=self._group)
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in found]

    def failures(self, error: BaseException | None) -> list[Failure]:
        """(rank, class name, message) of every rank that passes an error. Blocks for all ranks."""
        texts = self.gather("" if error is None else f"{type(error).__name__}: {error}")
        found = []
        for rank, text in enumerate(texts):
            if text:
                name, _, message = text.partition(": ")
                found.append((rank, name, message))
        return found

    def together(self, call: Callable[[], None]) -> None:
        """Run a call on every rank; when one fails all raise, each its own error or the first one's.

        The call may raise `SlackwaterError` and `OSError`, and on any rank by itself: no collective may follow in it.
        """
        error: SlackwaterError | OSError | None = None
        try:
            call()
        except (SlackwaterError, OSError) as found:
            error = found
        failures = self.failures(error)
        if failures:
            raise error if error is not None else as_error(failures)

    def close(self) -> None:
        """Give the group up; every rank calls it, or none."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def first_failure(failures: Sequence[Failure]) -> str:
    """One line for people: who failed and why."""
    return "; ".join(f"rank {rank}: {name}: {message}" for rank, name, message in failures)


def as_error(failures: Sequence[Failure]) -> SlackwaterError:
    """Another rank's error as our own, of the same class where it is one of ours."""
    rank, name, message = failures[0]
    kind = getattr(errors, name, SlackwaterError)
    kind = kind if isinstance(kind, type) and issubclass(kind, SlackwaterError) else SlackwaterError
    made: SlackwaterError = kind(f"rank {rank}: {message}")
    return made
