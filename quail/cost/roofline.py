"""Work to seconds: a roofline over the model's layers and the device's rates."""

from __future__ import annotations

from dataclasses import dataclass

from quail.cost.budgets import ModelShape
from quail.cost.work import Work


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        matmul_flops: floating-point operations of matrix products as large as a pass's.
        attention_flops: the same of attention, scores and values together; masked pairs are not counted.
        memory_bytes: bytes read or written.
        row_bytes: the same of what moves rows between products, as `row_bytes_per_token` counts it; kernels
            that fuse these steps move fewer than that, which shows as a higher rate. None is `memory_bytes`.
    """

    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    row_bytes: float | None = None


@dataclass(frozen=True)
class Seconds:
    """Seconds of some work, by what takes them.

    Attributes:
        matmul: matrix products.
        attention: attention.
        rows: what moves rows through memory beside products: norms, rotation, gates, copies.
        memory: KV written and read.
    """

    matmul: float
    attention: float
    rows: float
    memory: float

    @property
    def total(self) -> float:
        """Each of these is a kernel of its own, bound by compute or by memory, and they follow each other."""
        return self.matmul + self.attention + self.rows + self.memory


def matmul_flops_per_token(shape: ModelShape) -> float:
    """Operations of the layers' products for one row: 2 per weight element.

    What follows the last layer's attention runs only for rows that are read: few, and not counted.
    """
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    before_attention = shape.hidden_size * (q_width + 2 * kv_width)
    behind_attention = q_width * shape.hidden_size + 3 * shape.hidden_size * shape.intermediate_size
    return 2.0 * (before_attention * shape.num_layers + behind_attention * (shape.num_layers - 1))


def attention_flops_per_pair(shape: ModelShape) -> float:
    """Operations of one (row, key) pair over all layers: a score and a weighted value for each head."""
    return 4.0 * shape.num_heads * shape.head_dim * shape.num_layers


NORM_MOVES = 9
"""How often a norm made of torch's operations moves each element: square, mean, scale, weight, copy."""


def row_bytes_per_token(shape: ModelShape) -> float:
    """Bytes that one row moves beside products, over all layers.

    A layer reads or writes, for each row: `NORM_MOVES` times the hidden state in each of two norms, five
    times the rotated heads, four times the attention's output on its way into place, and five times the inner
    state (activation and gate).
    """
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    elements = (
        2 * NORM_MOVES * shape.hidden_size
        + 5 * (q_width + kv_width)
        + 4 * q_width
        + 5 * shape.intermediate_size
    )
    return 1.0 * elements * shape.element_bytes * shape.num_layers


def kv_bytes_per_token(shape: ModelShape) -> float:
    """Bytes of one token's KV over all layers."""
    return 2.0 * shape.num_kv_heads * shape.head_dim * shape.element_bytes * shape.num_layers


def seconds(work: Work, shape: ModelShape, rates: Rates) -> Seconds:
    """Seconds of some work on a device.

    KV is read in one place and written in another, so it moves twice. Roofline model: S. Williams, A.
    Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.
    """
    return Seconds(
        matmul=work.tokens * matmul_flops_per_token(shape) / rates.matmul_flops,
        attention=work.pairs * attention_flops_per_pair(shape) / rates.attention_flops,
        rows=work.tokens * row_bytes_per_token(shape) / (rates.row_bytes or rates.memory_bytes),
        memory=2 * (work.kv_written + work.kv_read) * kv_bytes_per_token(shape) / rates.memory_bytes,
    )
