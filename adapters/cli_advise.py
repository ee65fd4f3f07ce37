"""`slackwater advise`: settings that the job's own history speaks for, with what each costs; changes nothing."""

from __future__ import annotations

import dataclasses

from rich.table import Table
from rich.text import Text

from ..engine.keys import TRAINER
from . import advice
from .cli_place import (
    ConfigOption,
    EtcdOption,
    JobOption,
    JsonOption,
    console,
    find_place,
    look,
    opened,
    print_json,
    read_job,
)
from .explain import history

__all__ = ["advise"]


def advise(
    config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None, json: JsonOption = False
) -> None:
    """Propose checkpoint interval, failure window, lag and publication interval from what the job measured."""
    place = find_place(config, job, etcd)
    with opened(place) as store:
        view = look(store, place)
        settings = read_job(store, place)
    trainer = view.alive(TRAINER)
    found = advice.measure(
        history(view), trainer.metrics.get("publish_blocked_s") if trainer is not None else None
    )
    proposals, told = advice.propose(settings, found), advice.warnings(settings, found)
    if json:
        print_json(
            {
                "measured": dataclasses.asdict(found),
                "proposals": [dataclasses.asdict(one) for one in proposals],
                "warnings": told,
            }
        )
        return
    _show(found, proposals, told)


def _show(found: advice.Measured, proposals: list[advice.Proposal], told: list[str]) -> None:
    out = console()
    out.print(
        Text(
            f"{found.checkpoints} checkpoints, {found.aborted} rounds given up, {found.failures} failures "
            f"in {found.span_s / 3600:.1f} h; step {_seconds(found.step_s)}, blocked by a checkpoint "
            f"{_seconds(found.blocked_s)}, by a publication {_seconds(found.publish_s)}, "
            f"recovery {_seconds(found.recovery_s)}"
        )
    )
    table = Table("setting", "now", "proposed", "loss now", "loss then", "why")
    for one in proposals:
        table.add_row(
            one.setting,
            f"{one.now:g}",
            f"{one.proposed:g}",
            _share(one.loss_now),
            _share(one.loss_proposed),
            Text(one.reason),
        )
    out.print(table)
    for text in told:
        out.print(Text(f"warning: {text}", style="yellow"))


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
