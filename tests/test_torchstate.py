"""State of a trainer through files and back, at any world size."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from slackwater.adapters.rng import RngState
from slackwater.adapters.torchstate import TrainState
from slackwater.engine.errors import StateMismatch, UnsupportedState
from slackwater.engine.fetch import Sources
from slackwater.engine.manifest import (
    Header,
    Manifest,
    VersionVector,
    decode_manifest,
    decode_part,
    encode_json,
    merge_manifest,
)
from slackwater.engine.reader import CheckpointReader
from slackwater.engine.snapshot import Snapshotter
from tests.ranks import leave

pytestmark = pytest.mark.real


def header(world_size: int = 1) -> Header:
    return Header(
        job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=world_size,
        vector=VersionVector(training_step=1, weight_version=1, buffer_version=0),
    )  # fmt: skip


def save(state: TrainState, directory: Path) -> Manifest:
    capture = state.capture()
    snapshotter = Snapshotter()
    part = snapshotter.stage(capture.pieces, capture.aliases).write_part(
        directory, objects=capture.objects, rank_objects=capture.rank_objects
    )
    snapshotter.close()
    return decode_manifest(encode_json(merge_manifest(header(), [part])))


def restore(state: TrainState, manifest: Manifest, directory: Path) -> list[str]:
    with CheckpointReader(manifest, Sources(directory)) as reader:
        return state.restore(reader)


class Tied(nn.Module):
    """Tied head, a non-persistent buffer, a 0-dim and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 5))
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("inv_freq", torch.arange(3.0) + 0.25, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids) * self.scale * self.inv_freq * self.one)
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 1, 5])).square().sum().backward()
    optimizer.step()


def bits(value: Any) -> Any:
    """A comparable picture of nested state, bit for bit."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(flat.tolist()).hex())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def test_F9_F11_plain_module_with_ties_scalars_and_meta_start(tmp_path: Path) -> None:
    """0-dim, empty, tied and non-persistent state, python scalars and None come back into a model
    built on meta.
    """
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer)
    scheduler.step()
    extra = {"epoch": 3, "none": None, "lr": float("nan"), 7: (1, "x"), "t": torch.ones(2)}
    state = TrainState(model, [optimizer], [scheduler], {"loop": extra}, {"rng": RngState()})
    before = bits([model.state_dict(), optimizer.state_dict()])
    manifest = save(state, tmp_path)
    drawn = torch.rand(3)

    with torch.device("meta"):
        other = Tied()
    with pytest.raises(StateMismatch, match="meta device"):
        restore(TrainState(other, [torch.optim.AdamW(other.parameters())]), manifest, tmp_path)
    other.to_empty(device="cpu")
    other.head.weight = other.embed.weight
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=9.0)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 7)
    got: dict[Any, Any] = {}
    remarks = restore(
        TrainState(other, [other_optimizer], [other_scheduler], {"loop": got}, {"rng": RngState()}),
        manifest,
        tmp_path,
    )
    assert remarks == []
    assert bits([other.state_dict(), other_optimizer.state_dict()]) == before
    assert torch.equal(other.inv_freq, model.inv_freq)
    assert other.head.weight is other.embed.weight
    assert manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert got["epoch"] == 3
    assert got["none"] is None
    assert got["lr"] != got["lr"]
    assert got[7] == (1, "x")
    assert torch.equal(got["t"], torch.ones(2))
    assert torch.equal(torch.rand(3), drawn)


def test_optimizer_state_that_does_not_exist_yet(tmp_path: Path) -> None:
    """A save before the first step makes no optimizer state, neither in the saved job nor in the
    restored one.
    """
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    manifest = save(TrainState(model, [optimizer]), tmp_path)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    train(other, other_optimizer)
    restore(TrainState(other, [other_optimizer]), manifest, tmp_path)
    assert not other_optimizer.state
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_F12_dtypes_of_moments_survive(tmp_path: Path) -> None:
    """fp32 masters of bf16 parameters and bf16 moments keep dtype and bits; another dtype in the model
    is refused.
    """

    def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2, bias=False).to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build(torch.bfloat16)
    master = torch.full((2, 3), 1.0 + 2**-20)
    optimizer.state[model.weight] = {"master": master, "exp_avg": torch.full((2, 3), 0.1).bfloat16()}
    manifest = save(TrainState(model, [optimizer]), tmp_path)
    other, other_optimizer = build(torch.bfloat16)
    restore(TrainState(other, [other_optimizer]), manifest, tmp_path)
    assert bits(dict(other_optimizer.state[other.weight])) == bits(dict(optimizer.state[model.weight]))
    wrong, wrong_optimizer = build(torch.float32)
    before = bits(wrong.state_dict())
    with pytest.raises(StateMismatch, match="bfloat16"):
        restore(TrainState(wrong, [wrong_optimizer]), manifest, tmp_path)
    assert bits(wrong.state_dict()) == before


def test_F17_missing_and_unexpected_names_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    """A state with other names or a dropped name raises with both lists; the model is untouched."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    manifest = save(TrainState(model), tmp_path)
    other = nn.Sequential(nn.Linear(2, 2))
    other.add_module("x", nn.Linear(2, 2))
    before = bits(other.state_dict())
    with pytest.raises(StateMismatch) as caught:
        restore(TrainState(other), manifest, tmp_path)
    assert set(caught.value.missing) == {"model/x.bias", "model/x.weight"}
    assert set(caught.value.unexpected) == {"model/1.bias", "model/1.weight"}
    assert bits(other.state_dict()) == before


def test_unsupported_object_is_refused_by_its_path() -> None:
    """An object that would need pickle is named before anything is staged."""
    state = TrainState(nn.Linear(1, 1), extras={"loop": {"a": [1, object()]}})
    with pytest.raises(UnsupportedState, match="extra/loop/a/1"):
        state.capture()


class Odd(nn.Module):
    """Shapes of which some ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(18.0).view(6, 3))
        self.b = nn.Parameter(torch.arange(3.0))
        self.c = nn.Parameter(torch.tensor([7.0]))
        self.e = nn.Parameter(torch.empty(0, 5), requires_grad=False)
        self.register_buffer("count", torch.tensor(4))

    def forward(self) -> torch.Tensor:
        return self.a.square().sum() + self.b.square().sum() + self.c.square().sum()


def _worker(rank: int, world: int, root: str, load: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    base = Path(root)
    dist.init_process_group(
        "gloo", init_method=f"file://{base}/pg-{world}-{int(load)}", rank=rank, world_size=world
    )
    try:
        torch.manual_seed(0)
        model = Odd()
        if load:
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(-1)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = TrainState(
            model, [optimizer], rank_extras={"rng": RngState()}, rank=rank, world_size=world
        )  # fmt: skip
        if not load:
            model().backward()
            optimizer.step()
            capture = state.capture()
            part = (
                Snapshotter(f"r{rank:05d}")
                .stage(capture.pieces, capture.aliases)
                .write_part(base, rank=rank, objects=capture.objects, rank_objects=capture.rank_objects)
            )
            (base / f"part-{rank}.json").write_bytes(encode_json(part))
        else:
            remarks = restore(state, decode_manifest((base / "manifest.json").read_bytes()), base)
            saved_world = len(list(base.glob("part-*.json")))
            assert bool(remarks) == (world != saved_world)
        picture = bits([dict(model.named_parameters()), [optimizer.state[p] for p in model.parameters()]])
        if rank == 0:
            (base / f"picture-{world}-{int(load)}").write_text(json.dumps(picture, sort_keys=True))
        leave()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_F8_any_world_size_to_any_other(tmp_path: Path, saved: int) -> None:
    """Empty shards, 0-dim step and replicated buffers: the same global tensors at every world size."""
    mp.spawn(_worker, (saved, str(tmp_path), False), nprocs=saved)
    parts = [decode_part(p.read_bytes()) for p in tmp_path.glob("part-*.json")]
    (tmp_path / "manifest.json").write_bytes(encode_json(merge_manifest(header(saved), parts)))
    expected = (tmp_path / f"picture-{saved}-0").read_text()
    for world in {1: (2,), 2: (2, 3), 4: (1, 5)}[saved]:
        mp.spawn(_worker, (world, str(tmp_path), True), nprocs=world)
        assert (tmp_path / f"picture-{world}-1").read_text() == expected


def test_F1_snapshot_is_the_moment_of_the_call(tmp_path: Path) -> None:
    """CPU tensors, moments and python state of a snapshot do not follow later updates."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    loop = {"n": [1], "t": torch.ones(1, 1)}
    state = TrainState(model, [optimizer], extras={"loop": loop})
    before = copy.deepcopy(bits([model.state_dict(), optimizer.state_dict()]))
    capture = state.capture()
    snapshotter = Snapshotter()
    staged = snapshotter.stage(capture.pieces, capture.aliases)
    loop["n"][0] = 2
    loop["t"].add_(1)
    train(model, optimizer)
    part = staged.write_part(tmp_path, objects=capture.objects)
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    got: dict[str, Any] = {}
    restore(
        TrainState(other, [other_optimizer], extras={"loop": got}), merge_manifest(header(), [part]), tmp_path
    )
    assert bits([other.state_dict(), other_optimizer.state_dict()]) == before
    assert got["n"] == [1]
    assert torch.equal(got["t"], torch.ones(1, 1))
