"""Opens a process's stores from its `Site`; whatever is wrong with one is said in one line that names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.etcd import EtcdStore
from ..backends.local import LocalTier
from ..engine.config import Site
from ..engine.errors import AuthFailed, ConfigError, NotFound, SlackwaterError, Unavailable
from ..engine.filetier import FileTier
from ..engine.tensorfile import FileSystem

if TYPE_CHECKING:
    from ..backends.s3 import S3Store

__all__ = ["PASSWORD_VARIABLE", "connect_store", "open_objects", "open_store", "open_tier"]

PASSWORD_VARIABLE = "SLACKWATER_ETCD_PASSWORD"  # noqa: S105  # the variable's name, not a password


def connect_store(site: Site, *, call_timeout_seconds: float = 5.0) -> EtcdStore:
    """An etcd store that has connected nothing yet; raises `ConfigError` for settings that cannot work.

    Keep `call_timeout_seconds` below a third of the shortest lease. The caller closes it.
    """
    return EtcdStore(
        site.etcd,
        user=site.etcd_user or None,
        password=_password(site) if site.etcd_user else None,
        ca=site.etcd_ca or None,
        cert=site.etcd_cert or None,
        key=site.etcd_key or None,
        call_timeout_seconds=call_timeout_seconds,
    )


def open_store(site: Site, *, call_timeout_seconds: float = 5.0) -> EtcdStore:
    """An etcd store that has answered once. Blocks for one call; the caller closes it.

    Raises `Unavailable` (no answer), `AuthFailed` or `ConfigError`, each naming the endpoints.
    """
    store = connect_store(site, call_timeout_seconds=call_timeout_seconds)
    where = f"etcd at {', '.join(site.etcd)}"
    try:
        store.cluster_id()
    except AuthFailed as error:
        store.close()
        raise AuthFailed(f"{where} refuses user {site.etcd_user or '(none)'!r}: {error}") from error
    except Unavailable as error:
        store.close()
        raise Unavailable(f"{where} does not answer (site.etcd; is it running?): {error}") from error
    except SlackwaterError:
        store.close()
        raise
    return store


def _password(site: Site) -> str:
    if not site.etcd_password_file:
        password = os.environ.get(PASSWORD_VARIABLE, "")
        if not password:
            raise ConfigError(
                f"etcd user {site.etcd_user!r} needs a password: set {PASSWORD_VARIABLE} or site.etcd_password_file"
            )
        return password
    try:
        return Path(site.etcd_password_file).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site.etcd_password_file {site.etcd_password_file}: {error}") from error


def open_objects(site: Site) -> S3Store | None:
    """The remote tier, probed once with a small object; None when the site names no bucket. The caller closes it.

    Raises `Unavailable`, `AuthFailed`, `NotFound` (no such bucket) or `ConfigError` (a store without conditional
    writes cannot be used), each naming bucket and endpoint.
    """
    if not site.s3_bucket:
        return None
    from ..backends.s3 import S3Settings, S3Store

    settings = S3Settings(
        bucket=site.s3_bucket,
        prefix=site.s3_prefix,
        endpoint_url=site.s3_endpoint or None,
        region=site.s3_region,
        ca_file=Path(site.s3_ca) if site.s3_ca else None,
    )
    store = S3Store(settings)
    where = f"bucket {site.s3_bucket!r} at {site.s3_endpoint or 'AWS'}"
    try:
        missing = store.probe()
    except (AuthFailed, NotFound) as error:
        store.close()
        raise type(error)(f"{where} cannot be used: {error}") from error
    except Unavailable as error:
        store.close()
        raise Unavailable(f"{where} does not answer (site.s3_endpoint): {error}") from error
    except SlackwaterError:
        store.close()
        raise
    if "conditional-put" in missing:
        store.close()
        raise ConfigError(
            f"{where} lacks conditional writes (If-None-Match), without which no commit is safe"
        )
    return store


def open_tier(site: Site, files: FileSystem | None = None) -> FileTier:
    """The local tier at `site.local`; does no I/O (`prepare` does). `files` takes the place of the system's calls."""
    return LocalTier(Path(site.local).absolute(), files or FileSystem())
