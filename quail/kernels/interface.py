"""What a decoder asks of its kernels; chosen once, at boot, and passed on.

`reference.TorchKernels` is the plain version of all of them and the oracle of every faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from quail.execution.chunk import BlockTable, Segments


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states, KV and loaded weights where products run in `dtype`: bfloat16 with int8."""
    return torch.bfloat16 if dtype == torch.int8 else dtype


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of a product, laid out as the kernels that made it like them.

    Attributes:
        data: the elements.
        columns: of the product's result.
        scales: what the elements are multiples of, where they are integers.
    """

    data: torch.Tensor
    columns: int
    scales: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Norms of query and key heads before their rotation (Qwen3).

    Attributes:
        q, k: (head_dim,) float32.
    """

    q: torch.Tensor
    k: torch.Tensor


@dataclass(frozen=True, eq=False)
class PageWrites:
    """Which rows of a pass keep their KV, and where.

    Attributes:
        rows: (w,) int64 rows that do.
        slots: (w,) int64 their slots (page · page_tokens + offset).
        slot_of_row: (t,) int64 slot of each row, -1 where its KV is not kept.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    slot_of_row: torch.Tensor


class Kernels(Protocol):
    """The work of a layer. Rows are elements of the model's dtype; sums of the hidden state are float32."""

    @property
    def name(self) -> str:
        """What `quail doctor` and reports call them."""

    @property
    def version(self) -> str:
        """The name, down to the build: rates are those of a version."""

    @property
    def layout(self) -> str:
        """Names how `matrix` lays out weights, down to the build; empty where it takes them as they are."""

    def matrix(self, parts: Sequence[torch.Tensor]) -> Matrix:
        """Lays out the weights of one product: (n, inner) each, their results side by side."""

    def gated_matrix(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        """Lays out the weights of `gated_product`: (n, inner) each."""

    def fused(self) -> AbstractContextManager[None]:
        """Products, norms and rotations called inside may wait until its end, then run together.

        Each treats every row alone, so that a block of rows may go through all of them before the next does.
        They must be over the same rows. Until the end nothing is in their outputs, their inputs must stay as
        they are, and no other kernel may be called.
        """

    def product(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes x · weightsᵀ + bias into `out`.

        Args:
            x: (t, inner).
            matrix: from `matrix`.
            bias: (columns,) float32 or None.
            out: (t, columns), overwritten.
        """

    def add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        """Adds x · weightsᵀ + bias to `total`, (t, columns) float32."""

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        """Writes silu(x · gateᵀ) · (x · upᵀ), the inner state of SwiGLU (arXiv:2002.05202), into `out`.

        Args:
            x: (t, inner).
            matrix: from `gated_matrix`.
            out: (t, columns), overwritten.
        """

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Root-mean-square norm (arXiv:1910.07467).

        Args:
            x: (t, width) float32.
            weight: (width,) float32.
            eps: added to the mean square.
            out: (t, width), overwritten.
        """

    def rotate(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
        eps: float,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        writes: PageWrites,
    ) -> None:
        """Norms and rotary positions (arXiv:2104.09864) of queries and keys in place, then KV into pages.

        Args:
            heads: (t, heads + 2 kv_heads, head_dim) queries, keys, values; changed.
            cos, sin: (t, head_dim / 2) float32; the pairs are halves of a head.
            norms: of the heads, or None.
            eps: of the norms.
            k_pages: (pages, page_tokens, kv_heads, head_dim), changed.
            v_pages: the same for values.
            writes: which rows are kept.
        """

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        segments: Segments,
        block_table: BlockTable,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the rows of a pass, as `reference.attend`."""

    def limit_gathered(self, num_tokens: int) -> None:
        """Has attention copy the KV of at most so many tokens from pages at a time, where it copies that of
        several segments at all; one segment's is copied however much it is.
        """

    def give_back(self) -> None:
        """Lets go of what is kept from pass to pass and made anew when it is needed."""
