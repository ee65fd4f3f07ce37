"""One resumable upload of one file: parts with their own checksum, sent without copying, journalled as
they arrive.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.digest import base64_of_crc, combine_crcs, crc64nvme, parse_crc
from ..engine.errors import CorruptCheckpoint
from ..engine.manifest import FileEntry
from .s3errors import code_of

if TYPE_CHECKING:
    from .s3 import S3Store

__all__ = ["Body", "Multipart"]

_MAX_PARTS = 10_000
_SMALL_BYTES = 5 << 20


class Body(io.RawIOBase):
    """A seekable file over a memoryview, which botocore sends without a copy of the whole."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def read(self, size: int | None = -1) -> memoryview:
        """The next `size` bytes as a view."""
        end = len(self._view) if size is None or size < 0 else min(self._at + size, len(self._view))
        piece = self._view[self._at : end]
        self._at = end
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; botocore rewinds for a retry."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at


class Multipart:
    """Upload `path` to `key` of `store`; call `run` once."""

    def __init__(
        self, store: S3Store, key: str, path: Path, entry: FileEntry, progress: Callable[[int], None]
    ) -> None:
        self._store, self._key, self._path, self._entry = store, key, path, entry
        self._progress = progress
        self._journal = path.with_name(path.name + ".upload")
        self._lock = threading.Lock()
        self._done: dict[int, dict[str, Any]] = {}
        wanted = max(store.settings.part_bytes, -(-entry.size_bytes // _MAX_PARTS), _SMALL_BYTES)
        self._part_bytes = -(-wanted // entry.chunk_bytes) * entry.chunk_bytes

    def run(self) -> None:
        """Send what is missing and complete the upload. botocore's errors pass through."""
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != self._entry.size_bytes:
                raise CorruptCheckpoint(f"{self._path}: its size is not the recorded one", self._entry.path)
            if self._entry.size_bytes <= self._part_bytes:
                self._put_whole(file.read())
            else:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                    self._send(view)
        self._journal.unlink(missing_ok=True)

    def _put_whole(self, data: bytes) -> None:
        checksum = base64_of_crc(self._crc_of_part(memoryview(data), 0))
        self._store.client.put_object(**self._store.where(self._key), Body=data, ChecksumCRC64NVME=checksum)
        self._progress(len(data))

    def _send(self, view: memoryview) -> None:
        upload_id = self._resume() or self._begin()
        count = -(-self._entry.size_bytes // self._part_bytes)
        for number, part in self._done.items():
            self._progress(self._length(number))
            part["PartNumber"] = number
        missing = [number for number in range(1, count + 1) if number not in self._done]
        with ThreadPoolExecutor(self._store.settings.workers, thread_name_prefix="slackwater-upload") as pool:
            futures = [pool.submit(self._send_part, upload_id, number, view) for number in missing]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((f for f in done if f.exception() is not None), None)
            if failed is not None:
                for future in futures:
                    future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result()
        self._complete(upload_id, [self._done[number] for number in range(1, count + 1)])

    def _length(self, number: int) -> int:
        return min(self._part_bytes, self._entry.size_bytes - (number - 1) * self._part_bytes)

    def _send_part(self, upload_id: str, number: int, view: memoryview) -> None:
        start = (number - 1) * self._part_bytes
        checksum = ""
        with view[start : start + self._length(number)] as part:
            checksum = base64_of_crc(self._crc_of_part(part, start))
            answer = self._store.client.upload_part(
                **self._store.where(self._key),
                UploadId=upload_id,
                PartNumber=number,
                Body=Body(part),  # type: ignore[arg-type]  # it has all that botocore asks for
                ContentLength=self._length(number),
                ChecksumCRC64NVME=checksum,
            )
        record = {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC64NVME": checksum}
        with self._lock:
            self._done[number] = record
            self._append(record)
        self._progress(self._length(number))

    def _crc_of_part(self, part: memoryview, start: int) -> int:
        """The recorded checksum, from the pass that wrote the file: a bit that flipped since is
        refused by the store.
        """
        if not self._entry.chunks:
            return crc64nvme(part)
        first = start // self._entry.chunk_bytes
        pieces = []
        for at in range(0, len(part), self._entry.chunk_bytes):
            crc = parse_crc("crc64nvme:" + self._entry.chunks[first + at // self._entry.chunk_bytes])
            pieces.append((crc, min(self._entry.chunk_bytes, len(part) - at)))
        return combine_crcs(pieces)

    def _begin(self) -> str:
        where = self._store.where(self._key)
        try:
            answer = self._store.client.create_multipart_upload(
                **where, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )
        except self._store.client.exceptions.ClientError as error:
            if code_of(error) not in ("InvalidArgument", "InvalidRequest", "NotImplemented"):
                raise
            answer = self._store.client.create_multipart_upload(**where)  # an older store without the type
        self._done = {}
        self._journal.write_text(
            json.dumps(
                {"upload_id": answer["UploadId"], "part_bytes": self._part_bytes, **where, **self._name()}
            )
            + "\n"
        )
        return answer["UploadId"]

    def _name(self) -> dict[str, Any]:
        return {"digest": self._entry.digest, "size_bytes": self._entry.size_bytes}

    def _append(self, record: dict[str, Any]) -> None:
        with self._journal.open("a") as journal:
            journal.write(json.dumps(record) + "\n")

    def _resume(self) -> str | None:
        """The open upload that the journal names, with the parts that both sides know to be equal."""
        lines = self._read_journal()
        expected = {"part_bytes": self._part_bytes, **self._store.where(self._key), **self._name()}
        if not lines or any(lines[0].get(name) != value for name, value in expected.items()):
            return None
        upload_id = str(lines[0].get("upload_id"))
        ours = {line.get("PartNumber"): line for line in lines[1:]}
        try:
            pages = self._store.client.get_paginator("list_parts").paginate(
                **self._store.where(self._key), UploadId=upload_id
            )
            for page in pages:
                for part in page.get("Parts", ()):
                    number = part["PartNumber"]
                    mine = ours.get(number)
                    same = mine is not None and mine["ETag"] == part["ETag"]
                    if mine is not None and same and part["Size"] == self._length(number):
                        self._done[number] = mine
        except self._store.client.exceptions.ClientError as error:
            if code_of(error) not in ("NoSuchUpload", "404"):
                raise
            self._done = {}
            return None
        return upload_id

    def _read_journal(self) -> list[dict[str, Any]]:
        lines = []
        with contextlib.suppress(OSError, ValueError):  # a torn last line: the part counts as not sent
            for line in self._journal.read_text().splitlines():
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    def _complete(self, upload_id: str, parts: list[dict[str, Any]]) -> None:
        where = self._store.where(self._key)
        whole: dict[str, Any] = {}
        completed: Any = {"Parts": parts}
        if self._entry.digest.startswith("crc64nvme:"):
            whole = {
                "ChecksumCRC64NVME": base64_of_crc(parse_crc(self._entry.digest)),
                "ChecksumType": "FULL_OBJECT",
            }
        try:
            self._store.client.complete_multipart_upload(
                **where,
                UploadId=upload_id,
                MultipartUpload=completed,
                **whole,
            )
        except self._store.client.exceptions.ClientError as error:
            if code_of(error) in ("NoSuchUpload", "404") and self._store.head(self._key) is not None:
                return  # completed by a call whose reply was lost; the caller verifies the object
            if code_of(error) in (
                "BadDigest",
                "InvalidPart",
                "InvalidPartOrder",
                "XAmzContentChecksumMismatch",
            ):
                self._abort(upload_id)
            raise

    def _abort(self, upload_id: str) -> None:
        self._journal.unlink(missing_ok=True)
        with contextlib.suppress(self._store.client.exceptions.ClientError):
            self._store.client.abort_multipart_upload(**self._store.where(self._key), UploadId=upload_id)
