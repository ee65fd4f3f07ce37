"""Plan the bytes of safetensors files: header, order, offsets, splits. Pure; knows no tensor library.

Every header is padded with spaces to a multiple of 4096, so that data starts aligned and direct writes
need no
copy. Inside a file items lie by falling alignment, so that each starts at a multiple of its element size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UnsupportedState

__all__ = ["ALIGN_BYTES", "FileLayout", "Item", "Layout", "Slot", "plan_layout"]

ALIGN_BYTES = 4096
HEADER_LIMIT_BYTES = 64_000_000  # readers refuse headers above 100 MB
FILE_LIMIT_BYTES = 4 << 30
_RESERVED_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class Item:
    """One array to store: safetensors `tag` (as in BF16), stored shape, bytes, size of one element."""

    key: str
    tag: str
    shape: tuple[int, ...]
    size_bytes: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where item number `index` lies: `offset` counts from the beginning of the arena."""

    index: int
    key: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file: it occupies `size_bytes` of the arena from `start`, a multiple of 4096, beginning with
    `header`.
    """

    name: str
    start: int
    header: bytes
    size_bytes: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All files of one rank, and the size of the arena that holds them back to back."""

    files: tuple[FileLayout, ...]
    arena_bytes: int


def plan_layout(
    items: Sequence[Item],
    prefix: str,
    *,
    file_limit_bytes: int = FILE_LIMIT_BYTES,
    header_limit_bytes: int = HEADER_LIMIT_BYTES,
) -> Layout:
    """Lay `items` out into files `<prefix>-000.safetensors`, … The order of `items` decides which go
    together.

    An item above `file_limit_bytes` gets a file of its own. Keys are made unique and never `__metadata__`.
    """
    files = []
    start = 0
    for number, group in enumerate(_split(items, file_limit_bytes, header_limit_bytes)):
        laid = _lay_file(f"{prefix}-{number:03d}.safetensors", start, items, group)
        if len(laid.header) > 100_000_000:
            raise UnsupportedState(
                f"{laid.name}: a header of {len(laid.header)} bytes", items[group[0]].key[:200]
            )
        files.append(laid)
        start += _padded(laid.size_bytes)
    return Layout(tuple(files), start)


def _split(items: Sequence[Item], file_limit: int, header_limit: int) -> list[list[int]]:
    groups: list[list[int]] = []
    data = header = 0
    for index, item in enumerate(items):
        cost = len(item.key.encode()) * 2 + 160 + 20 * len(item.shape)
        if not groups or data + item.size_bytes > file_limit or header + cost > header_limit:
            groups.append([])
            data = header = 0
        groups[-1].append(index)
        data += item.size_bytes
        header += cost
    return groups


def _lay_file(name: str, start: int, items: Sequence[Item], group: list[int]) -> FileLayout:
    order = sorted(group, key=lambda index: -(items[index].element_bytes & -items[index].element_bytes))
    used = {_RESERVED_KEY}
    described: dict[str, object] = {_RESERVED_KEY: {"format": "pt", "writer": "slackwater"}}
    placed = []
    offset = 0
    for index in order:
        item = items[index]
        key, count = item.key, 0
        while key in used:
            count += 1
            key = f"{item.key}~{count}"
        used.add(key)
        end = offset + item.size_bytes
        described[key] = {"dtype": item.tag, "shape": item.shape, "data_offsets": (offset, end)}
        placed.append((index, key, offset, item.size_bytes))
        offset = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    length = _padded(8 + len(text)) - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    base = start + len(header)
    slots = tuple(Slot(index, key, base + at, size) for index, key, at, size in placed)
    return FileLayout(name, start, header, len(header) + offset, slots)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
