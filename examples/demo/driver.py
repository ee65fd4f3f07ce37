"""The rollout driver: takes prompts from the buffer, has them answered, rewards the answers and lands them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from slackwater.adapters.rolloutclient import Answer
from slackwater.engine.errors import Conflict, Unavailable
from slackwater.engine.experience import ExperienceBuffer
from slackwater.engine.samples import Caller, Dispatch, Sample

from .task import Task

__all__ = ["Driver", "Payload", "Rollouts"]

ANSWER_SECONDS = 30.0
PAUSE_SECONDS = 0.02


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample's payload holds, as JSON."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Rollouts(Protocol):
    """Whoever answers prompts: `slackwater.adapters.rolloutclient.RolloutClient`."""

    @property
    def timeline(self) -> int:
        """The job's timeline; 0 before it is known and during a recovery."""
        ...

    def generate(self, prompts: list[list[int]], *, timeout_seconds: float) -> list[Answer]:
        """One answer for each prompt; `Unavailable` when none comes in time."""
        ...


class Driver:
    """A few threads between buffer and rollouts; pauses, deaths and recoveries of either only make them wait.

    Keeps at most `ahead_samples` answered samples waiting, so that what is trained on is fresh. `on_refused` is called
    in a driver thread with how many answers of one prompt were refused, by reason (`mixed`, `foreign`).
    """

    def __init__(
        self,
        buffer: ExperienceBuffer,
        rollouts: Rollouts,
        task: Task,
        *,
        ahead_samples: int,
        workers: int = 2,
        on_refused: Callable[[dict[str, int]], None] = lambda _: None,
    ) -> None:
        self._buffer, self._rollouts, self._task = buffer, rollouts, task
        self._ahead_samples = ahead_samples
        self._on_refused = on_refused
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, name=f"driver-{number}", daemon=True)
            for number in range(workers)
        ]

    @property
    def counts(self) -> dict[str, int]:
        """How many samples were `landed`, or refused as `mixed` (several versions) or `foreign` (another timeline)."""
        with self._lock:
            return dict(self._counts)

    def start(self) -> None:
        """Begin; returns at once."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ask the threads to end and wait for them; close the rollouts first, or it may take `ANSWER_SECONDS`."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise what ended one of the threads, if something did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # raised by `check` in the training thread
            self._error = error

    def _serve(self) -> None:
        while not self._stopping.is_set():
            caller = Caller(timeline=self._rollouts.timeline)
            try:
                dispatch = self._next(caller)
                if dispatch is None:
                    self._stopping.wait(PAUSE_SECONDS)
                else:
                    self._answer(caller, dispatch)
            except Conflict:  # a recovery: the buffer is on another timeline and asks for these samples again
                self._stopping.wait(PAUSE_SECONDS)

    def _next(self, caller: Caller) -> Dispatch | None:
        if caller.timeline < 1 or self._buffer.statistics()["counts"].get("landed", 0) >= self._ahead_samples:
            return None
        found = self._buffer.next_prompts(caller, 1)
        return found[0] if found else None

    def _answer(self, caller: Caller, dispatch: Dispatch) -> None:
        prompt = self._task.prompt_ids(dispatch.prompt)
        ids = dispatch.ids()
        try:
            answers = self._rollouts.generate([prompt] * len(ids), timeout_seconds=ANSWER_SECONDS)
        except Unavailable:
            self._buffer.requeue(caller, ids, "no rollout answered")
            return
        samples, again, refused = [], [], Counter[str]()
        for name, answer in zip(ids, answers, strict=True):
            if fault := _fault(answer, caller.timeline):
                refused[fault] += 1
                again.append(name)
                continue
            payload = Payload(prompt_ids=tuple(prompt), answer_ids=answer.token_ids, logprobs=answer.logprobs)
            samples.append(
                Sample(
                    id=name,
                    spans=answer.spans,
                    payload=msgspec.json.encode(payload),
                    reward=self._task.reward(dispatch.prompt, answer.token_ids),
                    sampling_revision=answer.sampling_revision,
                )
            )
        if samples:
            self._count("landed", self._buffer.land(caller, samples).accepted)
        if again:
            self._refuse(refused)
            self._buffer.requeue(caller, again, "made by more than one version or by another timeline")

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] += number

    def _refuse(self, refused: Counter[str]) -> None:
        for what, number in refused.items():
            self._count(what, number)
        self._on_refused(dict(refused))


def _fault(answer: Answer, timeline: int) -> str:
    """Why an answer must not be trained on, or ""."""
    if answer.timelines != {timeline}:
        return "foreign"
    return "mixed" if answer.mixed else ""
