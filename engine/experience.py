"""The experience buffer: samples from dispatch to training, exactly once each, across kills and recoveries.

State is what the log says; this class decides, appends an entry, applies it to the index, and reads payloads.
One process owns the directory. All methods are thread-safe; only `lease` waits, and only if asked to.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from . import bufferfiles as files
from .bufferlog import Frame, Head, Kind, SegmentLog, fsync_directory
from .errors import ConfigError, Conflict, CorruptCheckpoint, Fenced, SlotOccupied, StateMismatch
from .payloads import PayloadFiles, file_crc64
from .sampleindex import LANDED_ROW, Numbers, SampleIndex, State
from .samples import (
    BufferPart,
    Caller,
    Dispatch,
    FreshnessReport,
    LandReport,
    LeasedSample,
    PartFile,
    PromptSource,
    Sample,
    SampleId,
    Span,
)

__all__ = ["ExperienceBuffer"]

SPAN = struct.Struct("<qqq")
SPAN_COUNT = struct.Struct("<I")
NAME_PREFIX = "buffer-"


class ExperienceBuffer:
    """An append-only buffer in one directory. Constructing does no I/O; the first use (or `open`) replays
    the log.

    `batch_size` is the number of samples that one training step consumes and `group_size` how many answers
    of one
    prompt belong together: both admission and leases count samples, in whole groups. `fifo` means dispatch
    order,
    so that long rollouts are not pushed to the end; `uniform` is seeded by (`seed`, step); `fresh` takes
    the newest
    weight versions first. With `lost_payloads="redispatch"` a restore from a part without its payload
    files asks
    for those samples again instead of raising. `sync_interval_seconds` bounds what a power cut can take back;
    `step_done`, `fence` and `cut` are durable when they return.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prompts: PromptSource,
        batch_size: int,
        max_staleness_steps: int,
        group_size: int = 1,
        stale_fraction: float = 0.3,
        stale_policy: Literal["clear", "downweight", "keep"] = "clear",
        strategy: Literal["fifo", "uniform", "fresh"] = "fifo",
        seed: int = 0,
        lost_payloads: Literal["refuse", "redispatch"] = "refuse",
        segment_bytes: int = 64 << 20,
        payload_file_bytes: int = 256 << 20,
        sync_interval_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if group_size < 1 or batch_size < 1 or batch_size % group_size:
            raise ConfigError(
                f"batch_size {batch_size} must be a positive multiple of group_size {group_size}"
            )
        if max_staleness_steps < 0 or not 0.0 <= stale_fraction <= 1.0:
            raise ConfigError("max_staleness_steps must be >= 0 and stale_fraction between 0 and 1")
        if stale_policy not in ("clear", "downweight", "keep") or strategy not in (
            "fifo",
            "uniform",
            "fresh",
        ):
            raise ConfigError(f"unknown stale_policy {stale_policy!r} or strategy {strategy!r}")
        self._directory = Path(directory)
        self._prompts = prompts
        self._batch_size = batch_size
        self._max_staleness_steps = max_staleness_steps
        self._group_size = group_size
        self._stale_fraction = stale_fraction
        self._stale_policy = stale_policy
        self._strategy = strategy
        self._seed = seed
        self._lost_payloads = lost_payloads
        self._segment_bytes = segment_bytes
        self._payload_file_bytes = payload_file_bytes
        self._sync_interval_seconds = sync_interval_seconds
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._files_busy = (
            threading.Lock()
        )  # a cut links files outside the main lock; nobody deletes them meanwhile
        self._lock_fd = -1
        self._generation = 0
        self._fence = Caller(timeline=0)
        self._last_sync_seconds = 0.0
        self._weighting = False
        self._index: SampleIndex
        self._log: SegmentLog
        self._payloads: PayloadFiles

    # ---- life ----

    def open(self) -> Self:
        """Take the directory and replay the log. `SlotOccupied` when another process has it; idempotent."""
        with self._changed:
            if self._lock_fd >= 0:
                return self
            self._directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._directory / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                raise SlotOccupied(f"another process has the buffer in {self._directory}") from error
            self._lock_fd = fd
            try:
                self._load()
            except BaseException:  # the lock must not outlive a failed start
                self._lock_fd = -1
                os.close(fd)
                raise
        return self

    def close(self) -> None:
        """Sync and let go of the directory; idempotent."""
        with self._changed:
            if self._lock_fd >= 0:
                self._payloads.close()
                self._log.close()
                os.close(self._lock_fd)
                self._lock_fd = -1

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The log's position."""
        with self._changed:
            self.open()
            return self._log.end

    def sync(self) -> None:
        """Make everything so far durable."""
        with self._changed:
            self.open()
            self._sync()

    # ---- fence ----

    def fence(self, timeline: int, incarnation: str = "") -> None:
        """Refuse lower timelines from now on, durably; `incarnation` (the trainer's) must then come with
        its calls."""
        with self._changed:
            self.open()
            if timeline < self._fence.timeline:
                raise Fenced(f"timeline {timeline} is over: the buffer is on {self._fence.timeline}")
            wanted = Caller(timeline=timeline, incarnation=incarnation)
            if wanted != self._fence:
                files.write_fence(self._directory, wanted)
                self._fence = wanted
                self._changed.notify_all()

    def check(self, caller: Caller, *, trainer: bool = False) -> None:
        """Raise `Fenced` for a caller of an older timeline or another trainer, `Conflict` for one from the
        future."""
        with self._changed:
            self.open()
            if caller.timeline < self._fence.timeline:
                raise Fenced(f"timeline {caller.timeline} is over: the buffer is on {self._fence.timeline}")
            if caller.timeline > self._fence.timeline:
                raise Conflict(f"the buffer has not joined timeline {caller.timeline} yet")
            if trainer and self._fence.incarnation not in ("", caller.incarnation):
                raise Fenced(f"incarnation {caller.incarnation!r} is not the trainer of this timeline")

    # ---- rollout side ----

    def next_prompts(self, caller: Caller, count: int) -> list[Dispatch]:
        """Up to `count` prompts to answer: first those to be answered again, then new ones within the bound.

        Fewer, or none, when (max_staleness_steps + 1) * batch_size samples are outstanding or the data is
        over.
        """
        with self._changed:
            self.check(caller)
            again = self._dispatch_again(count)
            return again + self._dispatch_new(count - len(again))

    def land(self, caller: Caller, samples: Sequence[Sample]) -> LandReport:
        """Insert finished samples; the first one of an identity wins, a repetition counts as a duplicate.

        All or nothing for the batch: `ConfigError` when one was never dispatched or carries no span.
        """
        with self._changed:
            self.check(caller)
            fresh: dict[int, Sample] = {}
            for sample in samples:
                number = self._number(sample.id)
                if not sample.spans:
                    raise ConfigError(f"sample {sample.id} names no weight version")
                if number >= self._index.base and number not in fresh and self._awaited(number):
                    fresh[number] = sample
            dropped = self._insert(caller.timeline, fresh) if fresh else 0
            self._changed.notify_all()
            duplicates = len(samples) - len(fresh)
            return LandReport(accepted=len(fresh) - dropped, duplicates=duplicates, dropped=dropped)

    def requeue(self, caller: Caller, ids: Sequence[SampleId], reason: str = "lost") -> int:
        """Ask for dispatched samples again (their driver died); those that landed meanwhile are left
        alone."""
        with self._changed:
            self.check(caller)
            numbers = self._numbers_of(ids)
            numbers = numbers[self._index.column("state")[numbers - self._index.base] == State.DISPATCHED]
            self._entry_over(Kind.AGAIN, numbers, reason=reason)
            return len(numbers)

    def drop(self, caller: Caller, ids: Sequence[SampleId], reason: str) -> int:
        """Give up samples on purpose, with their whole groups; returns and counts how many. Final ones
        stay."""
        with self._changed:
            self.check(caller)
            numbers = self._index.open_members(self._numbers_of(ids))
            self._entry_over(Kind.DROPPED, numbers, reason=reason)
            return len(numbers)

    # ---- trainer side ----

    def lease(
        self,
        caller: Caller,
        step: int,
        count: int,
        *,
        key: str = "",
        prefetch: bool = False,
        timeout_seconds: float = 0.0,
    ) -> list[LeasedSample]:
        """Lease exactly `count` samples for a step, or none when so many do not come within the time.

        The step is the one after the last `step_done`; a later one only with `prefetch`. A repetition with
        the same
        `key` returns the same samples. Whole groups come together, in the strategy's order.
        """
        if count < 1 or count % self._group_size:
            raise ConfigError(
                f"a lease of {count} samples is not a multiple of group_size {self._group_size}"
            )
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while True:
                self.check(caller, trainer=True)
                self._check_lease_step(step, prefetch)
                if key and (step, key) in self._index.leases:
                    held = self._read_or_requeue(self._index.leases[step, key], step)
                    if held is not None:
                        return held
                    self._entry_over(Kind.RELEASED, self._leased_for(step), step=step)  # lease anew
                self._tidy()
                leased = self._lease_now(step, count, key)
                left = deadline - self._clock()
                if leased or left <= 0:
                    return leased
                self._changed.wait(left)

    def unlease(self, caller: Caller, step: int) -> int:
        """Give back what is leased for a step and was not trained; it is pending again."""
        with self._changed:
            self.check(caller, trainer=True)
            numbers = self._leased_for(step)
            self._entry_over(Kind.RELEASED, numbers, step=step)
            return len(numbers)

    def trained(self, caller: Caller, step: int) -> int:
        """Everything leased for the step has been trained on; returns how many. A repetition finds none."""
        with self._changed:
            self.check(caller, trainer=True)
            numbers = self._leased_for(step)
            self._entry_over(Kind.TRAINED, numbers, step=step)
            return len(numbers)

    def step_done(self, caller: Caller, step: int) -> int:
        """The step is over, durably; returns the log position, which is the buffer version of a cut here.

        Idempotent for the last step; `Conflict` for an older one or while something is leased for it,
        untrained.
        """
        with self._changed:
            self.check(caller, trainer=True)
            index = self._index
            if step == index.done and step in index.marks:
                return index.marks[step].position
            if step < index.done:
                raise Conflict(f"step {step} is over: the buffer has recorded step {index.done}")
            leased = (index.column("state") == State.LEASED) & (index.column("step") <= step)
            if leased.any():
                raise Conflict(
                    f"{int(leased.sum())} samples leased up to step {step} are neither trained nor given back"
                )
            self._entry(Kind.STEP_DONE, Head(step=step))
            self._sync()
            return index.marks[step].position

    # ---- the port of the participant ----

    def cut(self, step: int, directory: Path) -> BufferPart:
        """Write the log's prefix up to `step_done(step)` and the payloads it needs into `directory`,
        durably."""
        directory.mkdir(parents=True, exist_ok=True)
        with self._files_busy:
            with self._changed:
                self.open()
                began = self._clock()
                mark = self._index.marks.get(step)
                if mark is None:
                    raise Conflict(
                        f"no cut at step {step}: it was not recorded here, or is older than a committed one"
                    )
                needed = self._index.needed_files(mark)
                if self._payloads.tail in needed:
                    self._seal_payloads()
                sealed = dict(self._index.sealed)
                prefix = self._log.prefix(mark.position)
                blocked = self._clock() - began
            parts = [self._cut_log(path, size, whole, directory) for path, size, whole in prefix]
            parts += [self._cut_payload(file, sealed, directory) for file in needed]
            fsync_directory(directory)
        return BufferPart(
            step=step, version=mark.position, files=tuple(parts), counts=mark.counts, blocked_seconds=blocked
        )

    def committed(self, step: int) -> None:
        """A checkpoint of this step is committed: payloads trained by then are deleted, the watermark
        moves."""
        with self._files_busy, self._changed:
            self.open()
            mark = self._index.marks.get(step)
            if mark is None:
                return
            needed = set(self._index.needed_files(mark))
            for file in self._payloads.present():
                if file <= mark.file and file != self._payloads.tail and file not in needed:
                    self._payloads.remove(file)
            self._index.trim(step)

    def restore(self, directory: Path, part: BufferPart | None, timeline: int) -> None:
        """Become what `part` says, on `timeline`; None means empty. The old state lives until the very
        last rename."""
        with self._files_busy, self._changed:
            self.check(Caller(timeline=timeline))
            generation = self._generation + 1
            target = files.generation_path(self._directory, generation)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            if part is not None:
                self._fetch(directory, part, target)
            index, log, payloads = self._read(target, torn_tail=False)
            try:
                if part is not None and (index.done, log.end) != (part.step, part.version):
                    found = f"{log.end}, step {index.done}"
                    raise CorruptCheckpoint(f"the log in {directory} ends at {found}", str(directory))
                if part is not None:
                    log.roll()  # fetched files may be hard links: they never grow
                    index.apply(log.append(Kind.RESTORED, Head(timeline=timeline)))
                self._requeue_lost(index, log, payloads)
                log.sync()
            except BaseException:  # the old generation stays in force, whatever went wrong
                log.close()
                raise
            fsync_directory(target)
            fsync_directory(self._directory)
            files.write_generation(self._directory, generation)  # the commit point of a restore
            old, self._generation = self._generation, generation
            self._payloads.close()
            self._log.close()
            self._index, self._log, self._payloads = index, log, payloads
            shutil.rmtree(files.generation_path(self._directory, old), ignore_errors=True)
            index.trim(index.done)
            self._changed.notify_all()

    def apply_freshness(self, step_map: Mapping[int, int], training_step: int) -> FreshnessReport:
        """Record the lineage's step map and the trainer's step, and treat stale and dead samples now."""
        with self._changed:
            self.open()
            replace, news = self._index.step_map.news(step_map)
            if replace or news or training_step != self._index.step_map.training_step:
                self._entry(Kind.STEP_MAP, Head(versions=news, replace=replace, step=training_step))
            report = self._tidy()
            self._changed.notify_all()
            return report

    def statistics(self) -> dict[str, Any]:
        """Counts by state, drops and repeats by reason, stale fraction, rewards of all landed samples."""
        with self._changed:
            self.open()
            index = self._index
            stale, dead = self._stale_and_dead()
            mean = index.reward_sum / index.reward_count if index.reward_count else 0.0
            variance = index.reward_squares / index.reward_count - mean * mean if index.reward_count else 0.0
            pending = index.count(State.LANDED)
            return {
                "step": index.done,
                "version": self._log.end,
                "timeline": self._fence.timeline,
                "counts": index.counts(),
                "outstanding": index.outstanding(),
                "admission_limit": self._admission_limit(),
                "dropped_by_reason": dict(+index.dropped_by),
                "again_by_reason": dict(+index.again_by),
                "stale_fraction": stale / pending if pending else 0.0,
                "dead": dead,
                "weighting": self._weighting,
                "next_ordinal": index.end // self._group_size,
                "reward_count": index.reward_count,
                "reward_mean": mean,
                "reward_std": math.sqrt(max(0.0, variance)),
            }

    # ---- dispatch and insertion ----

    def _admission_limit(self) -> int:
        return (self._max_staleness_steps + 1) * self._batch_size

    def _dispatch_again(self, count: int) -> list[Dispatch]:
        numbers = self._index.numbers_in(State.AGAIN)
        groups = np.unique(numbers // self._group_size)[: max(0, count)]
        numbers = numbers[np.isin(numbers // self._group_size, groups)]
        self._entry_over(Kind.DISPATCHED, numbers)
        indices: dict[int, list[int]] = {}
        for number in numbers.tolist():
            indices.setdefault(number // self._group_size, []).append(number % self._group_size)
        return [self._dispatch(ordinal, tuple(wanted)) for ordinal, wanted in indices.items()]

    def _dispatch_new(self, count: int) -> list[Dispatch]:
        room = (self._admission_limit() - self._index.outstanding()) // self._group_size
        first, prompts = self._index.end // self._group_size, []
        for ordinal in range(first, first + min(count, room)):
            try:
                prompts.append(self._prompts.prompt(ordinal))
            except IndexError:
                break
        if prompts:
            self._entry(Kind.DISPATCHED, Head(first=first, count=len(prompts), prompts=tuple(prompts)))
        every = tuple(range(self._group_size))
        return [self._dispatch(first + place, every) for place in range(len(prompts))]

    def _dispatch(self, ordinal: int, indices: tuple[int, ...]) -> Dispatch:
        at = ordinal * self._group_size + indices[0] - self._index.base
        return Dispatch(
            prompt=self._prompts.prompt(ordinal),
            ordinal=ordinal,
            epoch=self._prompts.epoch(ordinal),
            indices=indices,
            attempt=int(self._index.column("attempt")[at]),
        )

    def _number(self, name: SampleId) -> int:
        number = name.ordinal * self._group_size + name.index
        if not (0 <= name.index < self._group_size and 0 <= number < self._index.end):
            raise ConfigError(f"{name} was never dispatched")
        if self._prompts.prompt(name.ordinal) != name.prompt:
            raise ConfigError(f"{name}: prompt {name.ordinal} is {self._prompts.prompt(name.ordinal)!r}")
        return number

    def _numbers_of(self, ids: Sequence[SampleId]) -> Numbers:
        numbers = np.array(sorted({self._number(name) for name in ids}), dtype=np.int64)
        return numbers[numbers >= self._index.base]

    def _awaited(self, number: int) -> bool:
        return bool(self._index.column("state")[number - self._index.base] <= State.AGAIN)

    def _insert(self, timeline: int, fresh: dict[int, Sample]) -> int:
        blobs = [_pack(sample) for sample in fresh.values()]
        file, offset = self._payloads.append(blobs)
        rows = []
        for (number, sample), blob in zip(fresh.items(), blobs, strict=True):
            oldest = min(span[0] for span in sample.spans)
            row = (
                number,
                oldest,
                offset,
                sample.reward,
                sample.sampling_revision,
                len(blob),
                zlib.crc32(blob),
            )
            rows.append(row)
            offset += len(blob)
        raw = np.array(rows, LANDED_ROW).tobytes()
        self._entry(Kind.LANDED, Head(timeline=timeline, file=file), raw)
        if self._payloads.full():
            self._seal_payloads()
        if not self._tidy().dropped:
            return 0
        at = np.fromiter(fresh, np.int64, len(fresh)) - self._index.base
        return int((self._index.column("state")[at] == State.DROPPED).sum())

    # ---- leasing and freshness ----

    def _check_lease_step(self, step: int, prefetch: bool) -> None:
        done = self._index.done
        if step <= done or (step != done + 1 and not prefetch):
            raise Conflict(f"step {step} cannot be leased: the last one recorded as done is {done}")

    def _leased_for(self, step: int) -> Numbers:
        if step <= self._index.done:
            return np.empty(0, np.int64)
        leased = self._index.column("state") == State.LEASED
        return np.flatnonzero(leased & (self._index.column("step") == step)) + self._index.base

    def _lease_now(self, step: int, count: int, key: str) -> list[LeasedSample]:
        while True:
            groups = self._index.ready_groups()
            wanted = count // self._group_size
            if len(groups) < wanted:
                return []
            chosen = self._choose(groups, wanted, step)
            numbers = (chosen[:, None] * self._group_size + np.arange(self._group_size)).ravel()
            samples = self._read_or_requeue(numbers, step)
            if samples is not None:
                self._entry_over(Kind.LEASED, numbers, step=step, key=key)
                return samples

    def _choose(self, groups: Numbers, wanted: int, step: int) -> Numbers:
        if self._strategy == "fifo" or len(groups) == wanted:
            return groups[:wanted]
        if self._strategy == "uniform":
            leases_before = sum(1 for leased_step, _ in self._index.leases if leased_step == step)
            random = np.random.default_rng([self._seed, step, leases_before, self._index.count(State.LEASED)])
            return np.sort(random.choice(groups, wanted, replace=False, shuffle=False))
        return _newest(groups, self._index.group_oldest(groups), wanted)

    def _read_or_requeue(self, numbers: Numbers, step: int) -> list[LeasedSample] | None:
        """Read samples; when payloads are lost, ask for those again and return None."""
        samples, lost = [], []
        for number in numbers.tolist():
            sample = self._read_sample(number, step)
            samples.append(sample) if sample is not None else lost.append(number)
        if lost:
            self._entry_over(Kind.AGAIN, np.array(lost, np.int64), reason="payload_lost")
            return None
        return [sample for sample in samples if sample is not None]

    def _read_sample(self, number: int, step: int) -> LeasedSample | None:
        row = self._index.row(number)
        blob = self._payloads.read(row["file"], row["offset"], row["length"], row["crc"])
        if blob is None:
            return None
        spans, payload = _unpack(blob)
        ordinal, index = divmod(number, self._group_size)
        weight = (
            self._index.step_map.weight(row["oldest"], self._max_staleness_steps) if self._weighting else 1.0
        )
        return LeasedSample(
            id=SampleId(prompt=self._prompts.prompt(ordinal), ordinal=ordinal, index=index),
            step=step,
            spans=spans,
            oldest_version=row["oldest"],
            timeline=row["timeline"],
            reward=row["reward"],
            sampling_revision=row["revision"],
            payload=payload,
            weight=weight,
        )

    def _stale_and_dead(self) -> tuple[int, int]:
        found = {"stale": 0, "dead": 0, "fresh": 0}
        for version, count in self._index.pending_versions.items():
            found[self._index.step_map.verdict(version, self._max_staleness_steps)] += count
        return found["stale"], found["dead"]

    def _tidy(self) -> FreshnessReport:
        """Drop dead samples always; treat stale ones by policy once they are more than `stale_fraction`."""
        stale, dead = self._stale_and_dead()
        dropped = self._drop_versions("dead", "dead_timeline") if dead else 0
        stale, _ = self._stale_and_dead() if dead else (stale, 0)
        pending = self._index.count(State.LANDED)
        above = pending > 0 and stale / pending > self._stale_fraction
        self._weighting = above and self._stale_policy == "downweight"
        if above and self._stale_policy == "clear":
            dropped += self._drop_versions("stale", "stale")
        action = self._stale_policy if above else "none"
        return FreshnessReport(pending=pending, stale=stale, dead=dead, action=action, dropped=dropped)

    def _drop_versions(self, verdict: str, reason: str) -> int:
        judge, limit = self._index.step_map.verdict, self._max_staleness_steps
        versions = [version for version in self._index.pending_versions if judge(version, limit) == verdict]
        bad = (self._index.column("state") == State.LANDED) & np.isin(self._index.column("oldest"), versions)
        numbers = self._index.open_members(np.flatnonzero(bad) + self._index.base)
        self._entry_over(Kind.DROPPED, numbers, reason=reason)
        return len(numbers)

    # ---- the log ----

    def _entry(self, kind: int, head: Head, raw: bytes = b"") -> Frame:
        frame = self._log.append(kind, head, raw)
        self._index.apply(frame)
        if self._clock() - self._last_sync_seconds >= self._sync_interval_seconds:
            self._sync()
        return frame

    def _entry_over(
        self, kind: int, numbers: Numbers, *, reason: str = "", step: int = 0, key: str = ""
    ) -> None:
        if len(numbers):
            self._entry(kind, Head(reason=reason, step=step, key=key), numbers.astype(np.int64).tobytes())

    def _sync(self) -> None:
        self._payloads.sync()
        self._log.sync()
        self._last_sync_seconds = self._clock()

    def _seal_payloads(self) -> None:
        sealed = self._payloads.seal()
        if sealed is not None:
            file, size_bytes, digest = sealed
            self._entry(Kind.SEALED, Head(file=file, size_bytes=size_bytes, digest=digest))

    def _load(self) -> None:
        self._fence = files.read_fence(self._directory)
        self._generation = files.read_generation(self._directory)
        if not self._generation:
            files.generation_path(self._directory, 1).mkdir(exist_ok=True)
            fsync_directory(self._directory)
            files.write_generation(self._directory, 1)
            self._generation = 1
        living = files.generation_path(self._directory, self._generation)
        for other in self._directory.glob("g[0-9]*"):
            if other != living:
                shutil.rmtree(other)
        self._index, self._log, self._payloads = self._read(living, torn_tail=True)
        self._requeue_lost(self._index, self._log, self._payloads)
        self._last_sync_seconds = self._clock()

    def _read(self, directory: Path, *, torn_tail: bool) -> tuple[SampleIndex, SegmentLog, PayloadFiles]:
        index, log = SampleIndex(), SegmentLog(directory, segment_bytes=self._segment_bytes)
        for frame in log.replay(torn_tail=torn_tail):
            index.apply(frame)
        if not index.born:
            head = Head(group_size=self._group_size, digest=self._prompts.digest)
            index.apply(log.append(Kind.BIRTH, head))
            log.sync()
        if (index.group_size, index.digest) != (self._group_size, self._prompts.digest):
            log.close()
            raise StateMismatch(
                "the buffer was written with another prompt order or group size", changed=["prompts"]
            )
        return (
            index,
            log,
            PayloadFiles(directory, first=index.newest_file + 1, file_bytes=self._payload_file_bytes),
        )

    @staticmethod
    def _requeue_lost(index: SampleIndex, log: SegmentLog, payloads: PayloadFiles) -> None:
        """Ask again for samples whose payload is missing or cut off (a power cut, a part without
        payloads)."""
        lost = index.beyond(payloads.present())
        if len(lost):
            index.apply(log.append(Kind.AGAIN, Head(reason="payload_lost"), lost.tobytes()))

    # ---- files of a cut ----

    @staticmethod
    def _cut_log(path: Path, size_bytes: int, whole: bool, directory: Path) -> PartFile:
        target = directory / (NAME_PREFIX + path.name)
        if whole:
            files.link_or_copy(path, target)
            digest = file_crc64(target)
        else:
            digest = files.copy_prefix(path, target, size_bytes)
        return PartFile(name=target.name, kind="log", size_bytes=size_bytes, digest=digest)

    def _cut_payload(self, file: int, sealed: dict[int, tuple[int, str]], directory: Path) -> PartFile:
        source = self._payloads.path(file)
        target = directory / (NAME_PREFIX + source.name)
        files.link_or_copy(source, target)
        size_bytes, digest = sealed.get(file) or (target.stat().st_size, file_crc64(target))
        return PartFile(name=target.name, kind="payload", size_bytes=size_bytes, digest=digest)

    def _fetch(self, directory: Path, part: BufferPart, target: Path) -> None:
        for file in part.files:
            name = file.name.removeprefix(NAME_PREFIX)
            if files.fetch_part_file(directory, file, target / name):
                continue
            if file.kind == "log" or self._lost_payloads == "refuse":
                raise CorruptCheckpoint(f"{directory / file.name} is missing", str(directory / file.name))


def _pack(sample: Sample) -> bytes:
    spans = b"".join([SPAN.pack(*span) for span in sample.spans])
    return b"".join((SPAN_COUNT.pack(len(sample.spans)), spans, sample.payload))


def _unpack(blob: bytes) -> tuple[tuple[Span, ...], bytes]:
    (count,) = SPAN_COUNT.unpack_from(blob)
    start = SPAN_COUNT.size + count * SPAN.size
    return tuple(SPAN.iter_unpack(blob[SPAN_COUNT.size : start])), blob[start:]


def _newest(groups: Numbers, oldest: Numbers, wanted: int) -> Numbers:
    """The groups with the highest versions; among equals the first in dispatch order."""
    threshold = np.partition(oldest, len(oldest) - wanted)[len(oldest) - wanted]
    above = groups[oldest > threshold]
    return np.concatenate([above, groups[oldest == threshold][: wanted - len(above)]])
