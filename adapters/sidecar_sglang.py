"""Attaches one SGLang server to a job: `slackwater attach sglang`, and the same from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..engine.config import JobConfig, Site
from .beat import BeatProcess
from .imagestore import DirectoryImages
from .intents import FileIntents
from .sglang import SGLangEngine, SGLangTimeouts
from .sidecar import Sidecar, stop_on_signals
from .stores import open_store

__all__ = ["run_sglang", "sglang_sidecar"]

_STATUS_SECONDS = 5.0
_CALL_SECONDS = 5.0


@contextmanager
def sglang_sidecar(
    config: JobConfig,
    site: Site,
    *,
    url: str,
    name: str,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    model_path: Path | None = None,
) -> Iterator[Sidecar]:
    """A sidecar for the server at `url`, not yet running: call its `run`, or `start` for a thread of its own.

    The job must be there. At the end the sidecar is stopped if it runs in a thread, and its connections are closed.
    Raises `Unavailable` or `AuthFailed` when etcd cannot be used.
    """
    timers = config.timers
    timeouts = SGLangTimeouts(
        status_seconds=min(_STATUS_SECONDS, timers.lease_s / 2),
        token_seconds=max(30.0, 2.0 * timers.lease_s),
    )
    store = open_store(site, call_timeout_seconds=min(_CALL_SECONDS, timers.lease_s / 4))
    engine = SGLangEngine(
        url, model_path=model_path, api_key=api_key, admin_api_key=admin_api_key, timeouts=timeouts
    )
    sidecar = Sidecar(
        config,
        store,
        lambda: BeatProcess(site, config, name),
        engine,
        name=name,
        url=url,
        images=DirectoryImages(site.images_dir),
        intents=FileIntents(Path(site.local) / "sidecars" / config.job / name),
    )
    try:
        yield sidecar
    finally:
        try:
            sidecar.stop()
        finally:
            engine.close()
            store.close()


def run_sglang(
    config: JobConfig,
    site: Site,
    *,
    url: str,
    name: str,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    model_path: Path | None = None,
) -> None:
    """Keep one server at the job's weights until SIGTERM or Ctrl-C; then its route goes and the job is told.

    Blocks; main thread only. A load that is under way is waited for. Raises `Refused` (`SlotOccupied` when a live
    sidecar has the name), `Unavailable` or `AuthFailed` when etcd cannot be used at the start, `StoreRewound`.
    """
    with (
        sglang_sidecar(
            config,
            site,
            url=url,
            name=name,
            api_key=api_key,
            admin_api_key=admin_api_key,
            model_path=model_path,
        ) as sidecar,
        stop_on_signals(sidecar),
    ):
        sidecar.run()
