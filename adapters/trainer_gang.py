"""The gang of ranks: one small broadcast from rank 0, an agreement on errors, and a link for lists of files.

Everything here uses a gloo group or a TCPStore of its own, never the group that training uses.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from ..engine.errors import DeadlineExceeded, SlackwaterError

__all__ = ["Command", "Gang", "PartLink"]

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
_TCP_STORE: Any = getattr(dist, "TCPStore", None)  # documented, but torch's stubs do not export it
_HASH_STORE: Any = getattr(dist, "HashStore", None)


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
            record[:] = torch.tensor((*fields, command.timeline, size), dtype=torch.int64)
        dist.broadcast(record, 0, group=self._group)
        if command is not None and not command.payload:
            return command
        kind, round_, token, step, timeline, size = record.tolist()
        payload = b"" if command is None else command.payload
        if size:
            body = torch.zeros(size, dtype=torch.uint8)
            if command is not None:
                body[:] = torch.frombuffer(bytearray(command.payload), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self._group)
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

    def failures(self, error: BaseException | None) -> list[tuple[int, str, str]]:
        """(rank, class name, message) of every rank that passes an error. Blocks for all ranks."""
        texts = self.gather("" if error is None else f"{type(error).__name__}: {error}")
        found = []
        for rank, text in enumerate(texts):
            if text:
                name, _, message = text.partition(": ")
                found.append((rank, name, message))
        return found

    def close(self) -> None:
        """Give the group up; every rank calls it, or none."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class PartLink:
    """Lists of files on their way from the ranks to rank 0, and a round's outcome on its way back.

    A TCPStore of its own, so that a stuck save can never block a collective. `open` is called by every rank.
    """

    def __init__(self, gang: Gang, timeout_seconds: float = 60.0) -> None:
        self._rank, self._world_size = gang.rank, gang.world_size
        self._store: Any
        self._waiting: Any  # a client of its own: a wait holds its client's lock
        wait = datetime.timedelta(seconds=timeout_seconds)
        if gang.world_size == 1:
            self._store = self._waiting = _HASH_STORE()
            return
        if gang.rank == 0:
            try:
                host = _own_address()
            except SlackwaterError as error:
                gang.broadcast(Command("error", payload=str(error).encode()))
                raise
            self._store = _TCP_STORE(host, 0, None, is_master=True, timeout=wait, wait_for_workers=False)
            port = self._store.port
            gang.broadcast(Command("wait", step=port, payload=msgspec.json.encode({"host": host})))
        else:
            told = gang.broadcast(None)
            if told.kind == "error":
                raise SlackwaterError(f"rank 0: {told.payload.decode()}")
            host, port = str(told.decoded()["host"]), told.step
            self._store = _TCP_STORE(host, port, None, timeout=wait, wait_for_workers=False)
        self._waiting = _TCP_STORE(host, port, None, timeout=wait, wait_for_workers=False)

    def send_part(self, round_: int, part: bytes) -> None:
        """This rank's list for a round (JSON)."""
        self._store.set(f"part/{round_}/{self._rank}", b"+" + part)

    def send_failure(self, round_: int, error: str) -> None:
        """Say that this rank's part could not be written."""
        self._store.set(f"part/{round_}/{self._rank}", b"-" + error.encode())

    def part(self, round_: int, rank: int) -> tuple[bytes, str] | None:
        """(list, "") or (b"", error) of a rank; None while it has not answered. Does not block."""
        key = f"part/{round_}/{rank}"
        if not self._store.check([key]):
            return None
        raw = bytes(self._store.get(key))
        return (raw[1:], "") if raw[:1] == b"+" else (b"", raw[1:].decode(errors="replace"))

    def tell(self, round_: int, outcome: str) -> None:
        """Rank 0 says how a round ended: "" committed, else why not; the lists are dropped."""
        self._store.set(f"end/{round_}", b"=" + outcome.encode())

    def forget(self, round_: int) -> None:
        """Drop a round's lists."""
        for rank in range(self._world_size):
            self._store.delete_key(f"part/{round_}/{rank}")

    def outcome(self, round_: int, timeout_seconds: float) -> str:
        """How a round ended; blocks. Raises `DeadlineExceeded` when rank 0 does not say in time."""
        key = f"end/{round_}"
        try:
            self._waiting.wait([key], datetime.timedelta(seconds=timeout_seconds))
            return bytes(self._waiting.get(key))[1:].decode(errors="replace")
        except (RuntimeError, ValueError) as error:  # torch's store errors are subclasses of RuntimeError
            raise DeadlineExceeded(f"rank 0 did not say how round {round_} ended: {error}") from error


def _own_address() -> str:
    """The address under which the other ranks reach this one: the interface that reaches the rendezvous."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SlackwaterError(f"no address of this host reaches {master}: {error.strerror}") from error


def first_failure(failures: Sequence[tuple[int, str, str]]) -> str:
    """One line for people: who failed and why."""
    return "; ".join(f"rank {rank}: {name}: {message}" for rank, name, message in failures)
