"""Whether a device multiplies matrices rightly, asked before a model trusts it.

Some combinations of processor, driver and library give wrong products in a reduced format without a sign. Two
small products tell: sums of ones, which every format holds exactly, and a random product against float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from quail.errors import ModelError
from quail.kernels.interface import Kernels, state_dtype
from quail.models.device import dtype_word

ROWS, INNER, COLUMNS = 256, 1024, 256
"""Shape of the products: as long as those of a model, small enough to cost nothing."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.int8: 2**-5}
"""Largest difference of a random product, as a share of its largest element."""


def multiply(kernels: Kernels, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(rows, columns) product of (rows, inner) and (columns, inner), as the model's layers ask for it."""
    found = torch.empty(len(left), len(right), dtype=left.dtype, device=left.device)
    kernels.product(left, kernels.matrix([right]), None, found)
    return found


def fault_of_products(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with matrix products in a dtype on a device; None if nothing is."""
    stored = state_dtype(dtype)
    ones = multiply(
        kernels,
        torch.ones(ROWS, INNER, dtype=stored, device=device),
        torch.ones(COLUMNS, INNER, dtype=stored, device=device),
    )
    wrong = ones[ones != INNER]
    if len(wrong):
        return f"{len(wrong):,} of {ones.numel():,} sums of {INNER} ones came out wrong, one as {wrong[0]:g}"
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(ROWS, INNER, generator=generator).to(stored)
    right = torch.randn(COLUMNS, INNER, generator=generator).to(stored)
    expected = left.double() @ right.double().t()
    found = multiply(kernels, left.to(device), right.to(device)).cpu().double()
    gap = float((found - expected).abs().max() / expected.abs().max())
    if not gap <= TOLERANCE[dtype]:  # NaN is no pass either
        allowed = TOLERANCE[dtype]
        return f"a random product differs from float64 by {gap:.2g} of its size, allowed are {allowed:.2g}"
    return None


def trusted_dtype(
    dtype: torch.dtype, device: torch.device, kernels_for: Callable[[torch.dtype], Kernels]
) -> tuple[torch.dtype, str | None]:
    """The dtype to run in, and a warning where it is not the one asked for.

    The warning is raised as a Python warning too.

    Args:
        dtype: asked for.
        device: where the model will run.
        kernels_for: the kernels that it will run with in a dtype.

    Raises:
        ModelError: float32 products are wrong as well.
    """
    fault = fault_of_products(kernels_for(dtype), dtype, device)
    if fault is None:
        return dtype, None
    wrong = f"matrix products in {dtype_word(dtype)} are wrong on this {device.type}: {fault}"
    exact = torch.float32
    instead = fault if dtype == exact else fault_of_products(kernels_for(exact), exact, device)
    if instead is not None:
        raise ModelError(
            f"matrix products in float32 are wrong on this {device.type}: {instead}",
            hint="device = 'cpu' runs without it"
            if device.type != "cpu"
            else "check the memory and the processor, or install torch anew",
        )
    message = f"{wrong}; the model runs in float32 instead"
    warnings.warn(message, UserWarning, stacklevel=2)
    return torch.float32, message
