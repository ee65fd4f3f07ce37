"""The first rows of an image's tensors, to compare with what an engine says that it holds. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROWS", "first_rows", "is_other", "sample_names"]

ROWS = 2  # of each tensor
_SAMPLE = 64
_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}

Floats = NDArray[np.float32]
Entry = tuple[Path, int, dict[str, Any]]


def sample_names(image: Path) -> dict[str, Entry]:
    """At most 64 tensors of a verified image, spread evenly over their names; where each lies."""
    found: dict[str, Entry] = {}
    for path in sorted(image.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {n: (path, 8 + length, e) for n, e in header.items() if e["dtype"] in _WIDTHS and e["shape"]}
    names = sorted(found)
    step = max(1, -(-len(names) // _SAMPLE))
    return {name: found[name] for name in names[::step]}


def first_rows(entry: Entry) -> Floats:
    """The first two rows of a tensor as float32 (exact for all three dtypes)."""
    path, start, spec = entry
    shape = [min(ROWS, spec["shape"][0]), *spec["shape"][1:]]
    count = int(np.prod(shape))
    with path.open("rb") as file:
        file.seek(start + spec["data_offsets"][0])
        raw = file.read(count * _WIDTHS[spec["dtype"]])
    if spec["dtype"] == "BF16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(raw, "<f2" if spec["dtype"] == "F16" else "<f4").astype(np.float32).reshape(shape)


def is_other(said: Any, expected: Floats) -> bool:
    """Whether an engine's answer holds other values; an answer of another shape (sharded, fused) says nothing.

    An engine may run in a narrower dtype than the image's: values rounded to it count as the same.
    """
    try:
        got = np.asarray(said, dtype=np.float32)
    except (ValueError, TypeError):
        return False
    if got.shape != expected.shape:
        return False
    bits = expected.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        half = expected.astype(np.float16).astype(np.float32)
    return not any(np.array_equal(got, same, equal_nan=True) for same in (expected, rounded, half))
