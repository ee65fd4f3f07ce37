"""`slackwater explain`: why the trainer waits, why a round was given up, why a checkpoint was skipped; read only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from ..engine.errors import ConfigError
from ..engine.view import View
from .cli_place import ConfigOption, EtcdOption, JobOption, JsonOption, find_place, look, opened, print_json
from .explain import explain_checkpoint, explain_now, explain_participant, explain_recovery, explain_round

__all__ = ["explain"]

_NUMBERED: dict[str, Callable[[View, int], list[str]]] = {
    "round": explain_round,
    "checkpoint": explain_checkpoint,
    "recovery": explain_recovery,
}


def explain(
    what: Annotated[
        Literal["now", "round", "checkpoint", "recovery", "participant"],
        typer.Argument(help="What is asked about; `now` is the trainer's waiting."),
    ] = "now",
    which: Annotated[str, typer.Argument(help="Its number, or the participant's name.")] = "",
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    json: JsonOption = False,
) -> None:
    """Say in sentences why the trainer waits, or what became of a round, checkpoint, recovery or participant."""
    number = _number(what, which)
    place = find_place(config, job, etcd)
    with opened(place) as store:
        view = look(store, place)
    if what == "now":
        told = explain_now(view)
    elif what == "participant":
        told = explain_participant(view, which)
    else:
        told = _NUMBERED[what](view, number)
    if json:
        print_json({"about": f"{what} {which}".strip(), "sentences": told})
        return
    for sentence in told:
        typer.echo(sentence)


def _number(what: str, which: str) -> int:
    if what == "now":
        if which:
            raise ConfigError(f"explain now takes nothing after it, not {which!r}")
        return 0
    if what == "participant":
        if not which:
            raise ConfigError("explain which participant? give its name, as `slackwater status` shows it")
        return 0
    if not (which.isascii() and which.isdigit() and int(which) > 0):
        raise ConfigError(f"explain which {what}? give its number, from 1 on, not {which!r}")
    return int(which)
