"""One rank's writer: a thread that turns staged snapshots into files while training goes on."""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import structlog

from ..engine.errors import DeadlineExceeded, SlackwaterError
from ..engine.filetier import FileTier
from ..engine.manifest import encode_json
from ..engine.snapshot import Staged
from .trainer_link import PartLink

__all__ = ["PartWriter", "SaveJob"]


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One rank's share of a cut: what is staged, and where it goes."""

    round: int
    step: int
    path: str
    staged: Staged
    objects: dict[str, Any] = field(default_factory=dict)
    rank_objects: dict[str, Any] = field(default_factory=dict)


class PartWriter:
    """Writes this rank's files and list, tells rank 0, and hears how the round ended.

    `last_error` is why the newest save of this gang is no checkpoint; "" when it is one, or while it is open.
    """

    def __init__(self, tier: FileTier, link: PartLink, rank: int, outcome_seconds: float) -> None:
        self._tier, self._link, self._rank = tier, link, rank
        self._outcome_seconds = outcome_seconds
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._open = 0
        self.last_round = 0
        self.last_error = ""
        self.crashed: BaseException | None = None
        self._log = structlog.get_logger().bind(participant="trainer", rank=rank)
        self._thread = threading.Thread(target=self._run, name="slackwater-writer", daemon=True)
        self._thread.start()

    def submit(self, job: SaveJob) -> None:
        """Take over a snapshot; returns at once."""
        with self._lock:
            self._open += 1
            self._idle.clear()
        self._jobs.put(job)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every submitted save has ended one way or the other."""
        return self._idle.wait(timeout_seconds)

    def close(self) -> None:
        """End the thread once it is done with what was submitted; waits for at most a second if it is idle."""
        self._jobs.put(None)
        self._thread.join(1.0 if self._idle.is_set() else 0.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except BaseException as error:  # noqa: BLE001  # kept for the training thread, which raises it
                self.crashed = error
                self.last_error = f"{type(error).__name__}: {error}"
                self._log.error("the writer failed", round=job.round, error=self.last_error)
            finally:
                job.staged.release()
                with self._lock:
                    self._open -= 1
                    if self._open == 0:
                        self._idle.set()

    def _save(self, job: SaveJob) -> None:
        error = ""
        try:
            directory = self._tier.create(job.path)
            part = job.staged.write_part(
                directory,
                participant="trainer",
                rank=self._rank,
                host=socket.gethostname(),
                objects=job.objects,
                rank_objects=job.rank_objects,
            )
            encoded = encode_json(part)
            self._tier.write_json(f"{job.path}/part-r{self._rank:05d}.json", encoded)
            self._link.send_part(job.round, encoded)
        except (SlackwaterError, OSError) as found:
            error = f"rank {self._rank}: {type(found).__name__}: {found}"
            self._log.error("could not save", round=job.round, error=error)
            self._link.send_failure(job.round, error)
        try:
            outcome = self._link.outcome(job.round, self._outcome_seconds)
        except DeadlineExceeded as late:
            # The round may still be committed: its files stay, and training goes on.
            self.last_round, self.last_error = job.round, str(late)
            self._log.error("the end of the round is unknown", round=job.round, error=str(late))
            return
        self.last_round, self.last_error = job.round, outcome
        if outcome:
            self._log.warning("no checkpoint from this round", round=job.round, reason=outcome)
            self._discard(job)

    def _discard(self, job: SaveJob) -> None:
        """Remove what was written in vain. Another rank may still be writing there: then the sweep at start does it."""
        try:
            self._tier.remove(job.path)
        except SlackwaterError as error:
            self._log.info("an attempt's files stay for now", round=job.round, reason=str(error))
