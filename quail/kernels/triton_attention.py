"""Paged attention in Triton: pages are read where they lie. `reference.attend` is its slow twin.

A program takes one KV head and a tile of query rows, the query heads of that KV head side by side as further
rows, and goes over the keys in blocks with a running maximum (FlashAttention, arXiv:2205.14135). A tile is
part of one segment, or several whole segments of one history, so that the partners of an anchor read it
together. Scores and sums are float32; in bfloat16 the weights are rounded for the product with the values.

Not tuned on any card: the sizes of tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from quail.execution.chunk import BlockTable, Int32s, Segments
from quail.kernels.upload import upload

INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = 1.4426950408889634
TILE_FIELDS = 8
MOST_GROUP = 128
"""Query heads that may share a KV head: they lie in one tile."""
MOST_HEAD_DIM = 256


@triton.jit
def _product(a, b, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:  # the interpreter multiplies the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _add_block(q, k, v, visible, factor, top, total, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """Adds a block of keys to the running softmax: `top` is the maximum so far, the rest relative to it."""
    scores = _product(q, tl.trans(k), PRECISION, WIDE) * factor
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + _product(weights.to(v.dtype), v, PRECISION, WIDE)
    return new_top, total, acc


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    k_pages,
    v_pages,
    out,
    lse,
    tiles,
    table,
    context,
    first_of_row,
    q_stride,
    k_stride,
    v_stride,
    factor,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    row_start, row_stop = tl.load(tile), tl.load(tile + 1)
    first_key, is_stacked = tl.load(tile + 2), tl.load(tile + 3)
    num_paged, table_at = tl.load(tile + 4), tl.load(tile + 5)
    context_start, context_stop = tl.load(tile + 6), tl.load(tile + 7)

    lines, dims, offsets = tl.arange(0, LINES), tl.arange(0, BLOCK_DIM), tl.arange(0, KEYS)
    rows = row_start + lines // GROUP
    q_head = head * GROUP + lines % GROUP
    live = rows < row_stop
    in_head = dims < HEAD_DIM
    first = tl.load(first_of_row + rows, mask=live, other=0)
    q_at = rows.to(tl.int64)[:, None] * q_stride + q_head[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + q_at, mask=live[:, None] & in_head[None, :], other=0.0)

    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_DIM], tl.float32)

    for start in range(0, num_paged, KEYS):
        tokens = start + offsets
        there = tokens < num_paged
        page = tl.load(table + table_at + tokens // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + tokens % PAGE)[:, None] * NUM_KV + head) * HEAD_DIM + dims[None, :]
        mask = there[:, None] & in_head[None, :]
        keys = tl.load(k_pages + at, mask=mask, other=0.0)
        values = tl.load(v_pages + at, mask=mask, other=0.0)
        top, total, acc = _add_block(
            query, keys, values, there[None, :], factor, top, total, acc, PRECISION, WIDE
        )

    for place in range(context_start, context_stop):
        behind = tl.load(context + 2 * place + 1)
        for start in range(tl.load(context + 2 * place), behind, KEYS):
            others = start + offsets
            there = others < behind
            column = head * HEAD_DIM + dims[None, :]
            mask = there[:, None] & in_head[None, :]
            far = others.to(tl.int64)[:, None]
            keys = tl.load(k + far * k_stride + column, mask=mask, other=0.0)
            values = tl.load(v + far * v_stride + column, mask=mask, other=0.0)
            top, total, acc = _add_block(
                query, keys, values, there[None, :], factor, top, total, acc, PRECISION, WIDE
            )

    for start in range(first_key, row_stop, KEYS):
        others = start + offsets
        there = others < row_stop
        column = head * HEAD_DIM + dims[None, :]
        mask = there[:, None] & in_head[None, :]
        near = others.to(tl.int64)[:, None]
        keys = tl.load(k + near * k_stride + column, mask=mask, other=0.0)
        values = tl.load(v + near * v_stride + column, mask=mask, other=0.0)
        visible = (others[None, :] >= first[:, None]) & (others[None, :] <= rows[:, None])
        if is_stacked != 0:
            # A weight of 0 does not keep what is not finite out of the sum of a neighbour's rows.
            finite = tl.abs(values.to(tl.float32)) < float("inf")
            broken = tl.max(tl.where(finite, 0, 1), axis=1)
            values = tl.where(finite, values, 0.0).to(values.dtype)
            reads_broken = tl.max(tl.where(visible, broken[None, :], 0), axis=1)
            acc += tl.where(reads_broken > 0, float("nan"), 0.0)[:, None]
        top, total, acc = _add_block(query, keys, values, visible, factor, top, total, acc, PRECISION, WIDE)

    to_line = rows.to(tl.int64) * (NUM_KV * GROUP) + q_head
    mixed = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + to_line[:, None] * HEAD_DIM + dims[None, :], mixed, mask=live[:, None] & in_head[None, :])
    tl.store(lse + to_line, (top + tl.log2(total)) / 1.4426950408889634, mask=live)


@dataclass(frozen=True, eq=False)
class Tiles:
    """How the programs share a pass; indexes on the device.

    Attributes:
        tiles: (n, 8) int32: first row and row behind the last; first own key; whether it holds several
            segments; paged tokens and where their pages start in `table`; first context range and the one
            behind the last.
        table: (rows · longest,) int32 pages.
        context: (ranges, 2) int32 rows of the pass.
        first_of_row: (t,) int32 first row of the segment of each row.
        tile_rows: most rows of a tile.
    """

    tiles: torch.Tensor
    table: torch.Tensor
    context: torch.Tensor
    first_of_row: torch.Tensor
    tile_rows: int


@dataclass(frozen=True)
class TileShape:
    """Sizes of a program.

    Attributes:
        lines: query rows, a head each; a power of two.
        keys: of a block.
        warps, stages: as Triton's.
    """

    lines: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, group: int, head_dim: int, dtype: torch.dtype) -> TileShape:
        """The shape for a model; within the 99 KiB of shared memory that a program has on small cards."""
        if dtype == torch.float32:
            lines, keys, warps, stages = 64 if head_dim <= 64 else 32, 32, 4, 1
        else:
            lines, keys, warps, stages = 128 if head_dim <= 128 else 64, 64, 8, 2
        return cls(max(lines, triton.next_power_of_2(group)), 256 if INTERPRETED else keys, warps, stages)


def plan(segments: Segments, block_table: BlockTable, tile_rows: int, device: torch.device) -> Tiles:
    """The tiles of a pass; their indexes reach the device in one copy.

    Args:
        segments, block_table: of the pass.
        tile_rows: most rows of a tile.
        device: where the kernel runs.
    """
    context: list[tuple[int, int]] = []
    history = np.zeros((len(segments), 4), dtype=np.int64)
    run_of = np.full(len(segments), -1)
    width = block_table.pages.shape[1]
    for number, (first, behind) in enumerate(segments.with_history):
        ranges = segments.context_of(first)
        table_at = max(0, int(segments.table_row[first])) * width
        history[first:behind] = (
            segments.paged_tokens[first],
            table_at,
            len(context),
            len(context) + len(ranges),
        )
        run_of[first:behind] = number
        context.extend(ranges)
    tiles = _tiles(segments, history, run_of, tile_rows)
    lengths = segments.q_stop - segments.q_start
    arrays = (
        tiles,
        block_table.pages.astype(np.int32).reshape(-1),
        np.array(context, dtype=np.int32).reshape(-1, 2),
        np.repeat(segments.q_start, lengths).astype(np.int32),
    )
    there = upload(arrays, device)
    return Tiles(there[0], there[1], there[2], there[3], tile_rows)


def _tiles(segments: Segments, history: np.ndarray, run_of: np.ndarray, tile_rows: int) -> Int32s:
    """Long segments are cut; short ones that follow each other and read one history share a tile."""
    found: list[tuple[int, ...]] = []
    open_run: int | None = None
    for place in range(len(segments)):
        start, stop = int(segments.q_start[place]), int(segments.q_stop[place])
        far, run = history[place].tolist(), int(run_of[place])
        if open_run == run and stop - found[-1][0] <= tile_rows:
            first, _, key, _, *same = found[-1]
            found[-1] = (first, stop, key, 1, *same)
            continue
        found.extend(
            (row, min(row + tile_rows, stop), start, 0, *far) for row in range(start, stop, tile_rows)
        )
        open_run = run if stop - start <= tile_rows else None
    return np.array(found, dtype=np.int32).reshape(-1, TILE_FIELDS)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `reference.attend`, the pass as planned."""
    num_rows, num_heads, head_dim = q.shape
    num_kv, page_tokens = k.shape[1], k_pages.shape[1]
    group = num_heads // num_kv
    shape = TileShape.of(group, head_dim, q.dtype)
    assert head_dim <= MOST_HEAD_DIM and group <= MOST_GROUP and tiles.tile_rows <= shape.lines // group
    assert all(each.stride()[1:] == (head_dim, 1) for each in (q, k, v)), "heads of a row lie apart"
    assert k_pages.is_contiguous() and v_pages.is_contiguous()
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    _attend_kernel[(len(tiles.tiles), num_kv)](
        q,
        k,
        v,
        k_pages,
        v_pages,
        out,
        lse,
        tiles.tiles,
        tiles.table,
        tiles.context,
        tiles.first_of_row,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale * LOG2_E,
        NUM_KV=num_kv,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_tokens,
        LINES=shape.lines,
        KEYS=shape.keys,
        FIELDS=TILE_FIELDS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDE=INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out, lse
