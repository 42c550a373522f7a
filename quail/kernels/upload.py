"""Arrays of a pass on their way to the device: all of them in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 64
"""Where each array starts in the copy: kernels read whole vectors from aligned addresses."""


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Tensors of arrays on a device.

    For CUDA they are laid side by side in pinned memory and copied at once, in the order of the stream; the
    allocator keeps the pinned memory until that copy is done. A CPU's tensors share the arrays' memory.

    Args:
        arrays: of any shapes and dtypes that torch has.
        device: where they are wanted.
    """
    if device.type == "cuda":
        return side_by_side(arrays, device, pinned=True)
    return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]


def side_by_side(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, *, pinned: bool
) -> list[torch.Tensor]:
    """The same in one copy; the tensors are views of one buffer.

    Args:
        arrays, device: as of `upload`.
        pinned: take memory that a device copies from without the host; needs CUDA.
    """
    sizes = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    view = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _dtype_of(array: npt.NDArray[Any]) -> torch.dtype:
    found: torch.dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return found
