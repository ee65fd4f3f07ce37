"""One thread that generates, token by token, and the control calls that stop, change and restart it."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .faults import Faults
from .model import KV, TinyLlama
from .prefixcache import PrefixCache

__all__ = ["Request", "Scheduler"]

MAX_RUNNING = 8


@dataclass(eq=False)
class Request:
    """One sequence from its arrival to its answer; `on_done` is called once, from the scheduler's thread."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    generator: torch.Generator
    on_done: Callable[[Request], None]
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    kv: KV | None = None
    cached: int | None = None
    retractions: int = 0
    finish: dict[str, Any] | None = None
    started: float = field(default_factory=time.perf_counter)


class Scheduler:
    """Owns the model, the cache and every request. Public methods may be called from any thread."""

    def __init__(self, model: TinyLlama, label: str, path: str, faults: Faults) -> None:
        self.model, self.path = model, path
        self.label = label  # what /model_info says
        self._token_label = label  # what tokens carry; the two differ after an update without a flush
        self.paused = False
        self.faults = faults
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._cache = PrefixCache()
        self._holding = False
        self._changed = threading.Condition()
        threading.Thread(target=self._loop, daemon=True, name="scheduler").start()

    @property
    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it is held while generation is paused."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()

    def pause(self, mode: str) -> None:
        """Stop before the next token; `abort` also ends every request, `retract` drops their KV."""
        with self._changed:
            self.paused = True
            if mode == "abort":
                self._abort(lambda _: True)
            elif mode == "retract":
                for request in reversed(self._running):
                    request.kv, request.retractions = None, request.retractions + 1
                    self._waiting.appendleft(request)
                self._running = []
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self.paused = False
            self._changed.notify_all()

    def abort(self, rid: str, everything: bool) -> None:
        """End requests whose id begins with `rid`, or all of them."""
        with self._changed:
            self._abort(lambda request: everything or (rid != "" and request.rid.startswith(rid)))
            self._changed.notify_all()

    def flush(self, timeout_seconds: float = 0.0, *, keep_cache: bool = False) -> bool:
        """Drop the cache; False while requests run, or with a timeout while any request is pending."""
        with self._changed:
            if timeout_seconds > 0:
                if not self._changed.wait_for(
                    lambda: not self._running and not self._waiting, timeout_seconds
                ):
                    return False
            elif self._running:
                return False
            if not keep_cache:
                self._cache.clear()
            return True

    def update(self, path: str, label: str | None, *, flush: bool, only_part: bool, keep_cache: bool) -> bool:
        """Load an image once no request runs (at once while paused); False when the cache was not flushed.

        As in the real server an update that had to wait for requests finds them still counted and does not
        flush, and then only the tokens carry the new label. Raises `LoadRefused` or `LoadDied`.
        """
        with self._changed:
            waited = bool(self._running)
            self._holding = True
            try:
                self._changed.wait_for(lambda: self.paused or not self._running)
                self.model.load(Path(path), only_part=only_part)
            finally:
                self._holding = False
                self._changed.notify_all()
            self.set_label(label, tokens_only=flush and waited)
            if flush and waited:
                return False
            if flush and not keep_cache:
                self._cache.clear()
            self.path = path
            return True

    def set_label(self, label: str | None, *, tokens_only: bool = False) -> None:
        """Change the label without touching the weights; None changes nothing."""
        if label is None:
            return
        self._token_label = label
        if not tokens_only:
            self.label = label

    def _abort(self, chosen: Callable[[Request], bool]) -> None:
        for request in [r for r in [*self._running, *self._waiting] if chosen(r)]:
            self._finish(request, {"type": "abort", "message": "Aborted", "status_code": None})

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.kv = None
        request.on_done(request)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                while self._waiting and not self._holding and len(self._running) < MAX_RUNNING:
                    self._running.append(self._waiting.popleft())
                for request in list(self._running):
                    self._step(request)
                self._changed.notify_all()
            if (delay := self.faults.seconds("slow_generate")) > 0:
                time.sleep(delay)
            else:
                time.sleep(0.00005)  # let a control call take the lock

    def _has_work(self) -> bool:
        return not self.paused and bool(self._running or (self._waiting and not self._holding))

    def _step(self, request: Request) -> None:
        if request.max_new_tokens <= 0:
            self._finish(request, {"type": "length", "length": 0})
            return
        sequence = request.prompt + request.output
        known, kv = (len(sequence) - 1, request.kv) if request.kv else self._cache.find(sequence)
        if request.cached is None:
            request.cached = known
        logits, request.kv = self.model.forward(sequence[known:], kv)
        token, logprob = _choose(logits, request)
        request.output.append(token)
        request.logprobs.append(logprob)
        _extend(request.spans, self._token_label, len(request.output))
        if token in request.stop_ids:
            reason: dict[str, Any] = {"type": "stop", "matched": token}
        elif len(request.output) >= request.max_new_tokens:
            reason = {"type": "length", "length": request.max_new_tokens}
        else:
            return
        self._cache.put(sequence, request.kv)
        self._finish(request, reason)


def _choose(logits: torch.Tensor, request: Request) -> tuple[int, float]:
    """Greedy at temperature 0, else a draw of the nucleus; the log probability is at the temperature."""
    if request.temperature <= 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logprobs = (logits / request.temperature).log_softmax(-1)
    probs = logprobs.exp()
    if request.top_p < 1:
        ordered, order = probs.sort(descending=True)
        probs[order[ordered.cumsum(0) - ordered > request.top_p]] = 0.0
    token = int(torch.multinomial(probs, 1, generator=request.generator))
    return token, float(logprobs[token])


def _extend(spans: list[dict[str, Any]], version: str, end: int) -> None:
    if spans and spans[-1]["version"] == version:
        spans[-1]["end"] = end
    else:
        spans.append({"version": version, "start": end - 1, "end": end})
