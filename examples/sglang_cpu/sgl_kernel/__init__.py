"""Stand-in for SGLang's compiled kernels, of which no CPU wheel is published.

The plain-torch path of the server needs one of them, written here in Python. Any other name resolves to a
function that refuses when it is called, so that a missing kernel says which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    pool_len: int,  # noqa: ARG001  part of the kernel's signature
) -> None:
    """Copy each request's next slice of `out`, in order, to `req_to_token[request, start:end]`."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    return missing
