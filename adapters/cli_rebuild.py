"""`slackwater rebuild`: put a job whose etcd was lost back from the files of its checkpoints."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from ..backends.s3 import S3Store
from ..engine.config import Site
from ..engine.errors import ConfigError, CorruptCheckpoint, NotFound, Refused, Unavailable
from ..engine.filetier import FileTier
from ..engine.manifest import COMMITTED_NAME, MANIFEST_NAME, Committed, Manifest, decode_json
from ..engine.ports import StateStore
from ..engine.rebuild import Found, Rebuild, plan_rebuild
from .cli_place import ConfigOption, EtcdOption, JobOption, find_place, look_even_if_unborn, opened
from .stores import open_objects, open_tier

__all__ = ["apply", "find_committed", "rebuild"]

_LIMIT_BYTES = 16 << 20


def rebuild(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    job_uid: Annotated[str, typer.Option(help="Which of several jobs of this name.")] = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this only say what would be done.")
    ] = False,
) -> None:
    """Put a job's records back into an etcd that lost them, from every committed.json on both tiers."""
    place = find_place(config, job, etcd)
    if place.config is None:
        raise ConfigError("a rebuild needs the job's settings: give --config")
    found, step_map = find_committed(place.site, place.job)
    with opened(place) as store:
        plan = plan_rebuild(place.config, look_even_if_unborn(store, place), found, step_map, job_uid=job_uid)
        typer.echo(
            f"job {place.job} ({plan.job_uid}): checkpoints {', '.join(map(str, plan.checkpoints))}; goes on with "
            f"timeline {plan.timeline}, weight version {plan.next_version}, checkpoint {plan.next_checkpoint}"
        )
        if not yes:
            typer.echo("nothing was written; say --yes to do it")
            return
        apply(store, plan)
    typer.echo("rebuilt: start the coordinators, the trainer and the sidecars as always")


def apply(store: StateStore, plan: Rebuild) -> None:
    """Write the plan. Blocks for its transactions; `Refused` when somebody else wrote meanwhile: run it again."""
    for txn in plan.txns:
        try:
            result = store.txn(txn)
        except Unavailable as error:
            raise Unavailable(f"{error}; the rebuild is unfinished: run it again") from error
        if not result.succeeded:
            raise Refused("the job changed while it was being rebuilt: stop its processes and run this again")


def find_committed(site: Site, job: str) -> tuple[list[Found], dict[int, int]]:
    """Every readable `committed.json` of a job on this host and in the bucket, and the newest one's step map."""
    found: list[Found] = []
    tier = open_tier(site)
    for path, raw in tier.committed(job):
        found.append(Found(decode_json(raw, Committed, f"{path}/{COMMITTED_NAME}", _LIMIT_BYTES), path))
    objects = open_objects(site)
    if objects is None:
        return found, _step_map(found, tier, None)
    with contextlib.closing(objects):
        found += _in_bucket(objects, site, job)
        return found, _step_map(found, tier, objects)


def _in_bucket(objects: S3Store, site: Site, job: str) -> list[Found]:
    found = []
    for info in objects.list(f"{job}/"):
        if not info.key.endswith(f"/{COMMITTED_NAME}"):
            continue
        path = info.key.removesuffix(f"/{COMMITTED_NAME}")
        committed = decode_json(objects.get(info.key), Committed, info.key, _LIMIT_BYTES)
        found.append(Found(committed, path, site.remote_address(path)))
    return found


def _step_map(found: list[Found], tier: FileTier, objects: S3Store | None) -> dict[int, int]:
    if not found:
        return {}
    newest = max(found, key=lambda one: one.committed.checkpoint)
    name = f"{newest.path}/{MANIFEST_NAME}"
    try:
        raw = objects.get(name) if newest.remote and objects is not None else tier.read_json(name)
        manifest: Manifest = decode_json(raw, Manifest, name)
    except (NotFound, CorruptCheckpoint):
        return {}  # the recovery will say that this checkpoint does not verify, and take an older one
    return {int(version): step for version, step in manifest.step_map.items()}
