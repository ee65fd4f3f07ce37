"""Tells the story of a run: one line an event, and on a terminal a progress bar below."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from slackwater.engine.model import LogEntry

__all__ = ["Narrator"]

_STYLES = {
    "commit": "green",
    "durable": "green",
    "recovery": "magenta",
    "verdict": "yellow",
    "hold": "yellow",
    "abort": "yellow",
    "needs_operator": "bold red",
    "kill": "bold red",
    "noticed": "yellow",
    "healed": "bold green",
    "restart": "cyan",
}
_STEPS_A_LINE = 10


class Narrator:
    """Prints; a context manager, so that the bar is gone at the end. Colour only when `console` is a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self._began = time.monotonic()
        self._told = 0
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> Narrator:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, kind: str, text: str) -> None:
        """One line: seconds since the start, what it is about, and what happened."""
        seconds = f"{time.monotonic() - self._began:6.1f}s  "
        line = Text.assemble((seconds, "dim"), (f"{kind:<9}", _STYLES.get(kind, "")), " ", text)
        self.console.print(line, soft_wrap=True)

    def entry(self, entry: LogEntry) -> None:
        """A line of the job's own history."""
        self.say(entry.kind, entry.text)

    def progress(self, step: int, reward: float, routes: int) -> None:
        """Where training stands; without a terminal a line every ten steps."""
        text = f"reward {reward:.2f}, {routes} rollouts"
        self._progress.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and step // _STEPS_A_LINE > self._told // _STEPS_A_LINE:
            self.say("step", f"{step}: {text}")
        self._told = max(self._told, step)

    def table(self, table: Any) -> None:
        """Print a table (or anything that rich can print)."""
        self.console.print(table)
