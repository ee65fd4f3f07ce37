"""Weight images on the directory that rollouts share: written by a gang, removed when nobody needs them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch

from ..engine.errors import SlackwaterError
from ..engine.image import ImageRecord
from ..engine.manifest import check_path
from ..engine.model import Pin, Serving, WeightVersion
from ..engine.tensorfile import named_error
from ..engine.view import View
from .export import export_image
from .imagestore import directory_of
from .trainer_gang import Command, Gang

__all__ = ["Images"]


class Images:
    """Exports images; every rank calls `export`, only rank 0 writes."""

    def __init__(
        self,
        model: torch.nn.Module,
        images: Path,
        hf_files: Mapping[str, bytes],
        dtype: torch.dtype | None,
        gang: Gang,
    ) -> None:
        self._model, self._hf_files, self._dtype = model, hf_files, dtype
        self._images, self._gang = images, gang
        self._log = structlog.get_logger().bind(participant="trainer")

    def export(self, folder: str, step: int) -> tuple[ImageRecord | None, Path, str]:
        """Write the full weights; (record on rank 0, directory, attempt id). Blocks for all ranks.

        `folder` is `<job>/<job_uid>/t<T>`. On an error of rank 0 every rank raises; nothing is left behind.
        """
        gang = self._gang
        attempt = secrets.token_hex(6)
        directory = self._images / check_path(folder) / f"w{step}-{attempt}"
        error: SlackwaterError | None = None
        record: ImageRecord | None = None
        try:
            record = export_image(
                self._model,
                directory if gang.rank == 0 else None,
                hf_files=self._hf_files,
                rank=gang.rank,
                dtype=self._dtype,
                info={"step": step},
            )
        except SlackwaterError as found:
            error = found
        # A failing rank 0 has run its collectives to the end, so this is the same place on every rank.
        said = None
        if gang.rank == 0:
            said = Command("error", payload=str(error).encode()) if error is not None else Command("done")
        answer = gang.broadcast(said)
        if answer.kind == "error":
            if gang.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
            raise error or SlackwaterError(f"rank 0 could not write the weights: {answer.payload.decode()}")
        return record, directory, attempt

    def drop(self, directory: Path) -> None:
        """Remove an image whose publication was refused."""
        shutil.rmtree(directory, ignore_errors=True)

    def prune(self, view: View, keep_versions: int) -> None:
        """Remove old images; never the head, what is routed, serving, pinned, or the cut of an open round."""
        versions = view.under(view.keys.weight_versions, WeightVersion)
        kept = {
            record.version for record in sorted(versions.values(), key=lambda r: r.version)[-keep_versions:]
        }
        kept |= protected_versions(view)
        for record in versions.values():
            if record.version in kept or not record.location:
                continue
            directory = directory_of(record.location)
            if self._images.resolve() not in directory.parents or not directory.is_dir():
                continue
            try:
                (directory / "image.json").unlink(missing_ok=True)
                shutil.rmtree(directory)
            except OSError as error:
                self._log.warning("an old image stays", error=str(named_error(error, directory)))


def protected_versions(view: View) -> set[int]:
    """Versions whose bytes somebody may be about to read."""
    found = {route.version for route in view.routes().values()}
    found |= {pin.version for pin in view.under(view.keys.pins, Pin).values()}
    serving = view.record(view.keys.serving, Serving)
    for holder in (view.head, serving, view.freeze, view.round):
        if holder is not None:
            found.add(holder.version)
    return found
