"""`slackwater checkpoints show`, `diff` and `verify`: what a checkpoint holds, and whether it can be read, now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..engine.config import differing
from ..engine.errors import ConfigError, CorruptCheckpoint, NotFound
from ..engine.filetier import FileTier
from ..engine.manifest import FileEntry, Manifest
from ..engine.model import Checkpoint
from ..engine.upload import UploadStore
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
from .stores import open_objects, open_tier
from .trainer_manifest import read_manifest

__all__ = ["compare", "describe", "diff", "show", "verify"]

NumberArgument = Annotated[
    int, typer.Argument(min=1, help="The checkpoint's id, as `checkpoints ls` shows it.")
]
Check = Callable[[FileEntry], object]


class _Tiers:
    """The tiers of a command's site, and the records of its job."""

    def __init__(self, records: dict[int, Checkpoint], tier: FileTier, objects: UploadStore | None) -> None:
        self.records, self.tier, self.objects = records, tier, objects

    def record(self, number: int) -> Checkpoint:
        """The record of an id; `NotFound` names those that there are."""
        if number not in self.records:
            known = ", ".join(map(str, sorted(self.records))) or "none"
            raise NotFound(f"there is no checkpoint {number}; there are: {known}")
        return self.records[number]

    def manifest(self, number: int) -> tuple[Checkpoint, Manifest]:
        """A record and its manifest, from the first tier that has the recorded one."""
        record = self.record(number)
        return record, read_manifest(record, self.tier, self.objects)


@contextlib.contextmanager
def _tiers(config: ConfigOption, job: JobOption, etcd: EtcdOption) -> Iterator[_Tiers]:
    place = find_place(config, job, etcd)
    if place.config is None:
        raise ConfigError("the files of a checkpoint are found by the job's [site]: give --config")
    with opened(place) as store:
        records = look(store, place).checkpoints()
    objects = open_objects(place.site)
    with contextlib.closing(objects) if objects is not None else contextlib.nullcontext():
        yield _Tiers(records, open_tier(place.site), objects)


# -- show and diff -----------------------------------------------------------------------------------------


def show(
    number: NumberArgument,
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: its versions, files, tensors and who wrote them."""
    with _tiers(config, job, etcd) as tiers:
        found = describe(*tiers.manifest(number))
    if json:
        print_json(found)
        return
    out = console()
    for name, value in found.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        out.print(f"{name.replace('_', ' '):<16} {text}", highlight=False, markup=False)


def describe(record: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    """A checkpoint's content in figures; sizes in bytes."""
    dtypes: dict[str, int] = {}
    for tensor in manifest.tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    return {
        "checkpoint": record.checkpoint,
        "state": record.state,
        "path": record.path,
        "remote": record.remote,
        "timeline": manifest.timeline,
        "round": manifest.round,
        "vector": msgspec.to_builtins(manifest.vector),
        "world_size": manifest.world_size,
        "files": len(manifest.files),
        "size_bytes": sum(entry.size_bytes for entry in manifest.files),
        "tensors": len(manifest.tensors),
        "dtypes": dtypes,
        "aliases": manifest.aliases,
        "objects": len(manifest.objects),
        "hosts": sorted({part.host for part in manifest.parts}),
        "sampling": manifest.sampling,
        "identity": manifest.identity,
    }


def diff(
    first: NumberArgument,
    second: NumberArgument,
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    json: JsonOption = False,
) -> None:
    """Show in what two checkpoints differ: versions, settings, and tensors by name, shape and dtype."""
    with _tiers(config, job, etcd) as tiers:
        found = compare(tiers.manifest(first)[1], tiers.manifest(second)[1])
    if json:
        print_json(found)
        return
    out = console()
    for name, value in found.items():
        out.print(f"{name.replace('_', ' '):<16} {_words(value)}", highlight=False, markup=False)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in value.items()) or "same"
    return ", ".join(value) or "none"


def compare(old: Manifest, new: Manifest) -> dict[str, Any]:
    """What changed from one manifest to the next; pairs are (old, new)."""
    before = {tensor.name: f"{tensor.dtype}{list(tensor.shape)}" for tensor in old.tensors}
    after = {tensor.name: f"{tensor.dtype}{list(tensor.shape)}" for tensor in new.tensors}
    vectors = msgspec.to_builtins(old.vector), msgspec.to_builtins(new.vector)
    pairs = {name: (vectors[0][name], vectors[1][name]) for name in vectors[0]}
    pairs |= {name: (getattr(old, name), getattr(new, name)) for name in ("timeline", "round", "world_size")}
    return {
        "changed": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "reshaped": {
            n: (before[n], after[n]) for n in sorted(before.keys() & after) if before[n] != after[n]
        },
        "only_in_first": sorted(before.keys() - after),
        "only_in_second": sorted(after.keys() - before),
        "sampling": differing(old.sampling, new.sampling),
        "identity": differing(old.identity, new.identity),
    }


# -- verify ------------------------------------------------------------------------------------------------


def verify(
    number: Annotated[int, typer.Argument(min=0, help="The checkpoint's id; 0 is the newest.")] = 0,
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    json: JsonOption = False,
) -> None:
    """Read every file of a checkpoint on this host and check every object in the bucket against the manifest.

    Ends with 1 when some file has no good copy on either: a recovery here would skip this checkpoint.
    """
    with _tiers(config, job, etcd) as tiers:
        record, manifest = tiers.manifest(number or max(tiers.records, default=0))
        checks: dict[str, Check] = {"local": lambda entry: tiers.tier.verify(record.path, entry)}
        objects = tiers.objects
        if objects is not None:
            checks["remote"] = lambda entry: objects.verify(f"{record.path}/{entry.path}", entry)
        bad = _check_all(checks, manifest)
    lost = sorted(path for path in bad["local"] if path in bad.get("remote", bad["local"]))
    tiers_found = {tier: {"good": len(manifest.files) - len(p), "bad": p} for tier, p in bad.items()}
    if json:
        print_json({"checkpoint": record.checkpoint, "readable": not lost, "tiers": tiers_found})
    else:
        _show_verdict(record.checkpoint, len(manifest.files), bad)
    if lost:
        raise CorruptCheckpoint(f"checkpoint {record.checkpoint}: no good copy of {', '.join(lost)}", lost[0])


def _check_all(checks: dict[str, Check], manifest: Manifest) -> dict[str, dict[str, str]]:
    """By tier, the reason for each file that is not what was recorded. Shows its progress on a terminal."""
    bad: dict[str, dict[str, str]] = {tier: {} for tier in checks}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for tier, check in checks.items():
            task = progress.add_task(tier, total=sum(entry.size_bytes for entry in manifest.files))
            for entry in manifest.files:
                try:
                    check(entry)
                except (CorruptCheckpoint, NotFound) as error:
                    bad[tier][entry.path] = str(error)
                progress.advance(task, entry.size_bytes)
    return bad


def _show_verdict(number: int, files: int, bad: dict[str, dict[str, str]]) -> None:
    out = console()
    for tier, problems in bad.items():
        text = f"checkpoint {number}, {tier}: {files - len(problems)} of {files} files are good"
        out.print(text, style="red" if problems else "green", highlight=False, markup=False)
        for reason in problems.values():
            out.print(f"  {reason}", highlight=False, markup=False)
