"""`slackwater attach`: put what already runs under a job's care."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..engine.errors import ConfigError
from ..engine.keys import check_name
from .cli_place import ConfigOption, EtcdOption, JobOption, check_local, find_place, opened, read_job

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Attach a participant that runs already.")


@app.callback()
def _group() -> None:
    """Attach a participant that runs already."""


@app.command("sglang")
def sglang(
    url: Annotated[str, typer.Option("--url", help="The server's address, http://host:port.")],
    name: Annotated[str, typer.Option("--name", help="This rollout's name in the job.")],
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    images: Annotated[
        str, typer.Option("--images", help="Directory of published weights, shared with the trainer.")
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the server's API key.")
    ] = None,
) -> None:
    """Keep one SGLang server at the job's weights, until Ctrl-C or SIGTERM."""
    from .sidecar_sglang import run_sglang

    check_name(name, "rollout name")
    place = find_place(config, job, etcd)
    key = _read_key(api_key_file)
    site = msgspec.structs.replace(place.site, images=images) if images else place.site
    with opened(place) as store:
        settings = read_job(store, place)
    check_local(site)
    run_sglang(settings, site, url=url, name=name, api_key=key)


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
