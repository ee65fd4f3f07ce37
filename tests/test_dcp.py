"""Plain torch.distributed.checkpoint on our files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from slackwater.adapters.dcp import SlackwaterReader, SlackwaterWriter
from slackwater.adapters.torchstate import TrainState
from slackwater.engine.errors import SlackwaterError
from slackwater.engine.manifest import Header, VersionVector, encode_json, merge_manifest
from slackwater.engine.snapshot import Snapshotter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def test_dcp_saves_and_loads_through_our_files(tmp_path: Path) -> None:
    """`dcp.save` and `dcp.load` round trip tensors and plain objects; the files are safetensors and a
    manifest.
    """
    state: dict[str, Any] = {"w": torch.randn(5, 3), "s": torch.tensor(2), "lr": 0.5, "name": "x"}
    dcp.save(state, storage_writer=SlackwaterWriter(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "r00000-000.safetensors"]
    got: dict[str, Any] = {"w": torch.zeros(5, 3), "s": torch.tensor(0), "lr": 0.0, "name": ""}
    dcp.load(got, storage_reader=SlackwaterReader(tmp_path))
    assert torch.equal(got["w"], state["w"])
    assert got["s"] == 2
    assert got["lr"] == 0.5
    assert got["name"] == "x"


def test_dcp_loads_what_the_trainer_saved(tmp_path: Path) -> None:
    """A model's state dict is loaded by plain `dcp.load`, and a flipped bit is refused."""
    model = nn.Linear(4, 3)
    capture = TrainState(model).capture()
    part = Snapshotter().stage(capture.pieces, capture.aliases).write_part(tmp_path, objects=capture.objects)
    vector = VersionVector(training_step=1, weight_version=1, buffer_version=0)
    head = Header(job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=1, vector=vector)
    (tmp_path / "manifest.json").write_bytes(encode_json(merge_manifest(head, [part])))
    other = nn.Linear(4, 3)
    dcp.load(other.state_dict(), storage_reader=SlackwaterReader(tmp_path, strip="model/"))
    assert torch.equal(other.weight, model.weight)
    path = tmp_path / part.files[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises((SlackwaterError, dcp.CheckpointException), match="checksum"):
        dcp.load(other.state_dict(), storage_reader=SlackwaterReader(tmp_path, strip="model/"))
