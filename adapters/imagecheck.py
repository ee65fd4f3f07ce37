"""Compares a weight image with the model that an engine serves, from safetensors headers alone (no torch)."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import CorruptCheckpoint, StateMismatch

__all__ = ["TensorSpec", "check_image", "read_config", "read_inventory"]

_MAX_HEADER_BYTES = 100 << 20
_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype in safetensors' spelling (`BF16`), and shape."""

    dtype: str
    shape: tuple[int, ...]


def read_inventory(directory: Path) -> dict[str, TensorSpec]:
    """Every tensor of a directory's safetensors files by name.

    Raises `CorruptCheckpoint` when there are none, a header is malformed, a file is shorter or longer than
    its header says, a name occurs twice, or an index names other files than there are.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise CorruptCheckpoint(f"{directory}: no safetensors file", str(directory))
    _check_index(directory, {path.name for path in paths})
    found: dict[str, TensorSpec] = {}
    for path in paths:
        for name, spec in _read_header(path).items():
            if name in found:
                raise CorruptCheckpoint(f"{path}: {name} is in two files", str(path))
            found[name] = spec
    return found


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory, {} when there is none. Raises `CorruptCheckpoint` when it is no object."""
    path = directory / "config.json"
    if not path.is_file():
        return {}
    return _json_object(path)


def check_image(image: Path, model: Path) -> None:
    """Raise `StateMismatch` or `CorruptCheckpoint` unless `image` has exactly the tensors of `model`.

    With tied embeddings the output head may be there or not, in either.
    """
    have, want = read_inventory(image), read_inventory(model)
    config, other = read_config(model), read_config(image)
    for key in ("architectures", "model_type"):
        if key in other and key in config and other[key] != config[key]:
            raise StateMismatch(
                f"{image}: {key} is {other[key]}, the engine serves {config[key]}", changed=[key]
            )
    if config.get("tie_word_embeddings"):
        have.pop(_TIED_HEAD, None)
        want.pop(_TIED_HEAD, None)
    missing = sorted(want.keys() - have.keys())
    unexpected = sorted(have.keys() - want.keys())
    changed = sorted(name for name in want.keys() & have.keys() if want[name] != have[name])
    if missing or unexpected or changed:
        raise StateMismatch(
            f"{image}: not what the engine serves: {len(missing)} tensors missing, "
            f"{len(unexpected)} unexpected, "
            f"{len(changed)} of another shape or dtype; first: {(missing + unexpected + changed)[0]}",
            missing=missing,
            unexpected=unexpected,
            changed=changed,
        )


def _read_header(path: Path) -> dict[str, TensorSpec]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptCheckpoint(f"{path}: no safetensors header, or a truncated one", str(path))
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        specs = {name: TensorSpec(e["dtype"], tuple(e["shape"])) for name, e in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptCheckpoint(f"{path}: malformed safetensors header", str(path)) from error
    if 8 + length + end != size:
        raise CorruptCheckpoint(
            f"{path}: {size} bytes, but its header describes {8 + length + end}: truncated?", str(path)
        )
    return specs


def _check_index(directory: Path, names: set[str]) -> None:
    path = directory / "model.safetensors.index.json"
    if not path.is_file():
        return
    listed = _json_object(path).get("weight_map")
    if not isinstance(listed, dict) or set(listed.values()) != names:
        raise CorruptCheckpoint(f"{path}: names other files than there are", str(path))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: not JSON", str(path)) from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: not a JSON object", str(path))
    return value
