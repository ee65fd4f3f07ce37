"""Digests of bytes: CRC64NVME, which is computed by the chunk and combined, and SHA-256 as a setting.

A digest is text: `crc64nvme:<16 hex digits>` or `sha256:<64 hex digits>`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from awscrt import checksums  # type: ignore[import-untyped]  # ships without types

__all__ = [
    "CHUNK_BYTES",
    "ZERO_CRC",
    "base64_of_crc",
    "combine_crcs",
    "crc64nvme",
    "crc_of_base64",
    "crc_text",
    "digest_bytes",
    "digest_file",
    "is_digest",
    "parse_crc",
    "sha256_text",
]

CHUNK_BYTES = 8 << 20
ZERO_CRC = 0
_DIGEST = re.compile(r"crc64nvme:[0-9a-f]{16}|sha256:[0-9a-f]{64}")


def crc64nvme(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """CRC64NVME of `data` after `previous`; the GIL is released for the computation."""
    return int(checksums.crc64nvme(data, previous))


def combine_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """CRC64NVME of a concatenation, from the (crc, length in bytes) of its pieces, without reading them."""
    whole = ZERO_CRC
    for crc, length in parts:
        whole = int(checksums.combine_crc64nvme(whole, crc, length))
    return whole


def crc_text(crc: int) -> str:
    """The manifest's form of a CRC64NVME."""
    return f"crc64nvme:{crc:016x}"


def parse_crc(text: str) -> int:
    """The number in a `crc64nvme:` digest; ValueError for anything else."""
    if not text.startswith("crc64nvme:") or not is_digest(text):
        raise ValueError(f"not a CRC64NVME digest: {text[:80]!r}")
    return int(text[10:], 16)


def is_digest(text: str) -> bool:
    """Whether `text` is a digest in one of the two forms."""
    return _DIGEST.fullmatch(text) is not None


def base64_of_crc(crc: int) -> str:
    """The form that S3 carries in its headers: base64 of eight big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def crc_of_base64(text: str) -> int:
    """The number in S3's base64 form; ValueError when it is not eight bytes."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) != 8:
        raise ValueError(f"not a CRC64NVME in base64: {text[:40]!r}")
    return int.from_bytes(raw, "big")


def sha256_text(data: bytes | memoryview) -> str:
    """`sha256:<hex>` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    """`crc64nvme:<hex>` of `data`."""
    return crc_text(crc64nvme(data))


def digest_file(path: Path, algorithm: str = "crc64nvme") -> tuple[int, str]:
    """Read a file once and return (size in bytes, digest). Raises OSError."""
    crc, size_bytes, sha = ZERO_CRC, 0, hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            piece = memoryview(buffer)[:count]
            size_bytes += count
            if algorithm == "sha256":
                sha.update(piece)
            else:
                crc = crc64nvme(piece, crc)
    return size_bytes, "sha256:" + sha.hexdigest() if algorithm == "sha256" else crc_text(crc)
