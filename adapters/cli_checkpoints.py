"""`slackwater checkpoints …`: what could be gone back to."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.table import Table

from ..engine.view import View
from . import cli_manifest, cli_requests
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
)

__all__ = ["app", "rows"]

app = typer.Typer(no_args_is_help=True, help="The job's checkpoints.")


@app.callback()
def _group() -> None:
    """The job's checkpoints."""


for command in (
    cli_manifest.show,
    cli_manifest.diff,
    cli_manifest.verify,
    cli_requests.pin,
    cli_requests.unpin,
):
    app.command()(command)


@app.command("ls")
def ls(
    config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None, json: JsonOption = False
) -> None:
    """List the checkpoints, oldest first, with the state that each has reached."""
    place = find_place(config, job, etcd)
    with opened(place) as store:
        found = rows(look(store, place))
    if json:
        print_json(found)
        return
    table = Table(
        "id", "step", "version", "buffer", "timeline", "state", "size", "files", "host", "on lineage"
    )
    for row in found:
        size = f"{row['size_bytes'] / 1e6:.1f} MB"
        names = ("checkpoint", "training_step", "weight_version", "buffer_version", "timeline", "state")
        lineage = "yes" if row["on_lineage"] else "no"
        table.add_row(*(str(row[name]) for name in names), size, str(row["files"]), row["host"], lineage)
    console().print(table)


def rows(view: View) -> list[dict[str, Any]]:
    """Every record, with whether a recovery could choose it now."""
    eligible = {record.checkpoint for record in view.eligible()}
    return [
        {**msgspec.to_builtins(record), "on_lineage": number in eligible}
        for number, record in view.checkpoints().items()
    ]
