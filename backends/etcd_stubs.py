"""The one place that imports etcd's generated gRPC stubs, from the distribution `cslab-etcd3`.

Several distributions install a package named `etcd3` over each other without a word, and most of them
cannot be imported beside a current protobuf. Whoever wants other stubs changes this file alone.
"""

from __future__ import annotations

import sys
from importlib import metadata

from ..engine.errors import ConfigError

__all__ = ["rpc", "check_stub_owner"]

_WANTED = "cslab-etcd3"
_RIVALS = ("etcd3", "python3-etcd3", "etcd3-py")


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_stub_owner() -> None:
    """Raise `ConfigError` naming the distributions when `etcd3/` is not owned by `cslab-etcd3` alone."""
    rivals = [name for name in _RIVALS if _installed(name)]
    if rivals:
        raise ConfigError(
            f"the package etcd3/ is claimed by {', '.join(rivals)}, which overwrites the {_WANTED} that "
            f"Slackwater needs: pip uninstall {' '.join(rivals)}, "
            f"then pip install --force-reinstall --no-deps {_WANTED}"
        )
    if not _installed(_WANTED):
        raise ConfigError(f"the package etcd3/ does not come from {_WANTED}: pip install {_WANTED}")
    if "aetcd" in sys.modules:
        raise ConfigError(
            "aetcd is imported in this process; its auth.proto clashes with that of cslab-etcd3"
        )


try:
    from etcd3 import etcdrpc as rpc  # type: ignore[import-untyped]  # generated code without annotations
except (ImportError, TypeError) as error:  # TypeError: stubs that are too old for the installed protobuf
    check_stub_owner()
    raise ConfigError(f"the etcd stubs of {_WANTED} cannot be imported: {error}") from error
