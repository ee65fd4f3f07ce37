"""Typed JSON for state that is not a tensor: what goes in comes out with the same types and bits.

Plain JSON stands for itself (None, bool, str, int, finite float, list). Everything else is an object of the
form `{"t": <type>, "v": <value>}`. Tensors are pulled out under a name and leave a reference. Anything
else is refused by its path: nothing is pickled. This module imports neither torch nor numpy by itself.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .errors import CorruptCheckpoint, UnsupportedState

__all__ = ["decode_state", "encode_state"]

_MAX_DEPTH = 60
_EXACT_INT = 1 << 53

Fetch = Callable[[str], Any]


def encode_state(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """Turn `value` into typed JSON; tensors found inside are added to `tensors` under names below `name`.

    Raises `UnsupportedState` naming the path of the first object that cannot be stored.
    """
    return _Encoder(tensors).encode(value, name, 0)


def decode_state(value: Any, fetch: Fetch, name: str = "state") -> Any:
    """Rebuild what `encode_state` was given; `fetch(tensor name)` returns the tensors.

    Raises `CorruptCheckpoint` for anything that `encode_state` does not write.
    """
    try:
        return _decode(value, fetch, 0)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, struct.error) as error:
        raise CorruptCheckpoint(f"{name}: not typed JSON: {error!r}", name) from error


class _Encoder:
    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise UnsupportedState(f"{path}: nested deeper than {_MAX_DEPTH} (or refers to itself)", path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text(value, path)
        if kind is int:
            return value if -_EXACT_INT <= value <= _EXACT_INT else {"t": "int", "v": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"t": "float", "v": struct.pack(">d", value).hex()}
        if kind is list:
            return self.items(value, path, depth)
        if kind in _SEQUENCES:
            return {"t": _SEQUENCES[kind], "v": self.items(value, path, depth)}
        if kind in (set, frozenset):
            return {"t": kind.__name__, "v": self.items(_ordered(value), path, depth)}
        if kind is dict or kind is OrderedDict:
            return self.mapping(value, path, depth)
        if kind in (bytes, bytearray):
            return {"t": kind.__name__, "v": base64.b64encode(value).decode()}
        if kind is complex:
            return {"t": "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}
        return self.foreign(value, path)

    def text(self, value: str, path: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsupportedState(f"{path}: a string that is not valid Unicode", path) from None
        return value

    def items(self, values: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}/{index}", depth + 1) for index, item in enumerate(values)]

    def mapping(self, value: Any, path: str, depth: int) -> Any:
        pairs = [
            [
                self.encode(key, f"{path}/<key>", depth + 1),
                self.encode(item, f"{path}/{_segment(key)}", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"t": type(value).__name__, "v": pairs}

    def foreign(self, value: Any, path: str) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                if type(value).__name__ == "Parameter":
                    value = value.detach()
                return {"t": "tensor", "v": self.pull_out(value, path)}
            if isinstance(value, torch.dtype):
                return {"t": "torch.dtype", "v": str(value).removeprefix("torch.")}
            if isinstance(value, torch.device):
                return {"t": "torch.device", "v": str(value)}
            if type(value) is torch.Size:
                return {"t": "torch.Size", "v": list(value)}
        if numpy is not None:
            if type(value) is numpy.ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
                return {
                    "t": "ndarray",
                    "d": value.dtype.str,
                    "s": list(value.shape),
                    "v": self.array(value, path),
                }
            if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
                return {"t": "numpy", "d": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
        raise UnsupportedState(
            f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be stored without pickle; "
            "give it a state_dict of tensors, numbers, strings, lists and dicts",
            path,
        )

    def array(self, value: Any, path: str) -> Any:
        """A small array inline; a large one as a tensor of its bytes, when torch is there to hold it."""
        torch = sys.modules.get("torch")
        if torch is None or value.nbytes <= 4096:
            return base64.b64encode(value.tobytes()).decode()
        numpy = sys.modules["numpy"]
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        return {
            "tensor": self.pull_out(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), path)
        }

    def pull_out(self, tensor: Any, path: str) -> str:
        name, count = path, 0
        while name in self.tensors:
            count += 1
            name = f"{path}~{count}"
        self.tensors[name] = tensor
        return name


_SEQUENCES: dict[type, str] = {tuple: "tuple"}


def _segment(key: Any) -> str:
    return str(key).replace("/", "|") if isinstance(key, str | int | float | bool) else repr(key)


def _ordered(values: Any) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda item: (type(item).__name__, repr(item)))


def _decode(value: Any, fetch: Fetch, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_decode(item, fetch, depth + 1) for item in value]
    kind, inner = value["t"], value["v"]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
            _decode(item, fetch, depth + 1) for item in inner
        )
    if kind in ("dict", "OrderedDict"):
        made: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
        for key, item in inner:
            made[_decode(key, fetch, depth + 1)] = _decode(item, fetch, depth + 1)
        return made
    if kind == "tensor":
        return fetch(_str(inner))
    return _decode_scalar(kind, inner, value, fetch)


def _decode_scalar(kind: str, inner: Any, value: dict[str, Any], fetch: Fetch) -> Any:
    if kind == "int":
        if len(_str(inner)) > 4000:
            raise ValueError("integer too long")
        return int(inner)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(_str(inner)))[0]
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(_str(inner))))
    if kind in ("bytes", "bytearray"):
        raw = base64.b64decode(_str(inner), validate=True)
        return raw if kind == "bytes" else bytearray(raw)
    if kind == "numpy":
        import numpy

        return numpy.frombuffer(base64.b64decode(_str(inner), validate=True), dtype=_numpy_dtype(value))[0]
    if kind == "ndarray":
        return _decode_array(inner, value, fetch)
    if kind.startswith("torch."):
        return _decode_torch(kind, inner)
    raise ValueError(f"unknown type {kind!r}")


def _decode_array(inner: Any, value: dict[str, Any], fetch: Fetch) -> Any:
    import numpy

    if isinstance(inner, dict):
        raw = fetch(_str(inner["tensor"])).numpy().tobytes()
    else:
        raw = base64.b64decode(_str(inner), validate=True)
    return numpy.frombuffer(raw, dtype=_numpy_dtype(value)).reshape([int(n) for n in value["s"]]).copy()


def _decode_torch(kind: str, inner: Any) -> Any:
    import torch

    if kind == "torch.Size":
        return torch.Size([int(n) for n in inner])
    if kind == "torch.device":
        return torch.device(_str(inner))
    found = getattr(torch, _str(inner), None) if kind == "torch.dtype" else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown {kind} {inner!r}")
    return found


def _numpy_dtype(value: dict[str, Any]) -> Any:
    import numpy

    dtype = numpy.dtype(_str(value["d"]))
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {dtype} is not a number")
    return dtype


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value
