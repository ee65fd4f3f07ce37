"""A checkpoint directory to the object store and back."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from slackwater.backends.embedded import S3Server
from slackwater.backends.s3 import S3Settings, S3Store
from slackwater.engine.errors import Conflict, CorruptCheckpoint, NotFound
from slackwater.engine.fetch import TieredSources
from slackwater.engine.manifest import (
    Header,
    Manifest,
    VersionVector,
    decode_manifest,
    encode_json,
    manifest_digest,
    merge_manifest,
)
from slackwater.engine.pieces import Piece
from slackwater.engine.reader import CheckpointReader
from slackwater.engine.snapshot import Snapshotter
from slackwater.engine.upload import publish_committed, upload_checkpoint


@pytest.fixture
def store(s3: S3Server) -> S3Store:
    settings = S3Settings(
        bucket=s3.bucket,
        prefix=f"t-{uuid.uuid4().hex[:8]}",
        endpoint_url=s3.url,
        access_key=s3.access_key,
        secret_key=s3.secret_key,
    )
    return S3Store(settings)


def save(directory: Path) -> tuple[torch.Tensor, Manifest]:
    w = torch.randn(9 << 20)
    snapshotter = Snapshotter(file_limit_bytes=20 << 20)
    part = snapshotter.stage([Piece.of("a", w), Piece.of("b", w[1:10])]).write_part(directory)
    snapshotter.close()
    vector = VersionVector(training_step=1, weight_version=1, buffer_version=0)
    head = Header(job="j", job_uid="u", timeline=1, round=1, attempt="a", world_size=1, vector=vector)
    manifest = merge_manifest(head, [part])
    (directory / "manifest.json").write_bytes(encode_json(manifest))
    return w, manifest


def test_data_first_then_manifest_then_record_and_again(store: S3Store, tmp_path: Path) -> None:
    """All files land verified before the manifest, the record is last; a repetition sends nothing and
    succeeds.
    """
    _, manifest = save(tmp_path)
    digest = manifest_digest(encode_json(manifest))
    order: list[str] = []
    real = store.put
    store.put = lambda key, body, **kw: (order.append(key), real(key, body, **kw))[1]  # type: ignore[method-assign]
    seen: list[tuple[int, int]] = []
    upload_checkpoint(store, tmp_path, "c", digest, lambda sent, total: seen.append((sent, total)))
    publish_committed(store, "c", b"{}")
    assert order == ["c/manifest.json", "c/committed.json"]
    assert seen[-1][0] == seen[-1][1] == sum(f.size_bytes for f in manifest.files)
    names = {info.key for info in store.list("c/")}
    assert names == {"c/manifest.json", "c/committed.json", *(f"c/{f.path}" for f in manifest.files)}
    upload_checkpoint(store, tmp_path, "c", digest)
    publish_committed(store, "c", b"{}")
    with pytest.raises(Conflict):
        publish_committed(store, "c", b"{other}")
    with pytest.raises(CorruptCheckpoint):
        upload_checkpoint(store, tmp_path, "d", "sha256:" + "0" * 64)


def test_no_manifest_when_a_file_of_another_host_is_missing(store: S3Store, tmp_path: Path) -> None:
    """Files that another host uploads must be there, or the manifest is not put."""
    _, manifest = save(tmp_path)
    digest = manifest_digest(encode_json(manifest))
    with pytest.raises(NotFound):
        upload_checkpoint(store, tmp_path, "c", digest, own_files=lambda entry: "000" in entry.path[7:])
    assert store.head("c/manifest.json") is None


def test_T6_each_file_from_the_tier_that_has_a_good_copy(store: S3Store, tmp_path: Path) -> None:
    """A flipped bit locally, a zero-length file or a missing one is replaced by the copy in the store,
    per file.
    """
    local, cache = tmp_path / "local", tmp_path / "cache"
    local.mkdir()
    w, manifest = save(local)
    manifest = decode_manifest(encode_json(manifest))
    upload_checkpoint(store, local, "c", manifest_digest(encode_json(manifest)))
    first, second = (local / entry.path for entry in manifest.files)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with CheckpointReader(manifest, TieredSources(local, store, "c", cache)) as reader:
        assert torch.equal(reader.read("a"), w)
        assert torch.equal(reader.read("b"), w[1:10])
        assert reader.used[manifest.files[0].path].startswith("remote; local: ")
        assert reader.used[manifest.files[1].path] == "local"
    second.write_bytes(b"")
    store.put(f"c/{manifest.files[1].path}", b"other")
    with (
        CheckpointReader(manifest, TieredSources(local, store, "c", cache)) as reader,
        pytest.raises(CorruptCheckpoint, match="no good copy"),
    ):
        reader.read("b")
