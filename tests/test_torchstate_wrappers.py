"""One state under every wrapper that torch has: saved under one, restored under any other."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slackwater.adapters.export import export_model
from slackwater.adapters.flatshard import boxes_of_range
from slackwater.adapters.torchstate import TrainState
from slackwater.engine.errors import StateMismatch
from slackwater.engine.fetch import Sources
from slackwater.engine.manifest import (
    Header,
    VersionVector,
    decode_manifest,
    decode_part,
    encode_json,
    merge_manifest,
)
from slackwater.engine.reader import CheckpointReader
from slackwater.engine.snapshot import Snapshotter
from tests.ranks import leave

KINDS = ("plain", "compiled", "ddp", "fsdp2", "fsdp1", "fsdp1-flat", "fsdp1-none")
HUBS = ("fsdp2", "fsdp1", "plain")  # every pair that has one of these


class Net(nn.Module):
    """Odd sizes, a tie, a 0-dim buffer, one that a state dict leaves out, and (if `unused`) a parameter
    without a gradient.
    """

    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.block = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.ones(1))
        if unused:
            self.unused = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("freq", torch.tensor([0.25, 0.5, 1.0]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.embed(ids) * self.freq) * self.one)
        return out


class Counting(torch.optim.Optimizer):
    """Keeps python scalars and None beside a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "name": "counting", "none": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + 1
                    state["note"] = None
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(p.grad, alpha=group["lr"])


def wrap(kind: str, model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "compiled":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp2":
        fully_shard(model.block)  # type: ignore[arg-type]
        fully_shard(model)
    elif kind.startswith("fsdp1"):
        strategy = ShardingStrategy.NO_SHARD if kind == "fsdp1-none" else ShardingStrategy.FULL_SHARD
        options: Any = {
            "use_orig_params": kind != "fsdp1-flat",
            "device_id": torch.device("cpu"),
            "sharding_strategy": strategy,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and NO_SHARD more so
            model.block = FullyShardedDataParallel(model.block, **options)  # type: ignore[arg-type]
            return FullyShardedDataParallel(model, **options)
    return model


def build(kind: str, optimizer: str, unused: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(kind, Net(unused))
    if optimizer == "counting":
        return model, Counting(model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 1, 5])).square().sum().backward()
    optimizer.step()


@torch.no_grad()
def answer(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.tensor([0, 3, 6]))
    return out


def whole(state: TrainState) -> dict[str, torch.Tensor]:
    """Torch's own picture of the model, gathered: not ours."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True))


def read_back(base: Path, name: str) -> dict[str, Any]:
    """Everything in a checkpoint, whatever wrote it: whole tensors, and the optimizer's scalars by parameter."""
    manifest = decode_manifest((base / name / "manifest.json").read_bytes())
    with CheckpointReader(manifest, Sources(base / name)) as reader:
        found: dict[str, Any] = {n: reader.read(n).clone() for n in sorted(reader.names)}
    record = dict(manifest.objects["optim/0"])
    scalars = {n: s for n, s in record["state"].items() if s}
    for path, value in manifest.objects.items():
        if path.startswith("optim/0/state/"):
            scalars[path.removeprefix("optim/0/state/")] = value
    found["scalars"] = scalars
    found["groups"] = [(sorted(g["params"]), g["options"]) for g in record["groups"]]
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype, name
            assert torch.equal(value, b[name]), name
        else:
            assert value == b[name], name


def save(state: TrainState, base: Path, name: str, barrier: Any) -> None:
    (base / name).mkdir(exist_ok=True)
    capture = state.capture()
    snapshotter = Snapshotter(f"r{state.rank:05d}")
    part = snapshotter.stage(capture.pieces, capture.aliases).write_part(
        base / name, rank=state.rank, objects=capture.objects, rank_objects=capture.rank_objects
    )
    snapshotter.close()
    (base / name / f"part-{state.rank}.json").write_bytes(encode_json(part))
    barrier()
    if state.rank == 0:
        parts = [decode_part(p.read_bytes()) for p in (base / name).glob("part-*.json")]
        header = Header(
            job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=state.world_size,
            vector=VersionVector(training_step=1, weight_version=1, buffer_version=0),
        )  # fmt: skip
        (base / name / "manifest.json").write_bytes(encode_json(merge_manifest(header, parts)))
    barrier()


def restore(state: TrainState, base: Path, name: str) -> None:
    manifest = decode_manifest((base / name / "manifest.json").read_bytes())
    with CheckpointReader(manifest, Sources(base / name)) as reader:
        state.restore(reader)


def _matrix(rank: int, world: int, root: str, optimizer: str, unused: bool, saved: list[str]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    base = Path(root)
    dist.init_process_group(
        "gloo", init_method=f"file://{base}/pg-{world}-{len(saved)}", rank=rank, world_size=world
    )
    try:
        kinds = [k for k in KINDS if not (unused and k == "fsdp1-flat")]
        answers: dict[str, torch.Tensor] = {}
        for kind in kinds if not saved else []:
            model, optim = build(kind, optimizer, unused, 0)
            train(model, optim)
            state = TrainState(model, [optim], rank=rank, world_size=world)
            before = whole(state)
            save(state, base, kind, dist.barrier)
            written = read_back(base, kind)
            for name, value in before.items():
                assert torch.equal(written[f"model/{name}"], value), (kind, name)
            exported = dict(export_model(model, rank=rank))
            assert exported.keys() == (before.keys() if rank == 0 else set())
            for name, value in exported.items():
                assert torch.equal(before[name], value), (kind, name)
            if rank == 0:
                (base / kind / "answer.json").write_text(json.dumps(answer(model).tolist()))
            else:
                answer(model)
            dist.barrier()
        for source, kind in itertools.product(saved or kinds, kinds):
            if source not in HUBS and kind not in HUBS:
                continue
            answers[source] = torch.tensor(json.loads((base / source / "answer.json").read_text()))
            model, optim = build(kind, optimizer, unused, 1)
            train(model, optim)
            answer(model)  # FSDP1 keeps the root's gathered parameters from here
            state = TrainState(model, [optim], rank=rank, world_size=world)
            restore(state, base, source)
            torch.testing.assert_close(answer(model), answers[source])
            again = f"{source}-{kind}-{world}"
            save(state, base, again, dist.barrier)
            same(read_back(base, source), read_back(base, again))
            (base / again / "answer.json").write_text(json.dumps(answers[source].tolist()))
            train(model, optim)  # the optimizer takes its state
        leave()
    finally:
        dist.destroy_process_group()


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("optimizer", "unused"), [("adamw", False), ("counting", True)])
def test_every_wrapper_to_every_other(tmp_path: Path, optimizer: str, unused: bool) -> None:
    """Plain, compiled, DDP, FSDP2 and FSDP1 at two ranks write what torch says they hold, and each restores
    each, bit for bit, moments and scalars included; one rank reads what two wrote, and the other way round.
    """
    mp.spawn(_matrix, (2, str(tmp_path), optimizer, unused, []), nprocs=2)
    sources = ["fsdp2", "fsdp1"] + ([] if unused else ["fsdp1-flat"])
    mp.spawn(_matrix, (1, str(tmp_path), optimizer, unused, sources), nprocs=1)
    mp.spawn(_matrix, (2, str(tmp_path), optimizer, unused, ["fsdp2-fsdp1-1", "fsdp1-plain-1"]), nprocs=2)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)), st.integers(0, math.prod(shape)), st.integers(0, math.prod(shape))
        )
    )
)
def test_boxes_tile_a_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """The boxes of a range, laid end to end, are the range."""
    shape, a, b = case
    start, end = min(a, b), max(a, b)
    tensor = torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    for offsets, lengths in boxes_of_range(shape, start, end):
        box = tensor
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            box = box.narrow(dim, offset, length)
        found += box.flatten().tolist()
    assert found == list(range(start, end))


def test_nothing_is_touched_before_everything_was_read(tmp_path: Path) -> None:
    """A damaged byte in the last file, a lost file, or a header that lies leaves model, optimizer and extras alone."""
    model, optimizer = build("plain", "adamw", True, 0)
    train(model, optimizer)
    extra = {"n": 1}
    state = TrainState(model, [optimizer], extras={"loop": extra})
    capture = state.capture()
    part = (
        Snapshotter(file_limit_bytes=200)
        .stage(capture.pieces, capture.aliases)
        .write_part(tmp_path, objects=capture.objects)
    )
    assert len(part.files) > 3
    header = Header(
        job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=1,
        vector=VersionVector(training_step=1, weight_version=1, buffer_version=0),
    )  # fmt: skip
    manifest = merge_manifest(header, [part])
    other, other_optimizer = build("plain", "adamw", True, 1)
    train(other, other_optimizer)
    loop = {"n": 2}
    target = TrainState(other, [other_optimizer], extras={"loop": loop})

    def picture() -> list[Any]:
        tensors = [
            *other.state_dict().values(),
            *(v for s in other_optimizer.state.values() for v in s.values()),
        ]
        return [
            [t.tolist() for t in tensors],
            [dict(g, params=0) for g in other_optimizer.param_groups],
            dict(loop),
        ]

    before = picture()
    for entry in part.files:
        path = tmp_path / entry.path
        good = path.read_bytes()
        for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            with (
                pytest.raises(Exception, match="no good copy"),
                CheckpointReader(manifest, Sources(tmp_path)) as reader,
            ):
                target.restore(reader)
            assert picture() == before
            path.write_bytes(good)
    with CheckpointReader(manifest, Sources(tmp_path)) as reader:
        target.restore(reader)
    assert loop == {"n": 1}


def _flat_refusal(rank: int, root: str) -> None:
    import torch.distributed as dist

    base = Path(root)
    dist.init_process_group("gloo", init_method=f"file://{base}/pg", rank=rank, world_size=1)
    try:
        plain, plain_optimizer = build("plain", "adamw", True, 0)
        train(plain, plain_optimizer)
        save(TrainState(plain, [plain_optimizer]), base, "plain", lambda: None)
        model, optimizer = build("fsdp1-flat", "adamw", True, 1)
        before = answer(model)
        with pytest.raises(StateMismatch, match="only some parameters of one flat parameter"):
            restore(TrainState(model, [optimizer]), base, "plain")
        assert torch.equal(answer(model), before)
        leave()
    finally:
        dist.destroy_process_group()


@pytest.mark.real
def test_a_flat_parameter_cannot_hold_state_for_a_part_of_it(tmp_path: Path) -> None:
    """Without original parameters FSDP1 has one step for all of a unit; state that does not fit that is refused."""
    mp.spawn(_flat_refusal, (str(tmp_path),), nprocs=1)
