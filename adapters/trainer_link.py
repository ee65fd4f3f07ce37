"""The link between the ranks' writers: lists of files on their way to rank 0, and a round's outcome on its way back."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import msgspec
import torch.distributed as dist

from ..engine.errors import DeadlineExceeded, SlackwaterError
from .trainer_gang import Command, Gang

__all__ = ["PartLink", "own_address"]

_TCP_STORE: Any = getattr(dist, "TCPStore", None)  # documented, but torch's stubs do not export it
_HASH_STORE: Any = getattr(dist, "HashStore", None)


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
                host = own_address()
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


def own_address() -> str:
    """The address under which the other ranks reach this one: the interface that reaches the rendezvous."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SlackwaterError(f"no address of this host reaches {master}: {error.strerror}") from error
