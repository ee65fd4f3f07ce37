"""What the demo sees of the job: its keys in etcd, the trainer's events, and how long each freeze lasted."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from slackwater.engine.errors import SlackwaterError
from slackwater.engine.follow import Follower
from slackwater.engine.keys import Keys
from slackwater.engine.model import LogEntry, Record
from slackwater.engine.ports import StateStore
from slackwater.engine.view import View

from .events import Event, EventTail

__all__ = ["FreezeClock", "Observer"]


class FreezeClock:
    """Measures, as a client of etcd sees it, how long `freeze` is set each time."""

    def __init__(self, store: StateStore, key: str) -> None:
        self._store, self._key = store, key
        self._seconds: list[float] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freeze-clock", daemon=True)

    @property
    def seconds(self) -> list[float]:
        """Every freeze so far that has ended."""
        return list(self._seconds)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except SlackwaterError:  # a freeze across a broken watch is not measured
                self._stopping.wait(0.5)

    def _follow(self) -> None:
        set_at = 0.0
        watch = self._store.watch(self._key, self._store.range(self._key).revision + 1)
        try:
            while not self._stopping.is_set():
                batch = watch.next(0.5)
                for event in batch.events if batch is not None else ():
                    now = time.monotonic()
                    if event.kind == "put":
                        set_at = now
                    elif set_at:
                        self._seconds.append(now - set_at)
                        set_at = 0.0
        finally:
            watch.close()


class Observer:
    """The newest view of the job, and what is new since the last look. Not thread-safe."""

    def __init__(self, store: StateStore, job: str, events: EventTail) -> None:
        self.keys = Keys(job)
        self._follower = Follower(store, self.keys.root)
        self._events = events
        self._cache: dict[str, tuple[int, Record]] = {}
        self._seen = ""
        self.step = 0
        self.inside = 0  # the step that has its gradients and no update yet; 0: none
        self.rewards: dict[int, float] = {}
        self.history: list[Event] = []
        self.log: list[LogEntry] = []
        self.view = View(self.keys, {}, 0, self._cache)

    def look(self, timeout_seconds: float) -> tuple[list[LogEntry], list[Event]]:
        """Wait for news of etcd at most so long; the new log entries and the new events."""
        try:
            self._follower.poll(timeout_seconds)
            self.view = View(self.keys, self._follower.kvs, self._follower.revision, self._cache)
        except SlackwaterError:  # etcd is away; the last view stays
            time.sleep(timeout_seconds)
        return self._new_entries(), self.new_events()

    def new_events(self) -> list[Event]:
        """The trainer's events since the last call."""
        events = self._events.read()
        for event in events:
            if event.kind == "gradients":
                self.inside = event.fields["step"]
            elif event.kind == "updated":
                self.inside = 0
            elif event.kind == "step":
                self.step = event.fields["step"]
                self.rewards[self.step] = event.fields["reward"]
            elif event.kind == "digest" and event.fields["when"] == "restore":
                self.step, self.inside = event.fields["step"], 0
        self.history += events
        return events

    def _new_entries(self) -> list[LogEntry]:
        keys = sorted(key for key in self.view.kvs if key.startswith(self.keys.logs) and key > self._seen)
        found = [msgspec.json.decode(self.view.kvs[key].value, type=LogEntry) for key in keys]
        self._seen = keys[-1] if keys else self._seen
        self.log += found
        return found

    @property
    def leader(self) -> tuple[str, dict[str, Any]]:
        """The key and identity of the leading coordinator; ("", {}) when there is none."""
        candidates = [kv for key, kv in self.view.kvs.items() if key.startswith(self.keys.leaders)]
        if not candidates:
            return "", {}
        first = min(candidates, key=lambda kv: kv.create_revision)
        identity: dict[str, Any] = msgspec.json.decode(first.value)
        return first.key, identity

    def close(self) -> None:
        """End the watch."""
        self._follower.close()
