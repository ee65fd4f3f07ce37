"""Lets torchvision's CUDA wheel be imported beside a CPU torch.

Its compiled part cannot load there, and the import then stops at operators that this part would have
registered. Python runs this file at start-up; it declares them just before torchvision is first imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = (
    "nms",
    "qnms",
    "_deform_conv2d_backward",
    "_ps_roi_align_backward",
    "_ps_roi_pool_backward",
    "_roi_align_backward",
    "_roi_pool_backward",
    "deform_conv2d",
    "ps_roi_align",
    "ps_roi_pool",
    "qroi_align",
    "roi_align",
    "roi_pool",
)


class _DeclareFirst:
    """A finder that finds nothing: it only acts when torchvision is about to be looked for."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in OPERATORS:
                torch.library.define(f"torchvision::{operator}", "(Tensor a) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareFirst())
