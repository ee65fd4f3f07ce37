"""Simulated time and processes: each process is one or more greenlets that give way at every call to the outside."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Kernel", "Process", "Task"]


class Kernel:
    """The clock and the queue of events. `after_event` runs after each; `problems` are what went wrong.

    `events` counts what had an effect: a wake-up of a task that waits for something else by now does not count.
    """

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.events = 0
        self.seed = seed
        self.problems: list[str] = []
        self.trace: list[str] = []
        self.after_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._hub = getcurrent()

    def clock(self) -> float:
        """The simulated monotonic clock."""
        return self.now

    def rng(self, name: str) -> Random:
        """A random stream of its own for each name, so that one more draw here changes nothing there."""
        return Random(f"{self.seed}/{name}")

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` in so many seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, call))

    def fail(self, problem: str) -> None:
        """Note a violation."""
        if len(self.problems) < 20:
            self.problems.append(f"{self.now - 1000.0:.3f} s: {problem}")

    def run(self, seconds: float, *, max_events: int = 0) -> None:
        """Let time pass until it is over, a problem shows, or enough events have happened."""
        end = self.now + seconds
        heap = self._heap
        last = self.events + max_events if max_events else 1 << 62
        while heap and heap[0][0] <= end and not self.problems and self.events < last:
            when, _, call = heapq.heappop(heap)
            if when > self.now:
                self.now = when
            self.events += 1
            call()
            self.after_event()
        if not self.problems and not (heap and heap[0][0] <= end):
            self.now = end

    @property
    def hub(self) -> greenlet:
        """The greenlet that runs the queue."""
        return self._hub


class Task:
    """One thread of control of a process."""

    def __init__(self, process: Process, body: Callable[[], None], name: str) -> None:
        self.process = process
        self.name = name
        self._body = body
        self._turn = 0
        self._value: Any = None
        self.greenlet = greenlet(self._run, parent=process.kernel.hub)

    def _run(self) -> None:
        try:
            self._body()
        except GreenletExit:
            pass
        except BaseException:  # noqa: BLE001 - whatever ends a process is a finding
            self.process.kernel.fail(f"{self.name} crashed: {traceback.format_exc()}")
        self.process.tasks.discard(self)

    def resume(self, turn: int, value: Any = None) -> None:
        """Continue the wait numbered `turn`; later when the process is paused, never when it is dead."""
        process = self.process
        wait = process.paused_until - process.kernel.now
        if process.dead or turn != self._turn or wait > 0:
            process.kernel.events -= 1  # a wake-up that came to nothing is no event
            if wait > 0 and not process.dead and turn == self._turn:
                process.kernel.after(wait, lambda: self.resume(turn, value))
            return
        self._turn += 1
        self._value = value
        self.greenlet.switch()

    def start(self) -> None:
        """Begin at the next event."""
        turn = self._turn
        self.process.kernel.after(0.0, lambda: self.resume(turn))


class Process:
    """A process that can be killed or paused at any point where it gives way."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.dead = False
        self.paused_until = 0.0
        self.tasks: set[Task] = set()

    def spawn(self, body: Callable[[], None], name: str = "") -> Task:
        """Start one more thread."""
        task = Task(self, body, f"{self.name}{'/' + name if name else ''}")
        self.tasks.add(task)
        task.start()
        return task

    def wait(self, timeout_seconds: float, arrange: Callable[[Callable[[Any], None]], None]) -> Any:
        """Give way until the callback handed to `arrange` is called with a value, or None after the timeout."""
        task = self.current()
        turn = task._turn
        arrange(lambda value: task.resume(turn, value))
        self.kernel.after(timeout_seconds, lambda: task.resume(turn))
        self.kernel.hub.switch()
        self.check()
        value, task._value = task._value, None
        return value

    def sleep(self, seconds: float) -> None:
        """Give way for so long."""
        task = self.current()
        turn = task._turn
        self.kernel.after(max(seconds, 1e-4), lambda: task.resume(turn))
        self.kernel.hub.switch()
        self.check()

    def check(self) -> None:
        """End the caller when its process is dead."""
        if self.dead:
            raise GreenletExit

    def current(self) -> Task:
        """The running task of this process."""
        self.check()
        me = getcurrent()
        for task in self.tasks:
            if task.greenlet is me:
                return task
        raise RuntimeError(f"{self.name}: called from outside its own tasks")

    def kill(self) -> None:
        """End the process now; from the hub only."""
        if self.dead:
            return
        self.dead = True
        for task in list(self.tasks):
            if task.greenlet:
                task.greenlet.throw(GreenletExit)
        self.tasks.clear()

    def pause(self, seconds: float) -> None:
        """Stand still for so long, then go on as if nothing had happened."""
        self.paused_until = max(self.paused_until, self.kernel.now + seconds)
