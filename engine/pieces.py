"""A piece is one rank's part of one tensor; this file says in which form its bytes are stored and how
they come back.

What safetensors cannot hold is packed as raw bytes and named so; what has no bytes of its own (meta, sparse,
quantised) is refused by name before anything is staged. Values are never cast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import CorruptCheckpoint, UnsupportedState
from .layout import Item

__all__ = ["Form", "Piece", "distinct", "dtype_name", "dtype_of", "form_of", "unpack"]

_TAGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_COPYABLE = frozenset({torch.complex128})  # packed, but torch can still copy strided ones
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor that fills the box of its own shape at `offsets` of a global tensor of `shape`.

    `tensor` is never a DTensor: a sharded tensor comes as its local part.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Piece:
        """A piece that is a whole tensor."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@dataclass(frozen=True, slots=True)
class Form:
    """How a piece is stored: safetensors tag and shape, and the packing note of `ShardEntry`."""

    item: Item
    packing: str


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name, without the prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a recorded name; `CorruptCheckpoint` when this torch does not know it."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise CorruptCheckpoint(f"unknown dtype {name[:80]!r}") from None


def form_of(piece: Piece) -> Form:
    """Decide the stored form, or raise `UnsupportedState` naming the tensor."""
    tensor, name = piece.tensor, piece.name
    if tensor.is_meta:
        raise UnsupportedState(f"{name}: a meta tensor has no values to save", name)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedState(f"{name}: {tensor.layout} / quantised tensors cannot be stored", name)
    packing, source = "", tensor
    if not tensor.is_contiguous() and tensor.numel() and 0 in tensor.stride():
        source = distinct(tensor)
        packing = "expand" if source.shape != tensor.shape else ""
    size_bytes = source.numel() * source.element_size()
    if tensor.dtype in _TAGS:
        tag, shape = _TAGS[tensor.dtype], tuple(source.shape)
    elif packing or (not tensor.is_contiguous() and tensor.dtype not in _COPYABLE):
        raise UnsupportedState(f"{name}: a non-contiguous tensor of {tensor.dtype} cannot be stored", name)
    else:
        packing, tag, shape = "raw", "U8", (size_bytes,)
    return Form(Item(name, tag, shape, size_bytes, source.element_size()), packing)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The values of an expanded tensor without their repetitions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def unpack(
    data: memoryview, dtype: torch.dtype, lengths: Sequence[int], packing: str, stored: Sequence[int]
) -> torch.Tensor:
    """The tensor in `data`, without a copy where the bytes allow it; read-only by convention.

    Raises `CorruptCheckpoint` when the bytes do not fit the shape.
    """
    shape = tuple(stored) if packing == "expand" else tuple(lengths)
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for length in shape:
        count *= length
    if count * element_bytes != len(data):
        raise CorruptCheckpoint(f"{len(data)} bytes cannot be {dtype} of shape {shape}")
    if not count:
        return torch.empty(tuple(lengths), dtype=dtype)
    if packing == "raw" or ctypes.addressof(ctypes.c_char.from_buffer(data)) % element_bytes:
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
    else:
        tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
    if packing == "expand":
        try:
            tensor = tensor.expand(tuple(lengths))
        except RuntimeError as error:
            raise CorruptCheckpoint(f"{shape} does not expand to {tuple(lengths)}") from error
    return tensor
