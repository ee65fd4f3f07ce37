"""The object store against a real S3 server."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path

import pytest

from slackwater.backends.embedded import S3Server
from slackwater.backends.s3 import S3Settings, S3Store
from slackwater.backends.s3multipart import Multipart
from slackwater.engine.digest import digest_bytes
from slackwater.engine.errors import AuthFailed, Conflict, CorruptCheckpoint, NotFound, Unavailable
from slackwater.engine.manifest import FileEntry
from slackwater.engine.tensorfile import write_file


@pytest.fixture
def store(s3: S3Server) -> S3Store:
    settings = S3Settings(
        bucket=s3.bucket,
        prefix=f"t-{uuid.uuid4().hex[:8]}",
        endpoint_url=s3.url,
        access_key=s3.access_key,
        secret_key=s3.secret_key,
        part_bytes=8 << 20,
        attempts=2,
    )
    return S3Store(settings)


def write(directory: Path, size_bytes: int) -> tuple[bytes, FileEntry]:
    data = os.urandom(size_bytes)
    return data, write_file(directory, "x", memoryview(data), len(data))


def test_probe_of_a_full_store_misses_nothing_and_leaves_nothing(store: S3Store) -> None:
    """SeaweedFS has conditional puts and checksums; the probe's object is gone afterwards."""
    assert list(store.probe()) == []
    assert list(store.list("")) == []


def test_wrong_settings_have_named_errors(store: S3Store) -> None:
    """Wrong keys, bucket and address each give one line that says so."""
    wrong = dataclasses.replace
    with pytest.raises(AuthFailed, match="credentials"):
        S3Store(wrong(store.settings, secret_key="x")).probe()
    with pytest.raises(NotFound, match="'absent-bucket' does not exist"):
        S3Store(wrong(store.settings, bucket="absent-bucket")).probe()
    with pytest.raises(Unavailable, match="cannot be reached"):
        S3Store(wrong(store.settings, endpoint_url="http://127.0.0.1:9", attempts=1)).probe()


def test_conditional_put_recognises_its_own_write(store: S3Store) -> None:
    """The same bytes again are a success, others are a conflict."""
    store.put("m", b"one", if_absent=True)
    store.put("m", b"one", if_absent=True)
    with pytest.raises(Conflict):
        store.put("m", b"two", if_absent=True)
    assert store.get("m", 1, 2) == b"ne"


def test_S1_S9_multipart_is_verified_by_content(store: S3Store, tmp_path: Path) -> None:
    """Size, checksum and bytes of the stored object are the file's; the ETag plays no part."""
    data, entry = write(tmp_path, (20 << 20) + 17)
    seen: list[int] = []
    info = store.upload_file("k", tmp_path / "x", entry, seen.append)
    assert info.checksum == entry.digest == digest_bytes(data)
    assert store.get("k") == data
    assert sum(seen) == len(data)
    assert not (tmp_path / "x.upload").exists()


def test_upload_resumes_without_sending_again(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death in the middle the parts that arrived are not sent a second time."""
    data, entry = write(tmp_path, 40 << 20)
    one = S3Store(dataclasses.replace(store.settings, workers=1))
    real = Multipart._send_part
    sent: list[int] = []

    def dies(self: Multipart, upload_id: str, number: int, view: memoryview) -> None:
        if not alive and number == 4:
            raise RuntimeError("killed")
        sent.append(number)
        real(self, upload_id, number, view)

    alive: list[int] = []
    monkeypatch.setattr(Multipart, "_send_part", dies)
    with pytest.raises(RuntimeError):
        one.upload_file("k", tmp_path / "x", entry)
    alive.append(1)
    store.upload_file("k", tmp_path / "x", entry)
    assert sorted(sent) == [1, 2, 3, 4, 5]
    assert store.get("k") == data


def test_T6_flipped_bit_on_disk_is_refused_by_the_store(store: S3Store, tmp_path: Path) -> None:
    """Parts carry the checksums of the write pass, so a later change of the file cannot be uploaded as
    good.
    """
    data, entry = write(tmp_path, 9 << 20)
    broken = bytearray(data)
    broken[5] ^= 1
    (tmp_path / "x").write_bytes(broken)
    with pytest.raises(CorruptCheckpoint):
        store.upload_file("k", tmp_path / "x", entry)
    assert store.head("k") is None
