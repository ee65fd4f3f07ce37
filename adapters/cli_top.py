"""`slackwater top`: the job live in a terminal, until Ctrl-C; read only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ..engine.errors import ConfigError, Unavailable
from ..engine.follow import Follower
from ..engine.view import View
from .cli_place import ConfigOption, EtcdOption, JobOption, Place, console, find_place, look, opened
from .cli_status import picture, summary
from .explain import history

__all__ = ["top"]

_LINES = 8


def top(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    every: Annotated[
        float, typer.Option("--every", help="Seconds between two pictures, at least 0.2.")
    ] = 1.0,
) -> None:
    """Show `status` and the newest history live, until Ctrl-C."""
    if not every >= 0.2:
        raise ConfigError(f"--every {every:g} must be at least 0.2 seconds")
    place = find_place(config, job, etcd)
    with opened(place) as store, contextlib.suppress(KeyboardInterrupt):
        look(store, place)
        with contextlib.closing(Follower(store, place.keys.root)) as follower:
            _paint(_pictures(place, follower, every))


def _paint(pictures: Iterator[Group]) -> None:
    """Over and over on a terminal; one below the other in a pipe or a file."""
    out = console()
    if not out.is_terminal:
        for picture_ in pictures:
            out.print(picture_)
            sys.stdout.flush()
        return
    with Live(console=out, screen=True, auto_refresh=False) as live:
        for picture_ in pictures:
            live.update(picture_, refresh=True)


def _pictures(place: Place, follower: Follower, every_seconds: float) -> Iterator[Group]:
    """A picture at once, then one every so often: news in between wait for it. Never ends by itself."""
    while True:
        due = time.monotonic() + every_seconds
        try:
            follower.poll(0.0)
            yield _now(place, follower)
        except Unavailable as error:
            yield Group(Text(f"etcd does not answer: {error}", style="red"), _now(place, follower))
        time.sleep(max(0.0, due - time.monotonic()))


def _now(place: Place, follower: Follower) -> Group:
    view = View(place.keys, follower.kvs, follower.revision, {})
    lines = [Text(f"{entry.at}  {entry.kind:<14} {entry.text}") for entry in history(view)[-_LINES:]]
    return Group(picture(summary(view)), *lines)
