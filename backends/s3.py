"""S3-compatible storage through boto3: small objects, ranged reads, and files in resumable multipart uploads.

Every body carries our own CRC64NVME, computed when the file was written; ETags are opaque and never
compared with a
hash. Settings were measured for client CPU: no payload signing, checksums only where we give them,
path addressing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from ..engine.digest import base64_of_crc, crc64nvme, crc_of_base64, crc_text
from ..engine.errors import Conflict, CorruptCheckpoint, NotFound, StoreError, Unavailable
from ..engine.manifest import FileEntry
from ..engine.ports import ObjectInfo
from .s3errors import code_of, named_errors
from .s3multipart import Multipart

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Settings", "S3Store"]


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Settings:
    """Where the bucket is and how to talk to it. Without keys boto3's default chain finds (and
    refreshes) them.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str = "us-east-1"
    access_key: str | None = None
    secret_key: str | None = None
    ca_file: Path | None = None
    sign_payload: bool = False
    part_bytes: int = 16 << 20
    workers: int = 4
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    attempts: int = 5


class S3Store:
    """`ObjectStore` on one prefix of one bucket. Thread-safe; the constructor does no I/O. Close it at
    the end.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._prefix = settings.prefix.strip("/") + "/" if settings.prefix.strip("/") else ""
        self._lock = threading.Lock()

    @cached_property
    def client(self) -> S3Client:
        """The boto3 client, made at first use."""
        s = self.settings
        session = boto3.session.Session(
            aws_access_key_id=s.access_key, aws_secret_access_key=s.secret_key, region_name=s.region
        )
        config = Config(
            s3={"addressing_style": "path", "payload_signing_enabled": s.sign_payload},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": s.attempts},
            connect_timeout=s.connect_timeout_seconds,
            read_timeout=s.read_timeout_seconds,
            max_pool_connections=2 * s.workers,
        )
        verify = str(s.ca_file) if s.ca_file is not None else None
        with self._lock, named_errors(f"s3://{s.bucket}"):
            return session.client("s3", endpoint_url=s.endpoint_url, config=config, verify=verify)

    def name(self, key: str) -> str:
        """What messages call an object."""
        at = f" at {self.settings.endpoint_url}" if self.settings.endpoint_url else ""
        return f"s3://{self.settings.bucket}/{self._prefix}{key}{at}"

    def where(self, key: str) -> dict[str, Any]:
        """Bucket and full key, as boto3 wants them."""
        return {"Bucket": self.settings.bucket, "Key": self._prefix + key}

    def probe(self) -> Sequence[str]:
        """See `ObjectStore.probe`. Writes and removes one small object."""
        with named_errors(f"bucket {self.name('')}"):
            try:
                self.client.head_bucket(Bucket=self.settings.bucket)
            except self.client.exceptions.ClientError as error:
                if code_of(error) == "404":
                    raise NotFound(
                        f"{self.name('')}: the bucket {self.settings.bucket!r} does not exist"
                    ) from error
                raise
        missing = []
        key = f".probe/{secrets.token_hex(8)}"
        try:
            self.put(key, b"first", if_absent=True)
            if self.get(key) != b"first":
                raise StoreError(f"{self.name(key)}: the store returns other bytes than were put")
            if not self._refuses_second_put(key):
                missing.append("conditional-put")
            if not self._refuses_wrong_checksum(key):
                missing.append("checksum")
            elif not (info := self.head(key)) or not info.checksum:
                missing.append("stored-checksum")
        finally:
            self.delete(key)
        return missing

    def _refuses_second_put(self, key: str) -> bool:
        try:
            self.put(key, b"second", if_absent=True)
        except Conflict:
            return True
        except StoreError:
            return False  # not implemented: said so with some other error
        return False

    def _refuses_wrong_checksum(self, key: str) -> bool:
        wrong = base64_of_crc(crc64nvme(b"body") ^ 1)
        try:
            with named_errors(self.name(key)):
                self.client.put_object(**self.where(key), Body=b"body", ChecksumCRC64NVME=wrong)
        except CorruptCheckpoint:
            return True
        except StoreError:
            return True  # refused in other words; the bytes did not land
        return False

    def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`. A 412 for our own earlier write (its reply was lost) is a success."""
        extra: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            with named_errors(self.name(key)):
                self.client.put_object(
                    **self.where(key), Body=body, ChecksumCRC64NVME=base64_of_crc(crc64nvme(body)), **extra
                )
        except Conflict:
            if self.get(key) != body:
                raise

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`. A short answer is `Unavailable`, after boto3's own retries."""
        if length == 0:
            return b""
        extra: dict[str, Any] = {}
        if offset or length is not None:
            extra["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with named_errors(self.name(key)):
            answer = self.client.get_object(**self.where(key), **extra)
            with answer["Body"] as body:
                data: bytes = body.read()
        if length is not None and len(data) != length:
            raise Unavailable(f"{self.name(key)}: {len(data)} bytes came instead of {length}")
        return data

    def head(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.head`."""
        try:
            with named_errors(self.name(key)):
                answer = self.client.head_object(**self.where(key), ChecksumMode="ENABLED")
        except NotFound:
            return None
        stored = answer.get("ChecksumCRC64NVME", "")
        full = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        checksum = crc_text(crc_of_base64(stored)) if stored and full else ""
        return ObjectInfo(key, answer["ContentLength"], checksum)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. Listings carry no checksum."""
        with named_errors(self.name(prefix)):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.settings.bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for item in page.get("Contents", ()):
                    yield ObjectInfo(item["Key"][len(self._prefix) :], item["Size"])

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with named_errors(self.name(key)):
            self.client.delete_object(**self.where(key))

    def upload_file(
        self, key: str, path: Path, entry: FileEntry, progress: Callable[[int], None] | None = None
    ) -> ObjectInfo:
        """Store a file under a new key and verify it; resumes what an earlier, killed call left open.

        The journal lies beside the file (`<name>.upload`) and is removed at the end. `progress(bytes)`
        is called from
        worker threads. Raises `CorruptCheckpoint` when the bytes on disk are no longer those that were
        recorded.
        """
        info = self.head(key)
        if info is None or not self._is_same(info, entry):
            with named_errors(self.name(key)):
                Multipart(self, key, path, entry, progress or (lambda _bytes: None)).run()
        return self.verify(key, entry)

    def verify(self, key: str, entry: FileEntry) -> ObjectInfo:
        """Prove that the stored object is the recorded file: by the store's full-object checksum, else
        by reading.
        """
        info = self.head(key)
        if info is None:
            raise NotFound(f"{self.name(key)}: missing, or not permitted to be seen")
        if info.size_bytes != entry.size_bytes:
            raise CorruptCheckpoint(
                f"{self.name(key)}: {info.size_bytes} bytes, recorded {entry.size_bytes}", entry.path
            )
        if info.checksum and entry.digest.startswith("crc64nvme:"):
            found = info.checksum
        else:
            found = self._digest_by_reading(key, entry)
        if found != entry.digest:
            raise CorruptCheckpoint(f"{self.name(key)}: digest {found}, recorded {entry.digest}", entry.path)
        return ObjectInfo(key, info.size_bytes, found)

    def _is_same(self, info: ObjectInfo, entry: FileEntry) -> bool:
        return info.size_bytes == entry.size_bytes and (not info.checksum or info.checksum == entry.digest)

    def _digest_by_reading(self, key: str, entry: FileEntry) -> str:
        import hashlib

        sha, crc = hashlib.sha256(), 0
        for offset in range(0, entry.size_bytes, self.settings.part_bytes):
            data = self.get(key, offset, min(self.settings.part_bytes, entry.size_bytes - offset))
            if entry.digest.startswith("sha256:"):
                sha.update(data)
            else:
                crc = crc64nvme(data, crc)
        return "sha256:" + sha.hexdigest() if entry.digest.startswith("sha256:") else crc_text(crc)

    def close(self) -> None:
        """Release connections; idempotent."""
        if "client" in self.__dict__:
            self.client.close()
