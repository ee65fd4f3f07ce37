"""Published weight images in a directory that trainer and rollouts share, verified before an engine sees them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..engine.errors import CorruptCheckpoint, NotFound
from ..engine.image import IMAGE_NAME, verify_image
from ..engine.model import WeightVersion

__all__ = ["DirectoryImages", "directory_of"]


def directory_of(location: str) -> Path:
    """The directory that a `file://` location names, resolved; `NotFound` when it is no such location."""
    parts = urlsplit(location)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise NotFound(f"{location!r} is no file:// location")
    return Path(unquote(parts.path)).resolve()


class DirectoryImages:
    """`Images` for `file://` locations. With `root`, nothing outside it is ever read.

    Each `fetch` reads every byte of the image once; an image that was verified is verified again at the next load,
    since a directory that several hosts share is not ours.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root.resolve() if root is not None else None

    def fetch(self, version: WeightVersion) -> Path:
        """Return the image's directory. `NotFound` when it is not there (yet), `CorruptCheckpoint` when its files or
        the digest of its `image.json` are not what was published.
        """
        directory = self._directory(version)
        if not version.digest:
            raise CorruptCheckpoint(
                f"version {version.version} was published without a digest", version.location
            )
        if not (directory / IMAGE_NAME).is_file():
            raise NotFound(f"version {version.version}: no image at {directory}")
        verify_image(directory, version.digest)
        return directory

    def _directory(self, version: WeightVersion) -> Path:
        try:
            directory = directory_of(version.location)
        except NotFound as error:
            raise NotFound(f"version {version.version}: {error}") from None
        if self._root is not None and not directory.is_relative_to(self._root):
            raise NotFound(f"version {version.version}: {directory} is not below {self._root}")
        return directory
