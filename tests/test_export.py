"""Weight images: exported from a trainer's model, verified without torch, loaded by what serves them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tinymodel import make_tiny_model
from slackwater.adapters.export import export_image, export_model, read_hf_files, write_image
from slackwater.adapters.imagecheck import check_image
from slackwater.engine.errors import Conflict, CorruptCheckpoint, StateMismatch, StoreError
from slackwater.engine.image import decode_image, read_image, verify_image
from slackwater.engine.tensorfile import FileSystem
from tests.ranks import leave

IDS = torch.tensor([[1, 5, 9, 30, 7]])


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_an_image_is_what_transformers_and_the_engine_expect(tmp_path: Path, family: Any, tied: bool) -> None:
    """A float32 trainer's image in bf16 has the base's tensors, loads, and gives the logits of its cast weights."""
    base = make_tiny_model(tmp_path / "base", family=family, tied=tied)
    model = load(base, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    image = tmp_path / "image"
    record = export_image(
        model, image, hf_files=read_hf_files(base), dtype=torch.bfloat16, info={"step": 3, "version": 1}
    )
    assert record is not None
    assert model.dtype is torch.float32
    assert verify_image(image, record.digest) == record.image
    assert record.size_bytes == sum(p.stat().st_size for p in image.iterdir() if p.name != "image.json")
    names = {tensor.name for tensor in record.image.tensors}
    assert ("lm_head.weight" in names) is not tied
    assert record.image.info == {"step": 3, "version": 1}
    check_image(image, base)
    expected = load(base)
    expected.load_state_dict(model.state_dict())  # copies with a cast
    assert torch.equal(logits(load(image)), logits(expected))
    assert (
        AutoTokenizer.from_pretrained(image)("7 - 5").input_ids
        == AutoTokenizer.from_pretrained(base)("7 - 5").input_ids
    )


def test_a_large_image_is_split_and_indexed(tmp_path: Path) -> None:
    """Above the file limit the image has numbered files with an index, and loads the same."""
    base = make_tiny_model(tmp_path / "base")
    model = load(base)
    record = write_image(
        tmp_path / "image", export_model(model), read_hf_files(base), file_limit_bytes=40_000
    )
    assert len([f for f in record.image.files if f.path.endswith(".safetensors")]) > 2
    verify_image(tmp_path / "image", record.digest)
    check_image(tmp_path / "image", base)
    assert torch.equal(logits(load(tmp_path / "image")), logits(model))


def test_names_lose_their_wrappers_and_aliases_are_kept() -> None:
    """compile and checkpoint wrappers leave no trace; a parameter with two names is exported under both."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.compile(nn.Linear(2, 2), backend="eager")
            self.b = nn.Linear(2, 2)
            self.b.weight = self.a.weight  # type: ignore[union-attr]
            self.register_buffer("count", torch.tensor(4))
            self.register_buffer("scratch", torch.ones(1), persistent=False)

    found = dict(export_model(torch.compile(Twice(), backend="eager"), dtype=torch.float16))  # type: ignore[arg-type]
    assert set(found) == {"a.weight", "a.bias", "b.weight", "b.bias", "count"}
    assert torch.equal(found["a.weight"], found["b.weight"])
    assert found["a.weight"].dtype is torch.float16
    assert found["count"].dtype is torch.int64


def test_a_head_that_is_tied_on_paper_only_is_refused(tmp_path: Path) -> None:
    """Leaving out a head that has weights of its own would serve another model than the trained one."""
    model = load(make_tiny_model(tmp_path / "base", tied=True))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(StateMismatch, match=r"lm_head\.weight"):
        list(export_model(model))
    assert "lm_head.weight" in dict(export_model(model, tie_word_embeddings=False))


def small(directory: Path, **options: Any) -> Any:
    tensors = iter([("w", torch.arange(6.0).view(2, 3)), ("s", torch.tensor(1.5).bfloat16())])
    return write_image(directory, tensors, {"config.json": b"{}"}, **options)


def test_what_differs_from_the_record_is_named(tmp_path: Path) -> None:
    """A flipped byte, a shorter, missing, added or replaced file, or another image.json is found and named."""
    record = small(tmp_path / "good")
    weights = (tmp_path / "good" / "model.safetensors").read_bytes()

    def damaged(name: str, data: bytes | None) -> Path:
        directory = tmp_path / f"bad-{len(list(tmp_path.iterdir()))}"
        small(directory)
        (directory / name).unlink(missing_ok=True)
        if data is not None:
            (directory / name).write_bytes(data)
        return directory

    flipped = weights[:-3] + bytes([weights[-3] ^ 1]) + weights[-2:]
    cases = [
        (damaged("model.safetensors", flipped), "digest"),
        (damaged("model.safetensors", weights[:-1]), "bytes, recorded"),
        (damaged("model.safetensors", None), "unreadable"),
        (damaged("config.json", b"[]"), "digest"),
        (damaged("extra.safetensors", weights), "not part of the image"),
        (damaged("image.json", None), "No such file"),
        (damaged("image.json", b'{"format_version":2}'), "format_version 2"),
    ]
    for directory, reason in cases:
        with pytest.raises(CorruptCheckpoint, match=reason):
            verify_image(directory)
    with pytest.raises(CorruptCheckpoint, match="recorded sha256"):
        verify_image(tmp_path / "good", "sha256:" + "0" * 64)
    assert read_image(tmp_path / "good") == (record.image, record.digest)
    link = damaged("config.json", None)
    (link / "config.json").symlink_to(tmp_path / "good" / "config.json")
    with pytest.raises(CorruptCheckpoint, match="symbolic link"):
        verify_image(link)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"path": "../x", "size_bytes": 1, "digest": "crc64nvme:" + "0" * 16}]},
        {"files": [{"path": "x", "size_bytes": -1, "digest": "crc64nvme:" + "0" * 16}]},
        {"files": [{"path": "x", "size_bytes": 1, "digest": "md5:0"}]},
        {"files": [{"path": "image.json", "size_bytes": 1, "digest": "crc64nvme:" + "0" * 16}]},
        {"tensors": [{"name": "w", "dtype": "float32", "shape": [1], "file": "none"}]},
    ],
)
def test_a_hostile_image_record_is_refused(change: dict[str, Any]) -> None:
    """Paths that leave the directory, negative sizes, unknown digests and files are refused before any is read."""
    with pytest.raises(CorruptCheckpoint):
        decode_image(json.dumps(change).encode())


class Failing(FileSystem):
    """Fails when the nth file is renamed into place."""

    def __init__(self, number: int) -> None:
        self.left = number

    def rename_new(self, source: Path, target: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "Input/output error")
        super().rename_new(source, target)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_image_json_comes_last_and_the_gather_always_ends(tmp_path: Path, number: int) -> None:
    """Whatever write fails, there is no image.json, and all tensors have been asked for: no rank waits for ever."""
    asked = []

    def tensors() -> Any:
        for name in ("a", "b", "c"):
            asked.append(name)
            yield name, torch.ones(2)

    with pytest.raises(StoreError, match="Input/output"):
        write_image(tmp_path / "image", tensors(), {"config.json": b"{}"}, files=Failing(number))
    assert not (tmp_path / "image" / "image.json").exists()
    assert asked == ["a", "b", "c"]
    with pytest.raises(CorruptCheckpoint):
        verify_image(tmp_path / "image")


def test_names_are_used_once(tmp_path: Path) -> None:
    """A second image into the same directory, or a file that would pose as weights, is refused."""
    small(tmp_path / "image")
    with pytest.raises(Conflict):
        small(tmp_path / "image")
    for name in ("image.json", "other.safetensors", "../config.json"):
        with pytest.raises(CorruptCheckpoint):
            write_image(tmp_path / "other", iter([("w", torch.ones(1))]), {name: b""})


def test_verification_needs_no_torch(tmp_path: Path) -> None:
    """The sidecar verifies an image in a process that never imports torch."""
    small(tmp_path / "image")
    code = (
        "import sys; from pathlib import Path; from slackwater.engine.image import verify_image; "
        f"verify_image(Path({str(tmp_path / 'image')!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def _shard(rank: int, root: str, wrap: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    base = Path(root)
    dist.init_process_group("gloo", init_method=f"file://{base}/pg-{wrap}", rank=rank, world_size=2)
    try:
        model: nn.Module = load(base / "base", torch.float32)
        if wrap == "fsdp2":
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)  # type: ignore[arg-type]
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        record = export_image(
            model,
            base / wrap if rank == 0 else None,
            hf_files=read_hf_files(base / "base") if rank == 0 else {},
            dtype=torch.bfloat16,
            rank=rank,
        )
        assert (record is None) is (rank != 0)
        if rank == 0:
            with pytest.raises(Conflict):
                export_image(model, base / wrap, hf_files={"config.json": b""}, rank=rank)
        else:
            export_image(model, None, hf_files={}, rank=rank)
        leave()
    finally:
        dist.destroy_process_group()


@pytest.mark.real
@pytest.mark.parametrize(("wrap", "tied"), [("fsdp2", True), ("ddp", False)])
def test_ranks_export_the_unsharded_model(tmp_path: Path, wrap: str, tied: bool) -> None:
    """Two ranks give the bytes of the plain model, whose cast is explicit; a writer that fails hangs no one."""
    base = make_tiny_model(tmp_path / "base", tied=tied)
    mp.spawn(_shard, (str(tmp_path), wrap), nprocs=2)
    verify_image(tmp_path / wrap)
    check_image(tmp_path / wrap, base)
    assert torch.equal(logits(load(tmp_path / wrap)), logits(load(base)))
