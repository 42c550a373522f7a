"""Kernels for CUDA devices: products by torch, the rest by Triton, attention by one of three paths.

Which attention runs (`EngineConfig.attention`, `QUAIL_ATTENTION`):

* `gathered`: torch's `varlen_attn` over keys and values gathered from pages. The default in bfloat16, on
  cards of compute capability 8.0 and up.
* `paged`: the Triton kernel that reads pages where they lie. Nobody has measured it, so it is not the default
  where `gathered` can run.
* `reference`: the plain one, a segment at a time. The default in float32.

What indexes a pass (segments, tables) is laid out with numpy and copied once a pass, at its first layer, and
nothing here but the reference waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quail.errors import ConfigError
from quail.execution.chunk import BlockTable, Segments
from quail.kernels import gathered, reference
from quail.kernels.interface import HeadNorms, Matrix, PageWrites
from quail.kernels.reference import TorchKernels

LEAST_CAPABILITY = (8, 0)
LEAST_TORCH = (2, 11)
VARLEN_HEAD_DIM, VARLEN_MULTIPLE = 256, 8
"""What `varlen_attn` takes: heads up to a size, a multiple of another; cards and torch from a version on."""


@dataclass(frozen=True)
class Card:
    """What a CUDA device and its libraries can do.

    Attributes:
        capability: compute capability of the device.
        torch_version: major and minor.
        has_triton: whether Triton can be imported.
    """

    capability: tuple[int, int]
    torch_version: tuple[int, int]
    has_triton: bool

    @classmethod
    def here(cls, *, has_triton: bool) -> Card:
        """The current CUDA device."""
        major, minor = torch.__version__.split(".")[:2]
        return cls(torch.cuda.get_device_capability(), (int(major), int(minor)), has_triton)

    def missing_for(self, path: str, dtype: torch.dtype, head_dim: int | None = None) -> str:
        """Why an attention path cannot run, in words; empty where it can.

        Args:
            path: `gathered`, `paged` or `reference`.
            dtype: of the model.
            head_dim: size of its heads; None asks about the rest.
        """
        if path == "paged" and not self.has_triton:
            return "it needs Triton"
        if path == "paged" and head_dim is not None and head_dim > VARLEN_HEAD_DIM:
            return f"it takes heads up to {VARLEN_HEAD_DIM}, and the model's have {head_dim}"
        if path != "gathered":
            return ""
        if dtype != torch.bfloat16:
            return "varlen_attn takes bfloat16, and the model runs in float32"
        if self.capability < LEAST_CAPABILITY:
            needed, found = ("{}.{}".format(*pair) for pair in (LEAST_CAPABILITY, self.capability))
            return f"varlen_attn needs compute capability {needed}, and the card has {found}"
        if self.torch_version < LEAST_TORCH:
            needed, found = ("{}.{}".format(*pair) for pair in (LEAST_TORCH, self.torch_version))
            return f"varlen_attn with windows needs torch {needed}, and this is {found}"
        if head_dim is not None and (head_dim > VARLEN_HEAD_DIM or head_dim % VARLEN_MULTIPLE):
            return (
                f"varlen_attn takes heads up to {VARLEN_HEAD_DIM} that are a multiple of {VARLEN_MULTIPLE}, "
                f"and the model's have {head_dim}"
            )
        return ""

    def path(self, wanted: str, dtype: torch.dtype, head_dim: int | None = None) -> str:
        """The attention to run: `gathered`, `paged` or `reference`.

        Args:
            wanted: one of these, or `auto`.
            dtype: of the model.
            head_dim: size of its heads, where it is known.

        Raises:
            ConfigError: a path is demanded that cannot run here.
        """
        if wanted != "auto":
            missing = self.missing_for(wanted, dtype, head_dim)
            if missing:
                raise ConfigError(
                    f"attention = {wanted!r}, but {missing}", hint="attention = 'auto' takes what can run"
                )
            return wanted
        if dtype == torch.float32:
            return "reference"
        order = ("gathered", "paged", "reference")
        return next(path for path in order if not self.missing_for(path, dtype, head_dim))

    def paths(self, wanted: str) -> str:
        """For `quail doctor`: which attention runs, and why not the default one."""
        told = []
        for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
            try:
                told.append(f"{self.path(wanted, dtype)} in {word}")
            except ConfigError as error:
                told.append(f"none in {word}: {error.message}")
        missing = self.missing_for("gathered", torch.bfloat16)
        return ", ".join(told) + (f"; {missing}" if missing and wanted == "auto" else "")


class CudaKernels(TorchKernels):
    """Products by torch; norms, rotation, gate and attention as the card can.

    Args:
        card: what it can do; without Triton the twins in torch run.
        dtype: of the model.
        device: where it runs.
        attention: the path wanted, or `auto`.
        varlen: in place of torch's `varlen_attn`.
        name: what reports call them.

    Raises:
        ConfigError: an attention path is demanded that cannot run here.
    """

    def __init__(
        self,
        card: Card,
        dtype: torch.dtype,
        device: torch.device,
        *,
        attention: str = "auto",
        varlen: gathered.Varlen | None = None,
        name: str = "cuda",
    ) -> None:
        super().__init__(self._attend, name)
        card.path(attention, dtype)
        self._card, self._dtype, self._device, self._wanted = card, dtype, device, attention
        self._rows: Any = _triton_rows() if card.has_triton else None
        self._varlen = varlen
        self._plans: weakref.WeakKeyDictionary[Segments, tuple[BlockTable, Any]] = weakref.WeakKeyDictionary()
        self._paths: dict[int, str] = {}
        self._most_gathered = gathered.MOST_GATHERED
        self._adds_in_float32 = dtype != torch.float32 and adds_in_float32(dtype, device)

    def add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        if not self._adds_in_float32 or x.dtype == total.dtype:
            super().add_product(x, matrix, bias, total)
            return
        _add_in_float32(x, matrix.data, total)
        if bias is not None:
            total.add_(bias)

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        if self._rows is None:
            super().gated_product(x, matrix, out)
            return
        gate_up = self._scratch(x, 2 * matrix.columns)
        torch.mm(x, matrix.data.t(), out=gate_up)
        self._rows.gate(gate_up, out)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        if self._rows is None:
            super().norm(x, weight, eps, out)
        else:
            self._rows.norm(x, weight, eps, out)

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
        rotate = super().rotate if self._rows is None else self._rows.rotate
        rotate(heads, cos, sin, norms, eps, k_pages, v_pages, writes)

    def limit_gathered(self, num_tokens: int) -> None:
        self._most_gathered = num_tokens

    def attention_path(self, head_dim: int) -> str:
        """The attention that runs for heads of a size: `gathered`, `paged` or `reference`.

        Raises:
            ConfigError: a path is demanded that cannot take them.
        """
        if head_dim not in self._paths:
            self._paths[head_dim] = self._card.path(self._wanted, self._dtype, head_dim)
        return self._paths[head_dim]

    def _attend(
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
        path = self.attention_path(q.shape[2])
        if path == "reference":
            return reference.attend(q, k, v, k_pages, v_pages, segments, block_table, scale=scale)
        if path == "gathered":
            calls = self._planned(
                segments,
                block_table,
                lambda: gathered.plan(
                    segments, block_table, k_pages.shape[1], self._device, self._most_gathered
                ),
            )
            return self._gathered.attend(q, k, v, k_pages, v_pages, calls, scale=scale)
        from quail.kernels import triton_attention

        group = q.shape[1] // k.shape[1]
        tile_rows = triton_attention.TileShape.of(group, q.shape[2], q.dtype).lines // group
        tiles = self._planned(
            segments,
            block_table,
            lambda: triton_attention.plan(segments, block_table, tile_rows, self._device),
        )
        return triton_attention.attend(q, k, v, k_pages, v_pages, tiles, scale=scale)

    def _planned(self, segments: Segments, block_table: BlockTable, make: Callable[[], Any]) -> Any:
        """What a pass was planned as; all its layers share it."""
        found = self._plans.get(segments)
        if found is None or found[0] is not block_table:
            found = self._plans[segments] = (block_table, make())
        return found[1]

    @property
    def _gathered(self) -> gathered.GatheredAttention:
        if self._varlen is None:
            from torch.nn.attention.varlen import varlen_attn

            self._varlen = varlen_attn
        if self._rows is None:
            return gathered.GatheredAttention(self._varlen)
        return gathered.GatheredAttention(self._varlen, self._rows.gather, self._rows.merge)


def adds_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch adds a product of a narrower dtype to float32 sums without rounding it first.

    Asked of the device with small numbers, since torch has it for some devices and versions only.
    """
    x = torch.arange(256, device=device).view(16, 16).to(dtype)
    weight, total = torch.full((16, 16), 3.0, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    expected = 1.0 + x.float() @ weight.float().t()
    try:
        _add_in_float32(x, weight, total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.equal(total, expected))


def _add_in_float32(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> None:
    torch.addmm(total, x, weight.t(), out_dtype=torch.float32, out=total)


def _triton_rows() -> Any:
    from quail.kernels import triton_rows

    return triton_rows
