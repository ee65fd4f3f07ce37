"""Asks the job's rollout servers for answers: finds them by their routes, and says which version made what.

    client = RolloutClient(store, "my-job").start()
    answers = client.generate([[1, 5], [1, 7]], timeout_seconds=60.0)
    client.close()

Only engines with a route are asked, in turn. What one of them cannot answer is asked of the next one; without any
route a call waits. Imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import httpx
import msgspec
import structlog

from ..engine.errors import SlackwaterError, Unavailable
from ..engine.follow import Follower
from ..engine.keys import Keys
from ..engine.model import Record, Route, Sampling
from ..engine.ports import StateStore
from ..engine.samples import Span
from ..engine.view import View

__all__ = ["Answer", "Label", "RolloutClient", "parse_label"]

_POLL_SECONDS = 0.5
_RETRY_SECONDS = 1.0


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's label says: `<timeline>.<version>.<incarnation>`."""

    timeline: int
    version: int
    incarnation: str


def parse_label(text: str) -> Label | None:
    """The parts of an engine's label; None when it is not one of ours (an engine that was never synced)."""
    parts = text.split(".", 2)
    if len(parts) != 3 or not parts[0].isdecimal() or not parts[1].isdecimal():
        return None
    return Label(timeline=int(parts[0]), version=int(parts[1]), incarnation=parts[2])


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer. `spans` name the version of every token, `sampling_revision` the parameters sent.

    `logprobs` are the engine's, at the sampling temperature; `timelines` are those of the spans' labels.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    timelines: frozenset[int]
    sampling_revision: int
    rollout: str

    @property
    def oldest_version(self) -> int:
        """The answer's policy version: the oldest that made one of its tokens."""
        return min(version for version, _, _ in self.spans)

    @property
    def mixed(self) -> bool:
        """Whether more than one version made it."""
        return len({version for version, _, _ in self.spans}) > 1


class RolloutClient:
    """Follows routes and sampling parameters in a thread and sends requests from the callers' threads. Thread-safe.

    The caller owns `store` and closes it after `close`. `request_timeout_seconds` must exceed the longest generation.
    """

    def __init__(
        self,
        store: StateStore,
        job: str,
        *,
        request_timeout_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = Keys(job)
        self._follower = Follower(store, self._keys.root)
        self._cache: dict[str, tuple[int, Record]] = {}
        self._timeout_seconds = request_timeout_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rollout-routes", daemon=True)
        self._http = httpx.Client(trust_env=False, timeout=request_timeout_seconds)
        self._routes: dict[str, Route] = {}
        self._avoid: dict[tuple[str, str], float] = {}  # (name, incarnation) -> until
        self._turn = 0
        self._timeline = 0
        self._sampling = Sampling()
        self._log = structlog.get_logger().bind(job=job)

    def start(self) -> Self:
        """Begin to follow; returns at once."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Wake every waiting call with `Unavailable` and end the thread; idempotent."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_POLL_SECONDS + self._timeout_seconds)
        self._http.close()

    @property
    def timeline(self) -> int:
        """The timeline to call the buffer with; 0 before the first look and while a recovery is open."""
        with self._changed:
            return self._timeline

    @property
    def routes(self) -> Mapping[str, Route]:
        """The routes as last seen, by rollout."""
        with self._changed:
            return dict(self._routes)

    def generate(self, prompts: Sequence[Sequence[int]], *, timeout_seconds: float) -> list[Answer]:
        """One answer for each prompt (token ids), in order. Blocks, also while there is no route.

        Raises `Unavailable` when the time is over or the client was closed.
        """
        deadline = self._clock() + timeout_seconds
        answers: dict[int, Answer] = {}
        while True:
            left = [place for place in range(len(prompts)) if place not in answers]
            if not left:
                return [answers[place] for place in range(len(prompts))]
            route, sampling = self._next_route(deadline)
            try:
                found = self._ask(route, sampling, [list(prompts[place]) for place in left], deadline)
            except (Unavailable, httpx.HTTPError) as error:
                self._shun(route, str(error) or repr(error))
                continue
            for place, answer in zip(left, found, strict=True):
                if answer is not None:
                    answers[place] = answer
            if not any(found):
                self._shun(route, "it cut every answer short")

    def _shun(self, route: Route, why: str) -> None:
        """Ask the others for a moment."""
        self._log.info("asking another rollout", rollout=route.name, error=why)
        with self._changed:
            self._avoid[route.name, route.incarnation] = self._clock() + _RETRY_SECONDS

    # -- routes --------------------------------------------------------------------------------------------

    def _next_route(self, deadline: float) -> tuple[Route, Sampling]:
        with self._changed:
            while True:
                now = self._clock()
                if self._stopping.is_set():
                    raise Unavailable("the rollout client was closed")
                if now >= deadline:
                    raise Unavailable(
                        f"no rollout answered in time; routes: {', '.join(self._routes) or 'none'}"
                    )
                self._avoid = {key: until for key, until in self._avoid.items() if until > now}
                free = [r for r in self._routes.values() if (r.name, r.incarnation) not in self._avoid]
                if free:
                    self._turn += 1
                    return free[self._turn % len(free)], self._sampling
                self._changed.wait(min(_RETRY_SECONDS, deadline - now))

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follower.poll(_POLL_SECONDS)
            except SlackwaterError as error:  # the last known routes stay in use: the engines may be well
                self._log.warning("cannot follow the routes", error=str(error))
                self._stopping.wait(_POLL_SECONDS)
                continue
            view = View(self._keys, self._follower.kvs, self._follower.revision, self._cache)
            with self._changed:
                self._routes = dict(sorted(view.routes().items()))
                self._timeline = 0 if view.recovery else view.timeline
                self._sampling = view.sampling
                self._changed.notify_all()
        self._follower.close()

    # -- one request ---------------------------------------------------------------------------------------

    def _ask(
        self, route: Route, sampling: Sampling, prompts: list[list[int]], deadline: float
    ) -> list[Answer | None]:
        body = {"input_ids": prompts, "sampling_params": sampling.parameters, "return_logprob": True}
        timeout = min(self._timeout_seconds, max(0.1, deadline - self._clock()))
        try:
            reply = self._http.post(f"{route.url}/generate", json=body, timeout=timeout)
        except RuntimeError as error:  # httpx's word for a client that `close` has closed meanwhile
            if self._stopping.is_set():
                raise Unavailable("the rollout client was closed") from error
            raise
        if reply.status_code != 200:
            raise Unavailable(f"{route.url}/generate answered {reply.status_code}: {reply.text[:200]}")
        try:
            items = reply.json()
            if isinstance(items, list) and len(items) == len(prompts):
                return [_answer(item, route, sampling) for item in items]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Unavailable(f"{route.url}/generate answered something unreadable: {error!r}") from error
        raise Unavailable(f"{route.url}/generate answered something else than {len(prompts)} answers")


def _answer(item: dict[str, Any], route: Route, sampling: Sampling) -> Answer | None:
    """An answer, or None for one that must be asked again: cut short, or by weights nobody has named."""
    meta = item["meta_info"]
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        return None
    spans: list[Span] = []
    timelines = set()
    for span in meta.get("weight_versions") or ():
        label = parse_label(str(span["version"]))
        if label is None:
            raise Unavailable(f"{route.name} answers with weights labelled {span['version']!r}")
        timelines.add(label.timeline)
        spans.append((label.version, int(span["start"]), int(span["end"])))
    if not spans:
        raise Unavailable(f"{route.name} does not say which weights made its answer")
    return Answer(
        token_ids=tuple(item["output_ids"]),
        text=item.get("text", ""),
        logprobs=tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ()),
        spans=tuple(spans),
        timelines=frozenset(timelines),
        sampling_revision=sampling.revision,
        rollout=route.name,
    )
