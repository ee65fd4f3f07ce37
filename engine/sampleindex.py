"""The buffer's state as columns: a pure function of the log's entries, the same when live and when replayed.

Sample numbers are dense (ordinal * group_size + index), so a sample is a row and there is no dictionary:
about
50 bytes a sample. Rows at the front that are final and committed are trimmed (the watermark).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .bufferlog import Frame, Kind
from .freshness import StepMap

__all__ = ["LANDED_ROW", "Mark", "SampleIndex", "State", "Numbers"]

Numbers = npt.NDArray[np.int64]

LANDED_ROW = np.dtype(
    [
        ("number", "<i8"),
        ("oldest", "<i8"),
        ("offset", "<i8"),
        ("reward", "<f8"),
        ("revision", "<i4"),
        ("length", "<u4"),
        ("crc", "<u4"),
    ]
)
FIELDS = {
    "state": "u1",
    "attempt": "<u2",
    "timeline": "<i4",
    "file": "<i4",
    "step": "<i4",
    "oldest": "<i8",
    "offset": "<i8",
    "reward": "<f8",
    "revision": "<i4",
    "length": "<u4",
    "crc": "<u4",
}


class State(IntEnum):
    """Where a sample is. TRAINED and DROPPED are final."""

    DISPATCHED = 0
    AGAIN = 1
    LANDED = 2
    LEASED = 3
    TRAINED = 4
    DROPPED = 5


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cut at `step` needs to know: the log's prefix, the newest payload file and the counts at that
    moment."""

    step: int
    position: int
    file: int
    counts: dict[str, int]


class SampleIndex:
    """Columns over samples `base <= number < end`, plus the counters. Not thread-safe; the buffer locks."""

    def __init__(self) -> None:
        self.group_size = 1
        self.base = 0
        self.end = 0
        self.done = 0
        self.timeline = 0
        self.digest = ""
        self.born = False
        self.newest_file = -1
        self.marks: dict[int, Mark] = {}
        self.leases: dict[tuple[int, str], Numbers] = {}
        self.sealed: dict[int, tuple[int, str]] = {}
        self.dropped_by: Counter[str] = Counter()
        self.again_by: Counter[str] = Counter()
        self.pending_versions: Counter[int] = Counter()
        self.step_map = StepMap()
        self.reward_count = 0
        self.reward_sum = 0.0
        self.reward_squares = 0.0
        self._counts = np.zeros(len(State), dtype=np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(1024, kind) for name, kind in FIELDS.items()
        }

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column as a view over the rows in use."""
        return self._columns[name][: self.end - self.base]

    def counts(self) -> dict[str, int]:
        """Samples by state over the whole life of the log, trimmed ones included."""
        return {state.name.lower(): int(self._counts[state]) for state in State}

    def count(self, state: State) -> int:
        """Samples in one state."""
        return int(self._counts[state])

    def outstanding(self) -> int:
        """Dispatched (also to be dispatched again), landed or leased, but not yet trained or dropped."""
        return int(self._counts[: State.TRAINED].sum())

    def numbers_in(self, state: State) -> Numbers:
        """Numbers of the samples in one state, in dispatch order."""
        return np.flatnonzero(self.column("state") == state) + self.base

    def ready_groups(self) -> Numbers:
        """Ordinals whose group has landed completely, in dispatch order."""
        landed = self.column("state") == State.LANDED
        if self.group_size > 1:
            landed = landed.reshape(-1, self.group_size).all(axis=1)
        ordinals: Numbers = np.flatnonzero(landed) + self.base // self.group_size
        return ordinals

    def open_members(self, numbers: Numbers) -> Numbers:
        """The not yet final samples of every group that these belong to."""
        groups = np.unique(numbers // self.group_size)
        members: Numbers = (groups[:, None] * self.group_size + np.arange(self.group_size)).ravel()
        members = members[members >= self.base]
        still_open: Numbers = members[self.column("state")[members - self.base] < State.TRAINED]
        return still_open

    def group_oldest(self, groups: Numbers) -> Numbers:
        """Oldest weight version in each of these complete groups."""
        oldest = self.column("oldest")
        if self.group_size > 1:
            oldest = oldest.reshape(-1, self.group_size).min(axis=1)
        chosen: Numbers = oldest[groups - self.base // self.group_size]
        return chosen

    def row(self, number: int) -> dict[str, Any]:
        """All columns of one sample as Python values."""
        return {name: column[number - self.base].item() for name, column in self._columns.items()}

    def beyond(self, sizes: Mapping[int, int]) -> Numbers:
        """Landed or leased samples whose bytes do not lie within files of these sizes."""
        state, file = self.column("state"), self.column("file")
        held = (state == State.LANDED) | (state == State.LEASED)
        limits = np.zeros(max([self.newest_file, *sizes]) + 1, np.int64)
        for number, size_bytes in sizes.items():
            limits[number] = size_bytes
        if not held.any():
            return np.empty(0, np.int64)
        held_rows = np.flatnonzero(held)
        ends = self.column("offset")[held_rows] + self.column("length")[held_rows]
        lost: Numbers = held_rows[ends > limits[file[held_rows]]] + self.base
        return lost

    def needed_files(self, mark: Mark) -> list[int]:
        """Payload files with a sample that had landed by the mark and was not final by its step."""
        state, file, step = self.column("state"), self.column("file"), self.column("step")
        final = (state >= State.TRAINED) & (step <= mark.step)
        return [int(number) for number in np.unique(file[(file >= 0) & (file <= mark.file) & ~final])]

    def apply(self, frame: Frame) -> None:
        """Take one log entry into account."""
        head, kind = frame.head, frame.kind
        if kind == Kind.LANDED:
            self._landed(frame)
        elif kind == Kind.DISPATCHED:
            self._dispatched(frame)
        elif kind == Kind.LEASED:
            numbers = _numbers(frame)
            self._move(numbers, State.LEASED, head.step)
            self.leases[head.step, head.key] = numbers
        elif kind == Kind.TRAINED:
            self._move(_numbers(frame), State.TRAINED, head.step)
            self._forget_leases(head.step)
        elif kind == Kind.DROPPED:
            numbers = _numbers(frame)
            self._move(numbers, State.DROPPED, self.done + 1)
            self.dropped_by[head.reason] += len(numbers)
        elif kind == Kind.AGAIN:
            self._again(_numbers(frame), head.reason)
        elif kind == Kind.RELEASED:
            self._move(_numbers(frame), State.LANDED, 0)
            self._forget_leases(head.step)
        elif kind == Kind.STEP_DONE:
            self.done = head.step
            self.step_map.training_step = max(self.step_map.training_step, head.step)
            self.marks[head.step] = Mark(head.step, frame.end, self.newest_file, self.counts())
        elif kind == Kind.STEP_MAP:
            self.step_map.apply(head.versions, head.step, replace=head.replace)
        elif kind == Kind.SEALED:
            self.sealed[head.file] = (head.size_bytes, head.digest)
        elif kind == Kind.RESTORED:
            self._restored(head.timeline)
        elif kind == Kind.BIRTH:
            self.group_size, self.digest, self.born = head.group_size, head.digest, True

    def trim(self, step: int) -> None:
        """Forget marks below `step` and the leading rows that were final by it."""
        self.marks = {key: mark for key, mark in self.marks.items() if key >= step}
        open_rows = np.flatnonzero((self.column("state") < State.TRAINED) | (self.column("step") > step))
        front = int(open_rows[0]) if len(open_rows) else self.end - self.base
        front -= front % self.group_size
        if front * 2 < self.end - self.base or not front:
            return
        for name, column in self._columns.items():
            self._columns[name] = column[front : self.end - self.base].copy()
        self.base += front

    def _landed(self, frame: Frame) -> None:
        rows = np.frombuffer(frame.raw, LANDED_ROW)
        at = rows["number"] - self.base
        for name in ("oldest", "offset", "reward", "revision", "length", "crc"):
            self._columns[name][at] = rows[name]
        self._columns["timeline"][at] = frame.head.timeline
        self._columns["file"][at] = frame.head.file
        self.newest_file = max(self.newest_file, frame.head.file)
        rewards = rows["reward"]
        self.reward_count += len(rewards)
        self.reward_sum += float(rewards.sum())
        self.reward_squares += float((rewards * rewards).sum())
        self._move(rows["number"], State.LANDED, 0)

    def _dispatched(self, frame: Frame) -> None:
        if not frame.head.count:
            numbers = _numbers(frame)
            self._columns["attempt"][numbers - self.base] += 1
            self._move(numbers, State.DISPATCHED, 0)
            return
        fresh = frame.head.count * self.group_size
        self._grow(self.end - self.base + fresh)
        rows = slice(self.end - self.base, self.end - self.base + fresh)
        for column in self._columns.values():
            column[rows] = 0
        self._columns["attempt"][rows] = 1
        self._columns["file"][rows] = -1
        self.end += fresh
        self._counts[State.DISPATCHED] += fresh

    def _again(self, numbers: Numbers, reason: str) -> None:
        self._move(numbers, State.AGAIN, 0)
        self._columns["file"][numbers - self.base] = -1
        self.again_by[reason] += len(numbers)

    def _restored(self, timeline: int) -> None:
        self.timeline = timeline
        self._move(self.numbers_in(State.LEASED), State.LANDED, 0)
        self._again(self.numbers_in(State.DISPATCHED), "restored")
        self.leases.clear()

    def _forget_leases(self, step: int) -> None:
        for key in [key for key in self.leases if key[0] == step]:
            del self.leases[key]

    def _move(self, numbers: Numbers, state: State, step: int) -> None:
        at = numbers - self.base
        old = self._columns["state"][at]
        self._count_pending(at[old == State.LANDED], -1)
        self._counts -= np.bincount(old, minlength=len(State))
        self._counts[state] += len(at)
        self._columns["state"][at] = state
        self._columns["step"][at] = step
        if state == State.LANDED:
            self._count_pending(at, 1)

    def _count_pending(self, at: Numbers, sign: int) -> None:
        if not len(at):
            return
        versions, counts = np.unique(self._columns["oldest"][at], return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            self.pending_versions[version] += sign * count
            if not self.pending_versions[version]:
                del self.pending_versions[version]

    def _grow(self, rows: int) -> None:
        have = len(self._columns["state"])
        if rows > have:
            more = max(rows, 2 * have) - have
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.zeros(more, column.dtype)])


def _numbers(frame: Frame) -> Numbers:
    return np.frombuffer(frame.raw, np.int64)
