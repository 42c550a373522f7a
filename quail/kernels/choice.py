"""Which kernels an engine runs with: decided once, at boot, with the reason for `quail doctor`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quail.errors import ConfigError
from quail.kernels.build import Build, Unavailable, has_tiles

if TYPE_CHECKING:
    import torch

    from quail.kernels.cuda import Card
    from quail.kernels.interface import Kernels


@dataclass(frozen=True)
class KernelChoice:
    """The kernels to run with.

    Attributes:
        build: the native library of a CPU, or None.
        reason: why there are no native kernels; empty where there are.
        card: what a CUDA device can do; None for other devices and for plain kernels.
        attention: the path wanted there, or `auto`.
    """

    build: Build | None
    reason: str = ""
    card: Card | None = None
    attention: str = "auto"

    @classmethod
    def of(cls, mode: str, device_type: str, cache_dir: Path, attention: str = "auto") -> KernelChoice:
        """What a configuration comes to on this machine.

        Nothing is compiled but, on CUDA, one small kernel: it shows whether Triton can.

        Args:
            mode: `auto`, `native` or `reference`.
            device_type: `cpu`, `cuda` or `mps`.
            cache_dir: where compiled libraries are kept.
            attention: on CUDA: `auto`, `gathered`, `paged` or `reference`.

        Raises:
            ConfigError: native kernels or an attention path are demanded and cannot be had.
        """
        if attention not in ("auto", "reference") and (device_type != "cuda" or mode == "reference"):
            raise ConfigError(
                f"attention = {attention!r} is for the kernels of CUDA devices; this is device "
                f"{device_type!r} with kernels = {mode!r}",
                hint="attention = 'auto' takes what can run",
            )
        if mode == "reference":
            return cls(None, "kernels = 'reference'")
        if device_type == "cuda":
            return cls._of_card(mode, attention)
        try:
            if device_type != "cpu":
                raise Unavailable(f"they are for CPUs and CUDA devices, and the device is {device_type}")
            return cls(Build.here(cache_dir))
        except Unavailable as missing:
            return _without(mode, missing)

    @classmethod
    def _of_card(cls, mode: str, attention: str) -> KernelChoice:
        from quail.kernels.cuda import Card

        fault = _fault_of_triton("cuda")
        if fault and mode == "native":
            _without(mode, Unavailable(fault))
        return cls(None, fault, Card.here(has_triton=not fault), attention)

    def compiled(self, mode: str, progress: Callable[[str], None] | None = None) -> KernelChoice:
        """The same with its library compiled, or without one if that fails.

        Raises:
            ConfigError: native kernels are demanded and cannot be compiled.
        """
        if self.build is None:
            return self
        try:
            self.build.library(progress)
        except Unavailable as missing:
            return _without(mode, missing)
        return self

    @property
    def multiplies(self) -> bool:
        """Whether products of bfloat16 rows run in the native kernels: not where torch has matrix tiles."""
        return self.build is not None and self.build.level.has_products and not has_tiles()

    @property
    def name(self) -> str:
        """What reports call them."""
        if self.card is not None:
            return "cuda triton" if self.card.has_triton else "cuda torch"
        return "reference" if self.build is None else f"native {self.build.level.name}"

    @property
    def version(self) -> str:
        """As `Kernels.version` of what this chooses."""
        return self.name if self.build is None else f"{self.name} {self.build.path.stem}"

    @property
    def description(self) -> str:
        """One line for `quail doctor`: which kernels and attention, and why not the native ones."""
        if self.card is not None:
            rows = "norms, rotary positions, activation by Triton"
            rows = f"by torch, since {self.reason}" if self.reason else rows
            return f"{self.name} ({rows}; attention: {self.card.paths(self.attention)})"
        if self.build is None:
            return f"reference ({self.reason})"
        way = "in pairs" if self.build.level.has_fast_pairs else "in 16-bit integers"
        products = f"products of bfloat16 {way}" if self.multiplies else "products by torch"
        if self.build.level.has_products and not self.multiplies:
            products += ", of int8 here"
        return f"{self.name} ({products}; compiled by {self.build.compiler})"

    def kernels(self, dtype: torch.dtype, device: torch.device, threads: int) -> Kernels:
        """The kernels for a model; the library is compiled already.

        Args:
            dtype: of products, from `models.device.dtype_of`, which refuses what cannot run.
            device: where the model runs.
            threads: most threads that a native kernel takes.
        """
        import torch

        from quail.kernels import attention, reference
        from quail.kernels.reference import TorchKernels

        if self.card is not None:
            from quail.kernels.cuda import CudaKernels

            return CudaKernels(self.card, dtype, device, attention=self.attention, name=self.name)
        is_int8 = dtype == torch.int8
        if self.build is None:
            from quail.kernels.int8 import Int8Kernels

            found = Int8Kernels if is_int8 else TorchKernels
            return found(attention.attend if device.type == "cpu" else reference.attend)
        from quail.kernels.c_interface import Format
        from quail.kernels.compiled import NativeKernels, PackedKernels

        assert not is_int8 or self.build.level.has_products, self.name
        if is_int8 or (dtype == torch.bfloat16 and self.multiplies):
            return PackedKernels(self.build.path, threads, self.name, Format.INT8 if is_int8 else None)
        return NativeKernels(self.build.path, dtype, threads, self.name)


@functools.cache
def _fault_of_triton(device_type: str) -> str:
    """Why Triton's kernels cannot run on a device, in a line; empty where they can.

    One is compiled and launched: that takes a C compiler and the driver's library, which an import of Triton
    does not ask for.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    try:
        from quail.kernels.triton_rows import launch

        launch(device_type)
    except Exception as error:  # Triton, its compiler and the driver raise what they like
        lines = str(error).strip().splitlines()
        return f"Triton cannot launch a kernel: {lines[0] if lines else type(error).__name__}"
    return ""


def _without(mode: str, missing: Unavailable) -> KernelChoice:
    if mode == "native":
        raise ConfigError(
            f"kernels = 'native', but there are none here: {missing}",
            hint="kernels = 'auto' runs on torch where native ones cannot be had",
        ) from None
    return KernelChoice(None, str(missing))
