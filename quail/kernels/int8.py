"""Products in 8-bit integers, the plain version: slow, and the oracle of the compiled one.

A row has one scale, at which nearly all its elements fit into a signed byte. The few larger ones (the
outliers, which models have in every row and which would coarsen all others) are multiples of the same step,
of up to 16 bits; to keep them apart is the idea of arXiv:2208.07339. Each 64 neighbours in a column of
weights are unsigned bytes between the least and the largest of them, which suits weights stored in 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quail.kernels.interface import Matrix
from quail.kernels.reference import TorchKernels

RUN = 64
"""Neighbours in a column of weights that share a scale."""

MEANS_OF_A_BYTE, MORE_MEANS, LEAST_OF_AN_OUTLIER = 4.0, 1.5, 96
"""Magnitudes up to 4 times the mean of a row fit into a byte; or 1.5 times as much, and so on, until no more
than one element of 96 does not."""

MOST_BYTES = 250.0
"""How many times what fits into a byte the largest element may be."""

LEAST = 1e-30
"""Rows, and differences of weights, that are smaller throughout count as zeros."""


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows at the multiples of their steps that stand for them.

    Args:
        x: (t, inner).

    Returns:
        (t, inner) float32; NaN in rows that are not finite throughout.
    """
    x = x.float()
    sizes = x.abs().masked_fill(~x.isfinite(), 0.0)
    limit = MEANS_OF_A_BYTE * sizes.mean(dim=1, keepdim=True)
    while (has_many := (sizes > limit).sum(dim=1, keepdim=True) * LEAST_OF_AN_OUTLIER > x.shape[1]).any():
        limit = torch.where(has_many, limit * MORE_MEANS, limit)
    fitting = sizes.masked_fill(sizes > limit, 0.0).amax(dim=1, keepdim=True)
    fitting = torch.maximum(fitting, sizes.amax(dim=1, keepdim=True) / MOST_BYTES)
    step = torch.where(fitting < LEAST, 0.0, fitting / 127)
    # Divided as the compiled kernels do: `127 / fitting` would be 127 times a rounded reciprocal.
    factor = torch.full_like(fitting, 127.0) / fitting
    steps = (x * torch.where(fitting < LEAST, 0.0, factor)).round()
    return torch.where(x.isfinite().all(dim=1, keepdim=True), steps * step, torch.nan)


def rounded_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights, (columns, inner), at the values of the bytes that stand for them."""
    inner = weights.shape[1]
    runs = F.pad(weights.float(), (0, -inner % RUN), mode="replicate").reshape(len(weights), -1, RUN)
    low, high = runs.amin(dim=2, keepdim=True), runs.amax(dim=2, keepdim=True)
    step = high / 255 - low / 255
    step = torch.where(step < LEAST, 0.0, step)
    steps = torch.where(step == 0.0, 0.0, ((runs - low) * (1 / step)).round())
    return (steps * step + low).flatten(1)[:, :inner]


class Int8Kernels(TorchKernels):
    """All kernels in torch's own operations, products with rows and weights at 8 bits.

    Weights take the memory of float32.
    """

    def matrix(self, parts: Sequence[torch.Tensor]) -> Matrix:
        return Matrix(rounded_weights(torch.cat(list(parts))), sum(len(part) for part in parts))

    def gated_matrix(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        return Matrix(rounded_weights(torch.cat([gate, up])), len(gate))

    def product(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        found = _multiply(x, matrix)
        out.copy_(found if bias is None else found + bias)

    def add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        total.add_(_multiply(x, matrix))
        if bias is not None:
            total.add_(bias)

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        gate, up = _multiply(x, matrix).chunk(2, dim=1)
        out.copy_(F.silu(gate) * up)


def _multiply(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """(t, columns) float32."""
    return rounded_rows(x) @ matrix.data.t()
