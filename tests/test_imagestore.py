"""Published images are taken only from where they may be, and only with the bytes that were published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slackwater.adapters.export import write_image
from slackwater.adapters.imagestore import DirectoryImages
from slackwater.adapters.intents import FileIntents
from slackwater.engine.errors import CorruptCheckpoint, NotFound
from slackwater.engine.model import WeightVersion


@pytest.fixture
def version(tmp_path: Path) -> WeightVersion:
    """A published image of two tensors in a directory with a space in its name."""
    directory = tmp_path / "images" / "w 1"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    record = write_image(directory, iter(tensors.items()), {"config.json": b"{}"})
    return WeightVersion(version=1, step=1, timeline=1, location=directory.as_uri(), digest=record.digest)


def test_image_is_found_and_verified(tmp_path: Path, version: WeightVersion) -> None:
    """The directory of a sound image."""
    assert DirectoryImages(tmp_path / "images").fetch(version) == tmp_path / "images" / "w 1"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "image.json"])
def test_flipped_byte_is_corrupt(tmp_path: Path, version: WeightVersion, name: str) -> None:
    """One changed byte in any file, the manifest included."""
    path = tmp_path / "images" / "w 1" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        DirectoryImages().fetch(version)


def test_another_image_in_its_place_is_corrupt(tmp_path: Path, version: WeightVersion) -> None:
    """A sound image that is not the published one."""
    directory = tmp_path / "other"
    write_image(directory, iter({"a": torch.zeros(2, 3)}.items()), {})
    other = WeightVersion(version=1, step=1, timeline=1, location=directory.as_uri(), digest=version.digest)
    with pytest.raises(CorruptCheckpoint):
        DirectoryImages().fetch(other)


@pytest.mark.parametrize("location", ["file:///nowhere/at/all", "s3://bucket/w1", "file://host/w1", "w1", ""])
def test_what_is_not_there_is_not_found(tmp_path: Path, location: str) -> None:
    """Missing, remote or malformed locations."""
    version = WeightVersion(version=1, step=1, timeline=1, location=location, digest="sha256:0")
    with pytest.raises(NotFound):
        DirectoryImages(tmp_path).fetch(version)


def test_nothing_outside_the_root_is_read(tmp_path: Path, version: WeightVersion) -> None:
    """A location that leaves the directory of images, by a dot-dot or a link."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "images" / "w 1")
    images = DirectoryImages(tmp_path / "root")
    for location in (f"file://{tmp_path}/root/../images/w%201", f"file://{tmp_path}/root/link"):
        with pytest.raises(NotFound):
            images.fetch(WeightVersion(version=1, step=1, timeline=1, location=location, digest="x"))


def test_version_without_a_digest_is_refused(tmp_path: Path, version: WeightVersion) -> None:
    """Unverifiable is not loadable."""
    bare = WeightVersion(version=1, step=1, timeline=1, location=version.location)
    with pytest.raises(CorruptCheckpoint):
        DirectoryImages().fetch(bare)


def test_intent_outlives_its_writer(tmp_path: Path) -> None:
    """A call without an outcome is found by whoever comes next; an unreadable note counts as one."""
    directory = tmp_path / "new" / "place"
    assert FileIntents(directory).pending() == ""
    FileIntents(directory).begin("1.2.abc")
    assert FileIntents(directory).pending() == "1.2.abc"
    FileIntents(directory).done()
    assert FileIntents(directory).pending() == ""
    assert json.loads((directory / "intent.json").read_text()) == {"label": ""}
    (directory / "intent.json").write_bytes(b"{")
    assert FileIntents(directory).pending() == "unreadable"
