"""Files of tensors: what is written, what is refused, what happens when the disk says no."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from slackwater.backends.local import LocalTier
from slackwater.engine.digest import combine_crcs, crc64nvme, digest_bytes
from slackwater.engine.errors import (
    ConfigError,
    Conflict,
    CorruptCheckpoint,
    NoSpace,
    NotFound,
    SlackwaterError,
    StagingBusy,
    StoreError,
    UnsupportedState,
)
from slackwater.engine.fetch import Sources
from slackwater.engine.jsonstate import decode_state, encode_state
from slackwater.engine.layout import Item, plan_layout
from slackwater.engine.manifest import (
    Header,
    Manifest,
    Part,
    VersionVector,
    attempt_path,
    decode_manifest,
    encode_json,
    merge_manifest,
)
from slackwater.engine.pieces import Piece
from slackwater.engine.reader import CheckpointReader
from slackwater.engine.snapshot import Snapshotter
from slackwater.engine.tensorfile import FileSystem, write_file, write_small_file


def manifest_of(part: Part) -> Manifest:
    head = Header(
        job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=1,
        vector=VersionVector(training_step=1, weight_version=1, buffer_version=0),
    )  # fmt: skip
    return decode_manifest(encode_json(merge_manifest(head, [part])))


def save(tensors: dict[str, torch.Tensor], directory: Path, **settings: Any) -> Manifest:
    snapshotter = Snapshotter(**settings)
    part = snapshotter.stage([Piece.of(name, t) for name, t in tensors.items()]).write_part(directory)
    snapshotter.close()
    return manifest_of(part)


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.resolve_conj().contiguous()
    out = bytearray(tensor.numel() * tensor.element_size())
    if out:
        import ctypes

        ctypes.memmove((ctypes.c_char * len(out)).from_buffer(out), tensor.data_ptr(), len(out))
    return bytes(out)


def assert_back(tensors: dict[str, torch.Tensor], manifest: Manifest, directory: Path) -> None:
    with CheckpointReader(manifest, Sources(directory)) as reader:
        assert reader.names == set(tensors)
        for name, tensor in tensors.items():
            got = reader.read(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            assert raw(got) == raw(tensor), name


# -- tensors


def test_F1_values_are_those_of_the_call(tmp_path: Path) -> None:
    """An in-place update right after `stage` does not reach the file."""
    w = torch.ones(1, 1)
    staged = Snapshotter().stage([Piece.of("w", w)])
    w.add_(1)
    part = staged.write_part(tmp_path)
    assert_back({"w": torch.ones(1, 1)}, manifest_of(part), tmp_path)


def test_T1_aliases_once_and_disjoint_slices_apart(tmp_path: Path) -> None:
    """The same memory under two names is stored once; slices of one buffer are two tensors."""
    base = torch.arange(8.0)
    tensors = {"embed": base, "head": base, "left": base[:4], "right": base[4:]}
    manifest = save(tensors, tmp_path)
    assert manifest.aliases == {"head": "embed"}
    assert_back(tensors, manifest, tmp_path)
    with safe_open(tmp_path / "r00000-000.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed", "left", "right"}


def test_T2_strides_round_trip(tmp_path: Path) -> None:
    """Transposed, channels-last, expanded and stepped tensors come back; an expanded one does not blow up."""
    tensors = {
        "t": torch.arange(12.0).view(3, 4).t(),
        "cl": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
        "x": torch.tensor([[1.0], [2.0]]).expand(2, 1 << 20),
        "step": torch.arange(9)[::2],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "__metadata__": torch.ones(3),
    }
    strides = {name: t.stride() for name, t in tensors.items()}
    manifest = save(tensors, tmp_path)
    assert sum(f.size_bytes for f in manifest.files) < 100_000
    assert {name: t.stride() for name, t in tensors.items()} == strides
    assert_back(tensors, manifest, tmp_path)


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32"),
    *("uint16", "uint8", "bool", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int4", "uint4", "int1"),
    *("uint7", "bits8"),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_T3_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    """Whatever safetensors lacks is packed, and every dtype comes back with its bits."""
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        tensor = torch.empty(4, 2, dtype=dtype)
        pattern = os.urandom(tensor.numel() * tensor.element_size())
        if name == "bool":
            pattern = bytes(b & 1 for b in pattern)
        import ctypes

        ctypes.memmove(tensor.data_ptr(), pattern, len(pattern))
        tensors[name] = tensor
    manifest = save(tensors, tmp_path)
    assert {t.dtype for t in manifest.tensors} == set(DTYPES)
    with CheckpointReader(manifest, Sources(tmp_path)) as reader:
        for name, tensor in tensors.items():
            got = reader.read(name)
            assert got.dtype == tensor.dtype
            assert raw(got) == raw(tensor), name


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["meta", "sparse", "quantised"])
def test_T3_what_has_no_plain_bytes_is_refused_by_name(kind: str) -> None:
    """Meta, sparse and quantised tensors are refused before anything is staged."""
    tensor = {
        "meta": lambda: torch.empty(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    }[kind]()
    with pytest.raises(UnsupportedState, match="layer"):
        Snapshotter().stage([Piece.of("ok", torch.ones(2)), Piece.of("layer", tensor)])


@pytest.mark.real
def test_T4_headers_split_before_the_limit() -> None:
    """1.1 million long names in one rank give several files, each with a header that readers accept."""
    items = [Item("m." + "x" * 60 + str(i), "F32", (1,), 4, 4) for i in range(1_100_000)]
    layout = plan_layout(items, "r")
    assert len(layout.files) > 1
    assert all(len(file.header) < 100_000_000 for file in layout.files)
    assert sum(len(file.slots) for file in layout.files) == len(items)


def test_split_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Files split by size, and each is readable by safetensors alone."""
    tensors = {f"t{i}": torch.randn(1000) for i in range(10)}
    manifest = save(tensors, tmp_path, file_limit_bytes=9000)
    assert len(manifest.files) == 5
    seen = {}
    for entry in manifest.files:
        with safe_open(tmp_path / entry.path, "pt") as file:
            seen.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors.items())
    assert_back(tensors, manifest, tmp_path)


def test_plan_is_made_once_and_follows_memory_that_moves(tmp_path: Path) -> None:
    """A second save makes no new plan, also when tensors moved; a new shape makes one."""
    snapshotter = Snapshotter()
    for number, tensor in enumerate([torch.zeros(3), torch.ones(3), torch.ones(4)]):
        out = tmp_path / str(number)
        out.mkdir()
        part = snapshotter.stage([Piece.of("a", tensor), Piece.of("b", tensor[1:])]).write_part(out)
        assert_back({"a": tensor, "b": tensor[1:]}, manifest_of(part), out)
        assert snapshotter.plans_made == (1 if number < 2 else 2)


def test_F15_third_snapshot_is_refused_and_memory_is_reused(tmp_path: Path) -> None:
    """Two snapshots may be in flight; a third raises and copies nothing; a finished one makes room."""
    snapshotter = Snapshotter()
    pieces = [Piece.of("w", torch.ones(10))]
    first, _second = snapshotter.stage(pieces), snapshotter.stage(pieces)
    with pytest.raises(StagingBusy):
        snapshotter.stage(pieces)
    first.write(tmp_path)
    snapshotter.stage(pieces).release()


def test_T6_flipped_bit_and_missing_digest(tmp_path: Path) -> None:
    """A changed bit in the payload and a digest that was deleted both refuse."""
    manifest = save({"w": torch.randn(10_000)}, tmp_path)
    path = tmp_path / manifest.files[0].path
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with (
        pytest.raises(CorruptCheckpoint, match="checksum"),
        CheckpointReader(manifest, Sources(tmp_path)) as reader,
    ):
        reader.read("w")
    with pytest.raises(CorruptCheckpoint):
        LocalTier(tmp_path).verify("x", manifest.files[0])
    record = json.loads(encode_json(manifest))
    record["files"][0]["digest"] = ""
    with pytest.raises(CorruptCheckpoint, match="digest"):
        decode_manifest(json.dumps(record).encode())
    del record["files"][0]["digest"]
    with pytest.raises(CorruptCheckpoint, match="digest"):
        decode_manifest(json.dumps(record).encode())


# -- writing


class Recorder(FileSystem):
    """Writes down the calls of a save, and fails at one of them."""

    def __init__(self, fail_at: str = "", code: int = errno.ENOSPC, after: int = 0) -> None:
        self.calls: list[str] = []
        self.fail_at, self.code, self.after = fail_at, code, after

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at and self.calls.count(call) > self.after:
            raise OSError(self.code, os.strerror(self.code))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._note("write")
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._note("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._note("close")

    def rename_new(self, source: Path, target: Path) -> None:
        self._note("rename")
        super().rename_new(source, target)

    def sync_directory(self, path: Path) -> None:
        self._note("sync directory")


def test_D2_order_of_calls(tmp_path: Path) -> None:
    """Write, fsync, close, rename, fsync of the directory, in this order and beside the target."""
    recorder = Recorder()
    write_file(tmp_path, "x", memoryview(b"data"), 4, files=recorder)
    assert recorder.calls == ["write", "sync", "close", "rename", "sync directory"]


@pytest.mark.parametrize("step", ["write", "sync", "close", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EXDEV])
def test_D1_D3_failure_at_any_step_leaves_nothing(tmp_path: Path, step: str, code: int) -> None:
    """A full disk or any other error at write, fsync, close or rename is named, and no file stays; a
    retry works.
    """
    tensors = {"w": torch.randn(3 << 20)}
    snapshotter = Snapshotter(file_limit_bytes=8 << 20, files=Recorder(step, code, after=0))
    pieces = [Piece.of(name, t) for name, t in tensors.items()]
    kind = NoSpace if code in (errno.ENOSPC, errno.EDQUOT) else StoreError
    with pytest.raises(kind, match=r"r00000-000"):
        snapshotter.stage(pieces).write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    snapshotter.files = FileSystem()
    part = snapshotter.stage(pieces).write_part(tmp_path)
    assert_back(tensors, manifest_of(part), tmp_path)


def test_second_file_fails_and_the_first_goes_too(tmp_path: Path) -> None:
    """A snapshot of several files leaves none of them when a later one cannot be written."""
    snapshotter = Snapshotter(file_limit_bytes=5000, files=Recorder("write", after=1))
    with pytest.raises(NoSpace):
        snapshotter.stage([Piece.of(n, torch.randn(1000)) for n in "abc"]).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_name_is_never_replaced(tmp_path: Path) -> None:
    """A name that is taken is a conflict, and its bytes stay."""
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(Conflict):
        write_file(tmp_path, "x", memoryview(b"new"), 3)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    """Files get the mode that the umask asks for."""
    old = os.umask(0o027)
    try:
        write_file(tmp_path, "x", memoryview(b"new"), 3)
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_write_in_the_background_while_the_next_snapshot_is_taken(tmp_path: Path) -> None:
    """A slow write and the next `stage` overlap, each with its own memory."""
    gate = threading.Event()

    class Slow(FileSystem):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            gate.wait(20)
            return super().write(fd, data, offset)

    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    snapshotter = Snapshotter(files=Slow())
    w = torch.ones(4)
    first = snapshotter.stage([Piece.of("w", w)])
    parts: list[Part] = []
    thread = threading.Thread(target=lambda: parts.append(first.write_part(tmp_path / "1")))
    thread.start()
    w.add_(1)
    second = snapshotter.stage([Piece.of("w", w)])
    w.add_(1)
    gate.set()
    thread.join(20)
    assert_back({"w": torch.ones(4)}, manifest_of(parts[0]), tmp_path / "1")
    assert_back({"w": torch.ones(4) + 1}, manifest_of(second.write_part(tmp_path / "2")), tmp_path / "2")


# -- manifest and typed JSON


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "../x"), ("path", "/etc/passwd"), ("path", "a//b"), ("path", ""), ("path", "a/./b"),
        ("path", "a\\..\\b\0"),
        ("size_bytes", -1), ("size_bytes", 1 << 60), ("size_bytes", 1.5),
        ("digest", "md5:00"), ("chunk_bytes", 0),
        ("chunks", ["zz"]), ("extra", 1),
    ],
)  # fmt: skip
def test_hostile_manifest_is_refused(tmp_path: Path, field: str, value: object) -> None:
    """Paths that leave the checkpoint, impossible sizes, wrong digests and unknown fields are all corrupt."""
    record = json.loads(encode_json(save({"w": torch.ones(2)}, tmp_path)))
    record["files"][0][field] = value
    with pytest.raises(CorruptCheckpoint):
        decode_manifest(json.dumps(record).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"null", b"{}"])
def test_garbage_is_no_manifest(data: bytes) -> None:
    """Truncated, deeply nested or alien bytes raise the named error and nothing else."""
    with pytest.raises(CorruptCheckpoint):
        decode_manifest(data)


def test_shards_must_tile_their_tensor(tmp_path: Path) -> None:
    """A hole, an overlap and a box outside are refused."""
    manifest = save({"w": torch.ones(4)}, tmp_path)
    shard = manifest.tensors[0].shards[0]
    for boxes in ([((0,), (2,))], [((0,), (3,)), ((2,), (1,))], [((1,), (4,))], [((-1,), (4,))]):
        shards = tuple(msgspec.structs.replace(shard, offsets=o, lengths=n) for o, n in boxes)
        bad = msgspec.structs.replace(
            manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], shards=shards),)
        )
        with pytest.raises(CorruptCheckpoint):
            decode_manifest(encode_json(bad))


def test_typed_json_round_trip() -> None:
    """Types and bits of non-tensor state survive."""
    import numpy as np

    value = {
        "i": 1 << 80, "f": -0.0, "inf": float("-inf"), "b": True, "none": None,
        "bytes": b"\0\xff", 3: (1, [2]),
        (1, 2): {"x"}, None: frozenset({1}), "np": np.float32(1.1), "arr": np.arange(6).reshape(2, 3),
        "dtype": torch.bfloat16, "dev": torch.device("cpu"), "size": torch.Size([2, 3]), "c": 1 + 2j,
        "t": [torch.ones(2)], "s": "ü",
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    encoded = json.loads(json.dumps(encode_state(value, "s", tensors)))
    assert list(tensors) == ["s/t/0"]
    back = decode_state(encoded, tensors.__getitem__)
    assert repr(back) == repr(value)
    assert type(back["np"]) is np.float32


def test_typed_json_refuses_by_path() -> None:
    """Objects of other classes, enums included, and cycles are refused by their path."""
    import enum

    class Colour(enum.IntEnum):
        RED = 1

    loop: list[Any] = []
    loop.append(loop)
    for bad in (object(), Colour.RED, lambda: 0, loop):
        with pytest.raises(UnsupportedState, match="root/a/0"):
            encode_state({"a": [bad]}, "root", {})
    for hostile in (
        {"t": "os.system", "v": "x"},
        {"t": "numpy", "d": "O", "v": ""},
        {"v": 1},
        {"t": "dict", "v": [1]},
    ):
        with pytest.raises(CorruptCheckpoint):
            decode_state(hostile, {}.__getitem__)


def test_attempt_paths_cannot_leave_their_place(tmp_path: Path) -> None:
    """The path names job, life, timeline and attempt; a hostile job name is refused."""
    manifest = save({"w": torch.ones(2)}, tmp_path)
    assert attempt_path(manifest) == "j/u/t1/s1-r1-a"
    with pytest.raises(CorruptCheckpoint):
        attempt_path(msgspec.structs.replace(manifest, job=".."))


def test_checksums_combine() -> None:
    """The CRC of a whole is computed from those of its parts; the value of the published check string
    is right.
    """
    data = os.urandom(1000)
    parts = [data[:1], data[1:700], data[700:]]
    assert combine_crcs([(crc64nvme(p), len(p)) for p in parts]) == crc64nvme(data)
    assert digest_bytes(b"123456789") == "crc64nvme:ae8b14860a799888"


# -- local tier


def test_local_tier_names_lists_and_removes(tmp_path: Path) -> None:
    """Attempts are listed with their records, leftovers apart; removal takes one attempt and nothing else."""
    tier = LocalTier(tmp_path / "root")
    tier.prepare()
    for name in ("s1-r1-a", "s2-r2-b"):
        tier.create(f"job/uid/t1/{name}")
        tier.write_json(f"job/uid/t1/{name}/manifest.json", b"{}")
    tier.write_json("job/uid/t1/s1-r1-a/committed.json", b"{}")
    tier.write_json("job/uid/t1/s1-r1-a/committed.json", b"{}")
    with pytest.raises(Conflict):
        tier.write_json("job/uid/t1/s1-r1-a/committed.json", b"{1}")
    assert list(tier.committed()) == [("job/uid/t1/s1-r1-a", b"{}")]
    assert list(tier.leftovers("job/uid")) == ["job/uid/t1/s2-r2-b"]
    tier.remove("job/uid/t1/s2-r2-b")
    tier.remove("job/uid/t1/s2-r2-b")
    assert list(tier.attempts()) == ["job/uid/t1/s1-r1-a"]
    for bad in ("job", "../x/y/z", "/a/b/c"):
        with pytest.raises((ValueError, SlackwaterError)):
            tier.remove(bad)
    with pytest.raises(NotFound):
        tier.read_json("job/uid/t1/none/manifest.json")


def test_local_tier_follows_no_link(tmp_path: Path) -> None:
    """A symbolic link inside the tier is corrupt, never followed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "job").symlink_to(tmp_path / "out")
    with pytest.raises(CorruptCheckpoint, match="symbolic link"):
        LocalTier(tmp_path / "root").create("job/uid/t1/s")
    assert list((tmp_path / "out").iterdir()) == []


def test_unwritable_and_full_directories_have_one_clear_line(tmp_path: Path) -> None:
    """A root that is a file, a full disk, and too little space each say so."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write"):
        LocalTier(tmp_path / "file").prepare()
    with pytest.raises(NoSpace, match="full"):
        LocalTier(tmp_path / "a", Recorder("write")).prepare()
    with pytest.raises(NoSpace, match="needs"):
        LocalTier(tmp_path / "a").prepare(1 << 60)


def test_small_file_is_atomic(tmp_path: Path) -> None:
    """A failed replacement leaves the old content and no temporary file."""
    target = tmp_path / "m.json"
    write_small_file(target, b"old")
    with pytest.raises(StoreError):
        write_small_file(target, b"new", replace=True, files=Recorder("sync", errno.EIO))
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
