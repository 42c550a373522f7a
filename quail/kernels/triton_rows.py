"""Triton kernels of what moves rows between products; each has a twin in torch with the same arguments.

The twins: `norm`, `rotate` are methods of `reference.TorchKernels`; `gate` is the end of its `gated_product`;
`attention.merge` and `gathered.gather` are those of `merge` and `gather`. Triton is imported here, so this
module is imported where the kernels are wanted and nowhere else. With TRITON_INTERPRET=1 in the environment
before Triton's first import, they run on a CPU, slowly. Numbers of rows differ from pass to pass and are kept
out of what a kernel is compiled for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quail.kernels.interface import HeadNorms, PageWrites

INTERPRETED = bool(triton.knobs.runtime.interpret)

TILE_ELEMENTS = 2**16 if INTERPRETED else 2**11
"""Elements that a program takes, where it may choose: the interpreter pays for each program."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(x, weight, out, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    values = tl.load(x + at, mask=mask, other=0.0)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    normed = values * scale[:, None] * weights[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(gate_up, out, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * (2 * width) + columns[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows[:, None] * width + columns[None, :], gated.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    heads,
    cos,
    sin,
    q_norm,
    k_norm,
    k_pages,
    v_pages,
    slot_of_row,
    num_rows,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of some rows: queries come first, then keys, then values, which only move into pages."""
    head = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_rows, in_half = rows < num_rows, columns < HALF
    mask = in_rows[:, None] & in_half[None, :]
    at = (rows[:, None] * (NUM_Q + 2 * NUM_KV) + head) * (2 * HALF) + columns[None, :]
    first = tl.load(heads + at, mask=mask, other=0.0)
    second = tl.load(heads + at + HALF, mask=mask, other=0.0)
    if head < NUM_Q + NUM_KV:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF)
            scale = 1.0 / tl.sqrt(mean + eps)
            is_q = head < NUM_Q
            of_q, of_k = in_half & is_q, in_half & (head >= NUM_Q)
            weight_x = tl.load(q_norm + columns, mask=of_q, other=0.0) + tl.load(
                k_norm + columns, mask=of_k, other=0.0
            )
            weight_y = tl.load(q_norm + HALF + columns, mask=of_q, other=0.0) + tl.load(
                k_norm + HALF + columns, mask=of_k, other=0.0
            )
            x = x * scale[:, None] * weight_x[None, :]
            y = y * scale[:, None] * weight_y[None, :]
        turn = rows[:, None] * HALF + columns[None, :]
        c = tl.load(cos + turn, mask=mask, other=0.0)
        s = tl.load(sin + turn, mask=mask, other=0.0)
        first = (x * c - y * s).to(first.dtype)
        second = (y * c + x * s).to(second.dtype)
        tl.store(heads + at, first, mask=mask)
        tl.store(heads + at + HALF, second, mask=mask)
    if head >= NUM_Q:
        slots = tl.load(slot_of_row + rows, mask=in_rows, other=-1)
        kept = mask & (slots >= 0)[:, None]
        if head < NUM_Q + NUM_KV:
            to = (slots[:, None] * NUM_KV + (head - NUM_Q)) * (2 * HALF) + columns[None, :]
            tl.store(k_pages + to, first, mask=kept)
            tl.store(k_pages + to + HALF, second, mask=kept)
        else:
            to = (slots[:, None] * NUM_KV + (head - NUM_Q - NUM_KV)) * (2 * HALF) + columns[None, :]
            tl.store(v_pages + to, first, mask=kept)
            tl.store(v_pages + to + HALF, second, mask=kept)


@triton.jit(do_not_specialize=["num_lines"])
def _merge_kernel(
    out,
    lse,
    other,
    other_lse,
    targets,
    num_lines,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lines are (row, head) pairs of `other`; `targets` names the row of `out` that each row adds to."""
    lines = (tl.program_id(0) * LINES + tl.arange(0, LINES)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_lines = lines < num_lines
    row = tl.load(targets + lines // NUM_HEADS, mask=in_lines, other=0).to(tl.int64)
    to_line = row * NUM_HEADS + lines % NUM_HEADS
    here = tl.load(lse + to_line, mask=in_lines, other=0.0)
    there = tl.load(other_lse + lines, mask=in_lines, other=0.0)
    weight = 1.0 / (1.0 + tl.exp(here - there))
    top, bottom = tl.maximum(here, there), tl.minimum(here, there)
    both = tl.where(here == there, here + 0.6931471805599453, top + tl.log(1.0 + tl.exp(bottom - top)))
    both = tl.where((here != here) | (there != there), here + there, both)
    mask = in_lines[:, None] & (columns < HEAD_DIM)[None, :]
    to = to_line[:, None] * HEAD_DIM + columns[None, :]
    mine = tl.load(out + to, mask=mask, other=0.0)
    theirs = tl.load(other + lines[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
    a, b = mine.to(tl.float32), theirs.to(tl.float32)
    w = weight[:, None]
    mixed = tl.where(w < 0.5, a + w * (b - a), b - (b - a) * (1.0 - w))
    tl.store(out + to, mixed.to(mine.dtype), mask=mask)
    tl.store(lse + to_line, both, mask=in_lines)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    k,
    v,
    k_pages,
    v_pages,
    source,
    keys,
    values,
    num_tokens,
    width,
    k_stride,
    v_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows, in_width = rows < num_tokens, columns < width
    places = tl.load(source + rows, mask=in_rows, other=0).to(tl.int64)
    mask = in_rows[:, None] & in_width[None, :]
    paged = mask & (places >= 0)[:, None]
    own = mask & (places < 0)[:, None]
    slot = places[:, None] * width + columns[None, :]
    row = -1 - places
    to = rows[:, None] * width + columns[None, :]
    from_pages = tl.load(k_pages + slot, mask=paged, other=0.0)
    from_rows = tl.load(k + row[:, None] * k_stride + columns[None, :], mask=own, other=0.0)
    tl.store(keys + to, tl.where(paged, from_pages, from_rows), mask=mask)
    from_pages = tl.load(v_pages + slot, mask=paged, other=0.0)
    from_rows = tl.load(v + row[:, None] * v_stride + columns[None, :], mask=own, other=0.0)
    tl.store(values + to, tl.where(paged, from_pages, from_rows), mask=mask)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Root-mean-square norm, as `Kernels.norm`."""
    num_rows, width = x.shape
    assert x.is_contiguous() and out.is_contiguous() and out.shape == x.shape
    block = triton.next_power_of_2(width)
    rows = _tile(num_rows, block)
    warps = min(16, max(1, rows * block // 512))
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight, out, num_rows, width, eps, ROWS=rows, BLOCK=block, num_warps=warps
    )


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Writes silu(gate) · up into `out`: the two, side by side, (t, 2 n), become (t, n)."""
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width) and gate_up.is_contiguous() and out.is_contiguous()
    block = min(1024, triton.next_power_of_2(width))
    rows = _tile(num_rows, block)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(width, block))
    _gate_kernel[grid](gate_up, out, num_rows, width, ROWS=rows, BLOCK=block)


def launch(device: torch.device | str) -> None:
    """Runs the smallest of the kernels, and checks what it wrote: that Triton compiles here at all.

    Raises:
        RuntimeError: the kernel ran, and its result is wrong.
        Exception: whatever Triton, its compiler and the driver raise where they cannot.
    """
    out = torch.empty(1, 1, device=device)
    gate(torch.tensor([[0.0, 1.0]], device=device), out)
    if out.item() != 0.0:
        raise RuntimeError(f"silu(0) comes out as {out.item()}")


def rotate(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    writes: PageWrites,
) -> None:
    """Norms and rotary positions in place, then KV into pages, as `Kernels.rotate`."""
    num_rows, num_heads, head_dim = heads.shape
    num_kv, half = k_pages.shape[2], head_dim // 2
    assert heads.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (num_rows, half)
    block = triton.next_power_of_2(half)
    rows = _tile(num_rows, block)
    q_norm, k_norm = (cos, cos) if norms is None else (norms.q, norms.k)
    _rotate_kernel[(triton.cdiv(num_rows, rows), num_heads)](
        heads,
        cos,
        sin,
        q_norm,
        k_norm,
        k_pages,
        v_pages,
        writes.slot_of_row,
        num_rows,
        eps,
        NUM_Q=num_heads - 2 * num_kv,
        NUM_KV=num_kv,
        HALF=half,
        NORMED=norms is not None,
        ROWS=rows,
        BLOCK=block,
    )


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, targets: torch.Tensor
) -> None:
    """Merges attention of some rows over other keys into `out` and `lse`, as `attention.merge` does for all.

    Args:
        out: (t, heads, head_dim), changed.
        lse: (t, heads) float32, changed.
        other: (m, heads, head_dim).
        other_lse: (m, heads) float32.
        targets: (m,) int32 rows of `out`, distinct.
    """
    num_rows, num_heads, head_dim = other.shape
    other_lse = other_lse.contiguous()
    assert out.is_contiguous() and lse.is_contiguous() and other.is_contiguous()
    assert other_lse.shape == (num_rows, num_heads) and targets.shape == (num_rows,)
    block, num_lines = triton.next_power_of_2(head_dim), num_rows * num_heads
    lines = _tile(num_lines, block)
    _merge_kernel[(triton.cdiv(num_lines, lines),)](
        out,
        lse,
        other,
        other_lse,
        targets,
        num_lines,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        LINES=lines,
        BLOCK=block,
    )


def gather(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values side by side, as `gathered.gather`."""
    num_tokens, shape = len(source), k.shape[1:]
    width = shape[0] * shape[1]
    assert k.stride()[1:] == v.stride()[1:] == (shape[1], 1), "rows of keys are not contiguous"
    assert k_pages.is_contiguous() and v_pages.is_contiguous()
    keys, values = k.new_empty(num_tokens, *shape), v.new_empty(num_tokens, *shape)
    block = min(1024, triton.next_power_of_2(width))
    rows = _tile(num_tokens, block)
    grid = (triton.cdiv(num_tokens, rows), triton.cdiv(width, block))
    _gather_kernel[grid](
        k,
        v,
        k_pages,
        v_pages,
        source,
        keys,
        values,
        num_tokens,
        width,
        k.stride(0),
        v.stride(0),
        ROWS=rows,
        BLOCK=block,
    )
    return keys, values


def _tile(num_rows: int, block: int) -> int:
    """Rows of `block` elements that one program takes, a power of two."""
    most = max(1, TILE_ELEMENTS // block)
    return int(min(most, triton.next_power_of_2(max(1, num_rows)))) if INTERPRETED else most
