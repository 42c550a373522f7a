"""Plain versions of the kernels: slow, obvious, and the oracle of every faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from quail.execution.chunk import BlockTable, Segments
from quail.kernels.interface import HeadNorms, Matrix, PageWrites

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attend(
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
    """Attention of the rows of a pass over paged KV, earlier rows and themselves.

    Args:
        q: (t, heads, head_dim) queries.
        k: (t, kv_heads, head_dim) keys of this pass, rotated.
        v: (t, kv_heads, head_dim) values of this pass.
        k_pages: (pages, page_tokens, kv_heads, head_dim) keys in pages, those of this pass written already.
        v_pages: the same for values.
        segments: what each row reads.
        block_table: pages of the tables that segments read.
        scale: factor on the scores, 1 / sqrt(head_dim).

    Returns:
        (t, heads, head_dim) of q's dtype, and the (t, heads) float32 log-sum-exp of the scaled scores.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for place in range(len(segments)):
        start, stop = int(segments.q_start[place]), int(segments.q_stop[place])
        keys, values = history(k, v, k_pages, v_pages, segments, block_table, place)
        num_before = keys.shape[0]
        keys = torch.cat([keys, k[start:stop]]).float().repeat_interleave(group, dim=1)
        values = torch.cat([values, v[start:stop]]).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        row = torch.arange(stop - start, device=q.device).unsqueeze(1)
        column = torch.arange(keys.shape[0], device=q.device).unsqueeze(0)
        scores.masked_fill_(column > row + num_before, float("-inf"))
        lse[start:stop] = torch.logsumexp(scores, dim=-1).transpose(0, 1)
        weights = torch.softmax(scores, dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out, lse


def history(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    segments: Segments,
    block_table: BlockTable,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a segment reads before its own: (tokens, kv_heads, head_dim) each.

    A view where one run of pages holds them all, else a copy.
    """
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_tokens = int(segments.paged_tokens[place])
    if num_tokens:
        pages = block_table.of_row(int(segments.table_row[place]), num_tokens, k_pages.shape[1])
        first = int(pages[0])
        if int(pages[-1]) - first == len(pages) - 1 and (pages[1:] - pages[:-1] == 1).all():
            slots = slice(first * k_pages.shape[1], first * k_pages.shape[1] + num_tokens)
            pieces.append((k_pages.flatten(0, 1)[slots], v_pages.flatten(0, 1)[slots]))
        else:
            index = torch.from_numpy(pages).to(k_pages.device)
            pieces.append(
                (
                    k_pages.index_select(0, index).flatten(0, 1)[:num_tokens],
                    v_pages.index_select(0, index).flatten(0, 1)[:num_tokens],
                )
            )
    pieces.extend((k[a:b], v[a:b]) for a, b in segments.context_of(place))
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return k[:0], v[:0]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


class TorchKernels:
    """All kernels in torch's own operations, on any device.

    Args:
        attend: the attention to use.
        name: what reports call them.
    """

    def __init__(self, attend: Attend, name: str = "reference") -> None:
        self.attend = attend
        self._name = name
        self._gate_up: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self.name

    @property
    def layout(self) -> str:
        return ""

    def matrix(self, parts: Sequence[torch.Tensor]) -> Matrix:
        data = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return Matrix(data, data.shape[0])

    def gated_matrix(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        return Matrix(torch.cat([gate, up]), gate.shape[0])

    def fused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def product(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if bias is None:
            torch.mm(x, matrix.data.t(), out=out)
        else:
            torch.addmm(bias.to(x.dtype), x, matrix.data.t(), out=out)

    def add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        if x.dtype == total.dtype:
            total.addmm_(x, matrix.data.t())
        else:
            total.add_(x @ matrix.data.t())
        if bias is not None:
            total.add_(bias)

    def gated_product(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        gate_up = self._scratch(x, 2 * matrix.columns)
        torch.mm(x, matrix.data.t(), out=gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        torch.mul(F.silu(gate, inplace=True), up, out=out)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))

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
        num_kv = k_pages.shape[2]
        num_q = heads.shape[1] - 2 * num_kv
        turned = heads[:, : num_q + num_kv]
        rows: torch.Tensor = turned.float()
        if norms is not None:
            q, k = rows[:, :num_q], rows[:, num_q:]
            shape = (heads.shape[2],)
            rows = torch.cat([F.rms_norm(q, shape, norms.q, eps), F.rms_norm(k, shape, norms.k, eps)], dim=1)
        first, second = rows.chunk(2, dim=-1)
        turned_first, turned_second = turned.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        after = torch.mul(first, cos).addcmul_(second, sin, value=-1)
        turned_second.copy_(torch.mul(second, cos).addcmul_(first, sin))
        turned_first.copy_(after)
        if len(writes.rows):
            keys, values = heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
            k_pages.flatten(0, 1).index_copy_(0, writes.slots, keys.index_select(0, writes.rows))
            v_pages.flatten(0, 1).index_copy_(0, writes.slots, values.index_select(0, writes.rows))

    def limit_gathered(self, num_tokens: int) -> None:
        """Nothing to do: one history is copied at a time."""

    def give_back(self) -> None:
        self._gate_up = None

    def _scratch(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Space that is taken once for the largest pass and used again by each layer and pass."""
        if self._gate_up is None or self._gate_up.shape[0] < x.shape[0] or self._gate_up.shape[1] != width:
            self._gate_up = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        return self._gate_up[: x.shape[0]]
