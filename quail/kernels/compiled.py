"""The native kernels behind the same interface as the plain ones: a C library called on raw pointers.

Tensors are contiguous where the C side takes no stride; every call checks that, since a wrong pointer is
silent. The threads are those of torch's own OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from quail.execution.chunk import BlockTable, Int64s, Segments
from quail.kernels.c_interface import (
    ADD,
    GATE,
    STEPS,
    STORE,
    Attend,
    Format,
    Fused,
    Gate,
    Job,
    Norm,
    Pack,
    Product,
    Rotate,
    Step,
)
from quail.kernels.interface import HeadNorms, Matrix, PageWrites
from quail.kernels.reference import TorchKernels

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Waiting(NamedTuple):
    """A kernel to be run. The tensors are those that its job points to."""

    kernel: str
    job: Job
    tensors: tuple[torch.Tensor, ...]


class _Library:
    """The library as one decoder calls it.

    Args:
        path: from `build.Build.library`.
        dtype: of the model: float32 or bfloat16.
        threads: most threads that a kernel takes.

    Raises:
        OSError: the library cannot be loaded.
    """

    def __init__(self, path: Path, dtype: torch.dtype, threads: int) -> None:
        self._lib = ctypes.CDLL(str(path))
        self.dtype, self.threads = dtype, threads
        self.panel_columns = int(self._lib.quail_panel_columns())
        self._lib.quail_panel_words.restype = c_int64
        self.digest = path.stem

    @property
    def fastest_format(self) -> Format:
        """Of bfloat16 products, on this processor."""
        return Format(self._lib.quail_fastest_format())

    def has_format(self, format: Format) -> bool:
        return bool(self._lib.quail_has_format(c_int32(format)))

    def panel_words(self, inner: int, format: Format) -> int:
        """Words of 4 bytes of a panel of packed weights."""
        return int(self._lib.quail_panel_words(c_int64(inner), c_int32(format)))

    def call(self, kernel: str, job: ctypes.Structure) -> None:
        getattr(self._lib, f"quail_{kernel}")(ctypes.byref(job))

    def call_for_dtype(self, kernel: str, job: ctypes.Structure) -> None:
        self.call(f"{kernel}_{_DTYPES[self.dtype]}", job)

    def pointer(self, tensor: torch.Tensor) -> int:
        """Of a contiguous tensor of the model's dtype."""
        assert tensor.dtype == self.dtype and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
        return tensor.data_ptr()

    def row_pointer(self, tensor: torch.Tensor) -> int:
        """Of a tensor of the model's dtype whose rows, contiguous each, may lie apart."""
        size = 1
        for length, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
            assert length == 1 or stride == size, tensor.stride()
            size *= length
        assert tensor.dtype == self.dtype, tensor.dtype
        return tensor.data_ptr()


class NativeKernels(TorchKernels):
    """Norms, rotation, gate and attention compiled; products by torch.

    Args:
        path, dtype, threads: as of the library.
        name: what reports call them.

    Raises:
        OSError: the library cannot be loaded.
    """

    def __init__(self, path: Path, dtype: torch.dtype, threads: int, name: str = "native") -> None:
        super().__init__(self._attend, name)
        self._library = _Library(path, dtype, threads)
        self._segments: weakref.WeakKeyDictionary[Segments, _FlatSegments] = weakref.WeakKeyDictionary()

    @property
    def version(self) -> str:
        return f"{self.name} {self._library.digest}"

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        gate_up = self._scratch(x, 2 * matrix.columns)
        torch.mm(x, matrix.data.t(), out=gate_up)
        self.gate(gate_up, out)

    def gate(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Writes silu(gate) · up into `out`: the two, side by side, (t, 2 n), become (t, n)."""
        self._assert_nothing_waits()
        library = self._library
        rows, width = out.shape
        assert gate_up.shape == (rows, 2 * width)
        library.call_for_dtype(
            "gate",
            Gate(
                gate_up=library.pointer(gate_up),
                out=library.pointer(out),
                rows=rows,
                width=width,
                threads=library.threads,
            ),
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        library = self._library
        rows, width = x.shape
        assert out.shape == x.shape
        self._run(
            "norm",
            Norm(
                x=_floats(x),
                weight=_floats(weight),
                out=library.pointer(out),
                rows=rows,
                width=width,
                eps=eps,
                threads=library.threads,
            ),
            x,
            weight,
            out,
        )

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
        library = self._library
        rows, num_heads, head_dim = heads.shape
        num_kv = k_pages.shape[2]
        assert writes.slot_of_row.is_contiguous() and len(writes.slot_of_row) == rows
        self._run(
            "rotate",
            Rotate(
                heads=library.pointer(heads),
                cos=_floats(cos),
                sin=_floats(sin),
                q_norm=None if norms is None else _floats(norms.q),
                k_norm=None if norms is None else _floats(norms.k),
                k_pages=library.pointer(k_pages),
                v_pages=library.pointer(v_pages),
                slots=writes.slot_of_row.data_ptr(),
                rows=rows,
                q_heads=num_heads - 2 * num_kv,
                kv_heads=num_kv,
                head_dim=head_dim,
                eps=eps,
                threads=library.threads,
            ),
            heads,
            cos,
            sin,
            k_pages,
            v_pages,
            writes.slot_of_row,
            *(() if norms is None else (norms.q, norms.k)),
        )

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
        self._assert_nothing_waits()
        library = self._library
        rows, num_heads, head_dim = q.shape
        flat = self._flat(segments)
        table = np.ascontiguousarray(block_table.pages, dtype=np.int64)
        out = torch.empty(rows, num_heads, head_dim, dtype=q.dtype)
        lse = torch.empty(rows, num_heads)
        library.call_for_dtype(
            "attend",
            Attend(
                q=library.row_pointer(q),
                k=library.row_pointer(k),
                v=library.row_pointer(v),
                k_pages=library.pointer(k_pages),
                v_pages=library.pointer(v_pages),
                out=out.data_ptr(),
                lse=lse.data_ptr(),
                q_stride=q.stride(0),
                k_stride=k.stride(0),
                v_stride=v.stride(0),
                heads=num_heads,
                kv_heads=k.shape[1],
                head_dim=head_dim,
                page_tokens=k_pages.shape[1],
                segments=len(segments),
                q_start=flat.q_start.ctypes.data,
                q_stop=flat.q_stop.ctypes.data,
                paged_tokens=flat.paged_tokens.ctypes.data,
                table_row=flat.table_row.ctypes.data,
                table=table.ctypes.data,
                table_stride=table.shape[1],
                context=flat.context.ctypes.data,
                context_end=flat.context_end.ctypes.data,
                history=flat.history.ctypes.data,
                scale=scale,
                threads=library.threads,
            ),
        )
        return out, lse

    def _run(self, kernel: str, job: Job, *tensors: torch.Tensor) -> None:
        """Runs a kernel that treats every row alone; the tensors are those that the job points to."""
        self._library.call_for_dtype(kernel, job)

    def _assert_nothing_waits(self) -> None:
        """Of what writes the inputs of a kernel that runs at once."""

    def _flat(self, segments: Segments) -> _FlatSegments:
        found = self._segments.get(segments)
        if found is None:
            found = self._segments[segments] = _FlatSegments(segments)
        return found


class PackedKernels(NativeKernels):
    """Products compiled too, of bfloat16 rows with weights that are packed once, in one of three formats.

    Elements of bfloat16 are multiplied as they are, in pairs, where processors do that as fast as pairs of
    16-bit integers. Elsewhere they become such integers: each column of weights is scaled by its largest
    element to 13 bits and a sign, each 192 neighbours of a row to 13 bits and a sign; sums of 192 products
    are exact, beyond that float32. That is finer than bfloat16. 8-bit integers are coarser, as
    `int8.Int8Kernels` describes.

    Kernels that treat every row alone may wait (`fused`) and go over a block of rows together.

    Args:
        path, threads, name: as of `NativeKernels`.
        format: of products; without one what is fastest on this processor and no coarser than bfloat16.

    Raises:
        OSError: the library cannot be loaded.
        ValueError: it does not multiply in the format.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        name: str = "native",
        format: Format | None = None,
    ) -> None:
        super().__init__(path, torch.bfloat16, threads, name)
        self.format = self._library.fastest_format if format is None else format
        if not self._library.has_format(self.format):
            raise ValueError(f"{path.name} does not multiply in {self.format.name}")
        self._waiting: list[_Waiting] | None = None
        self.fused_seconds: list[float] = []
        """Of each step of the last `fused`, all threads together."""

    @contextmanager
    def fused(self) -> Iterator[None]:
        waiting: list[_Waiting] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        self.fused_seconds = self._run_steps(waiting)

    def _assert_nothing_waits(self) -> None:
        assert self._waiting is None, "what it reads waits"

    def _run(self, kernel: str, job: Job, *tensors: torch.Tensor) -> None:
        step = _Waiting(kernel, job, tensors)
        if self._waiting is None:
            self._run_steps([step])
        else:
            self._waiting.append(step)

    def _run_steps(self, waiting: Sequence[_Waiting]) -> list[float]:
        """Runs steps over the same rows together.

        Returns:
            seconds of each, all threads together.
        """
        if not waiting:
            return []
        rows = waiting[0].job.rows
        assert all(each.job.rows == rows for each in waiting)
        steps = (Step * len(waiting))(
            *(Step(STEPS[each.kernel], ctypes.addressof(each.job), 0) for each in waiting)
        )
        self._library.call(
            "fused",
            Fused(
                steps=ctypes.addressof(steps),
                num_steps=len(waiting),
                rows=rows,
                widest=max((each.job.inner for each in waiting if isinstance(each.job, Product)), default=1),
                threads=self._library.threads,
            ),
        )
        return [step.seconds for step in steps]

    @property
    def layout(self) -> str:
        return f"{self.format.name.lower()}-{self._library.digest}"

    def matrix(self, parts: Sequence[torch.Tensor]) -> Matrix:
        return self._packed(parts, sum(len(part) for part in parts), gated=False)

    def gated_matrix(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        assert gate.shape == up.shape
        return self._packed([gate, up], len(gate), gated=True)

    def _packed(self, parts: Sequence[torch.Tensor], columns: int, *, gated: bool) -> Matrix:
        library = self._library
        inner = parts[0].shape[1]
        parts = [part.contiguous() for part in parts]
        width = library.panel_columns // 2 if gated else library.panel_columns
        num_panels = -(-columns // width)
        data = torch.empty(num_panels, library.panel_words(inner, self.format), dtype=torch.int32)
        scales = torch.empty(num_panels * library.panel_columns) if self.format == Format.INT16 else None
        pointers = (c_void_p * len(parts))(*(library.pointer(part) for part in parts))
        rows = (c_int64 * len(parts))(*(len(part) for part in parts))
        library.call(
            "pack",
            Pack(
                parts=ctypes.addressof(pointers),
                part_rows=ctypes.addressof(rows),
                num_parts=len(parts),
                inner=inner,
                gated=gated,
                format=self.format,
                threads=library.threads,
                packed=data.data_ptr(),
                scales=None if scales is None else _floats(scales),
            ),
        )
        return Matrix(data, columns, scales)

    def product(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self._product(x, matrix, bias, self._library.row_pointer(out), out, STORE)

    def add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        self._product(x, matrix, bias, _floats(total), total, ADD)

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        self._product(x, matrix, None, self._library.row_pointer(out), out, GATE)

    def _product(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        pointer: int,
        out: torch.Tensor,
        ending: int,
    ) -> None:
        rows, inner = x.shape
        needed = matrix.columns * (2 if ending == GATE else 1)
        num_panels = -(-needed // self._library.panel_columns)
        assert out.shape == (rows, matrix.columns)
        assert matrix.data.shape == (num_panels, self._library.panel_words(inner, self.format))
        assert (matrix.scales is not None) == (self.format == Format.INT16)
        self._run(
            "product",
            Product(
                x=self._library.row_pointer(x),
                x_stride=x.stride(0),
                rows=rows,
                inner=inner,
                packed=matrix.data.data_ptr(),
                scales=None if matrix.scales is None else _floats(matrix.scales),
                columns=matrix.columns,
                bias=None if bias is None else _floats(bias),
                out=pointer,
                out_stride=out.stride(0),
                ending=ending,
                format=self.format,
                threads=self._library.threads,
            ),
            x,
            matrix.data,
            out,
            *(each for each in (matrix.scales, bias) if each is not None),
        )


class _FlatSegments:
    """The arrays of `Segments` as the C side reads them."""

    def __init__(self, segments: Segments) -> None:
        def flat(values: Int64s) -> Int64s:
            return np.ascontiguousarray(values, dtype=np.int64)

        self.q_start, self.q_stop = flat(segments.q_start), flat(segments.q_stop)
        self.paged_tokens, self.table_row = flat(segments.paged_tokens), flat(segments.table_row)
        ranges = [segments.context_of(place) for place in range(len(segments))]
        self.context = np.array([each for several in ranges for each in several], dtype=np.int64).reshape(
            -1, 2
        )
        self.context_end = np.cumsum([len(several) for several in ranges], dtype=np.int64)
        self.history = np.full(len(segments), -1, dtype=np.int64)
        for number, (first, behind) in enumerate(segments.with_history):
            self.history[first:behind] = number


def _floats(tensor: torch.Tensor) -> int:
    assert tensor.dtype == torch.float32 and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    return tensor.data_ptr()
