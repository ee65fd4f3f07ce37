"""`slackwater config check`: whether a configuration can work, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engine.config import Site, load_config
from .cli_place import check_local
from .stores import open_objects, open_store

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Configuration files.")


@app.callback()
def _group() -> None:
    """Configuration files."""


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The TOML file.")],
    site: Annotated[
        bool, typer.Option("--site", help="Also reach etcd and S3 and write to the local directory.")
    ] = False,
) -> None:
    """Read a configuration and check every rule; with --site also what it points to."""
    config, where = load_config(file)
    if site:
        _check_site(where)
    typer.echo(f"{file}: job {config.job} is valid" + (", and its site answers" if site else ""))


def _check_site(site: Site) -> None:
    open_store(site).close()
    check_local(site)
    objects = open_objects(site)
    if objects is not None:
        objects.close()
