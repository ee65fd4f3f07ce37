"""A published weight image: a model directory in Hugging Face's layout, and `image.json`, written last, which
names every file with its digest and every tensor with its shape. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .digest import digest_file, is_digest
from .errors import CorruptCheckpoint
from .manifest import MAX_DIMENSIONS, FileEntry, check_path, decode_json, encode_json, manifest_digest

__all__ = ["IMAGE_NAME", "Image", "ImageRecord", "ImageTensor", "decode_image", "read_image", "verify_image"]

IMAGE_NAME = "image.json"
FORMAT_VERSION = 1
MAX_IMAGE_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000
_TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


class ImageTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One whole tensor of an image, stored under its own name. `dtype` is torch's name, as in `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


class Image(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`image.json`: files sorted by path, tensors by name. `info` is for people (step, version, who)."""

    format_version: int = FORMAT_VERSION
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[ImageTensor, ...] = ()
    info: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """What a publication says about an image: the sha256 of its `image.json`, and the bytes of its files."""

    image: Image
    digest: str
    size_bytes: int

    @classmethod
    def of(cls, image: Image) -> ImageRecord:
        """The record of an image; the digest is that of the bytes that are written."""
        return cls(image, manifest_digest(encode_json(image)), sum(file.size_bytes for file in image.files))


def decode_image(data: bytes, what: str = IMAGE_NAME) -> Image:
    """Decode and check a hostile `image.json`: version, bounds, paths, digests, that tensors name files."""
    image: Image = decode_json(data, Image, what, MAX_IMAGE_BYTES)
    if image.format_version != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{what}: format_version {image.format_version}; this program reads {FORMAT_VERSION}", what
        )
    paths = _unique((check_path(file.path, what) for file in image.files), what)
    for file in image.files:
        if file.size_bytes < 0 or not is_digest(file.digest) or file.path == IMAGE_NAME:
            raise CorruptCheckpoint(f"{what}: a malformed entry for {file.path!r}", what)
    _unique((tensor.name for tensor in image.tensors), what)
    for tensor in image.tensors:
        bad = len(tensor.shape) > MAX_DIMENSIONS or any(size < 0 for size in tensor.shape)
        if bad or tensor.file not in paths or tensor.dtype not in _TAGS:
            raise CorruptCheckpoint(f"{what}: a malformed entry for {tensor.name[:200]!r}", what)
    return image


def read_image(directory: Path) -> tuple[Image, str]:
    """`image.json` of a directory and its digest, not yet compared with the files. `CorruptCheckpoint`."""
    path = directory / IMAGE_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror}", str(path)) from error
    return decode_image(data, str(path)), manifest_digest(data)


def verify_image(directory: Path, digest: str = "") -> Image:
    """Read every file once and return the image; `CorruptCheckpoint` names what differs.

    Checked: sizes, digests, that the safetensors headers describe exactly the listed tensors, that no other
    safetensors file lies there (servers load all that they find), and `digest` of image.json, when given.
    """
    image, found = read_image(directory)
    if digest and found != digest:
        raise CorruptCheckpoint(f"{directory / IMAGE_NAME}: digest {found}, recorded {digest}", IMAGE_NAME)
    for file in image.files:
        _verify_file(directory / file.path, file)
    listed = {file.path for file in image.files if file.path.endswith(".safetensors")}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in listed:
            raise CorruptCheckpoint(f"{path}: not part of the image", path.name)
    for name in sorted(listed):
        expected = {t.name: (_TAGS[t.dtype], tuple(t.shape)) for t in image.tensors if t.file == name}
        if _header(directory / name) != expected:
            raise CorruptCheckpoint(f"{directory / name}: its header lists other tensors", name)
    return image


def _verify_file(path: Path, entry: FileEntry) -> None:
    if path.is_symlink():
        raise CorruptCheckpoint(f"{path}: a symbolic link", entry.path)
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CorruptCheckpoint(f"{path}: {size} bytes, recorded {entry.size_bytes}", entry.path)
        _, digest = digest_file(path, entry.digest.partition(":")[0])
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: unreadable: {error.strerror}", entry.path) from error
    if digest != entry.digest:
        raise CorruptCheckpoint(f"{path}: digest {digest}, recorded {entry.digest}", entry.path)


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise CorruptCheckpoint(f"{path}: a header of {length} bytes", path.name)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: no safetensors header", path.name) from error


def _unique(names: Iterable[str], what: str) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CorruptCheckpoint(f"{what}: {name[:200]!r} occurs twice", what)
        seen.add(name)
    return seen
