"""The forward pass of Llama, Qwen2 and Qwen3 decoders over a packed chunk.

One readable loop over layers. What a family lacks (biases, q/k norms) is None and skipped. Keys and values of
the rows that keep theirs are written into pages before the layer's attention reads, so a segment may read
pages that the same pass writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quail.execution.chunk import Chunk, Int64s
from quail.kernels import attention, reference
from quail.kernels.attention import Attend
from quail.kv.arena import KVArena
from quail.kv.pages import PageArena
from quail.models.config import DecoderConfig

MASS_VOCAB_ROWS = 2**14
"""Rows of the head that a sum over the vocabulary takes at a time: their float32 copy stays small."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer, products that share an input fused.

    Attributes:
        input_norm, post_norm: (hidden,).
        qkv: ((heads + 2 kv_heads) · head_dim, hidden), bias or None.
        out: (hidden, heads · head_dim), bias or None.
        q_norm, k_norm: (head_dim,) or None.
        gate_up: (2 · intermediate, hidden).
        down: (hidden, intermediate).
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor


class Workspace:
    """Buffers of a pass, made once for the largest one and used again by each layer and pass."""

    def __init__(
        self, num_rows: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = config.num_heads + 2 * config.num_kv_heads

        def rows(width: int) -> torch.Tensor:
            return torch.empty(num_rows, width, dtype=dtype, device=device)

        self.hidden = rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.qkv = rows(heads * config.head_dim)
        self.rotated = rows((config.num_heads + config.num_kv_heads) * config.head_dim)
        self.gate_up = rows(2 * config.intermediate_size)
        self.num_rows = num_rows


class Decoder:
    """A decoder that runs chunks.

    Args:
        config: the architecture.
        weights: tensors by their Hugging Face names, on the device, in the dtype to run; emptied as they are
            fused.
        attend: the attention to use; None takes the fast one on a CPU, the plain one elsewhere.
    """

    def __init__(
        self, config: DecoderConfig, weights: dict[str, torch.Tensor], attend: Attend | None = None
    ) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.final_norm = weights.pop("model.norm.weight").float()
        self.head_weight = self.embedding if config.tied_head else weights.pop("lm_head.weight")
        self.layers = [_fuse(weights, index) for index in range(config.num_layers)]
        self.attend = attend or (attention.attend if self.device.type == "cpu" else reference.attend)
        self._frequencies = torch.tensor(
            config.rope_inverse_frequencies, dtype=torch.float32, device=self.device
        )
        self._workspace: Workspace | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights, a tied head counted once."""
        tensors = [self.embedding, self.final_norm]
        tensors += [t for layer in self.layers for t in vars(layer).values() if t is not None]
        if self.head_weight is not self.embedding:
            tensors.append(self.head_weight)
        return sum(t.numel() * t.element_size() for t in tensors)

    @torch.inference_mode()
    def forward(self, chunk: Chunk, arena: KVArena) -> torch.Tensor:
        """Runs one pass.

        Returns:
            (r, hidden) float32 states of `chunk.read_rows` behind the final norm, which runs in float32.
        """
        config, num_rows = self.config, len(chunk)
        space = self._space(num_rows)
        num_q, num_kv, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, normed = space.hidden[:num_rows], space.normed[:num_rows]
        qkv = space.qkv[:num_rows]
        heads = qkv.view(num_rows, num_q + 2 * num_kv, head_dim)
        rotated = space.rotated[:num_rows].view(num_rows, num_q + num_kv, head_dim)
        q, k, v = rotated[:, :num_q], rotated[:, num_q:], heads[:, num_q + num_kv :]
        cos, sin = self._rotation(chunk.positions)
        write_rows, write_slots = self._index(chunk.write_rows), self._index(chunk.write_slots)

        torch.index_select(self.embedding, 0, self._index(chunk.ids.astype(np.int64)), out=hidden)
        for index, layer in enumerate(self.layers):
            k_pages, v_pages = arena.layer(index)
            self._norm(hidden, layer.input_norm, normed)
            _product(normed, layer.qkv, layer.qkv_bias, out=qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                heads[:, :num_q] = self._norm(heads[:, :num_q], layer.q_norm)
                heads[:, num_q : num_q + num_kv] = self._norm(heads[:, num_q : num_q + num_kv], layer.k_norm)
            _rotate(heads[:, : num_q + num_kv], cos, sin, out=rotated)
            if len(write_rows):
                k_pages.flatten(0, 1).index_copy_(0, write_slots, k.index_select(0, write_rows))
                v_pages.flatten(0, 1).index_copy_(0, write_slots, v.index_select(0, write_rows))
            mixed, _ = self.attend(
                q, k, v, k_pages, v_pages, chunk.segments, chunk.block_table, scale=head_dim**-0.5
            )
            hidden.addmm_(mixed.view(num_rows, -1), layer.out.t())
            if layer.out_bias is not None:
                hidden.add_(layer.out_bias)
            self._norm(hidden, layer.post_norm, normed)
            _mlp(normed, layer, space.gate_up[:num_rows], hidden)
        read = hidden.index_select(0, self._index(chunk.read_rows)).float()
        return F.rms_norm(read, (config.hidden_size,), self.final_norm, config.norm_eps)

    @torch.inference_mode()
    def head(self, states: torch.Tensor, vocab_ids: Int64s | None = None) -> torch.Tensor:
        """Logits in float32.

        Args:
            states: (r, hidden) as `forward` returns.
            vocab_ids: (n,) the vocabulary rows wanted; None for all.

        Returns:
            (r, n) float32 logits.
        """
        weight = self.head_weight
        if vocab_ids is not None:
            weight = weight.index_select(0, self._index(vocab_ids))
        return states @ weight.float().t()

    def _space(self, num_rows: int) -> Workspace:
        if self._workspace is None or self._workspace.num_rows < num_rows:
            self._workspace = Workspace(num_rows, self.config, self.dtype, self.device)
        return self._workspace

    def _index(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
        return normed if out is None else out.copy_(normed)

    def _rotation(self, positions: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """(t, 1, head_dim / 2) cosines and sines, angles in float32 (RoFormer, arXiv:2104.09864)."""
        angles = self._index(positions).float().unsqueeze(1) * self._frequencies
        return angles.cos().unsqueeze(1).to(self.dtype), angles.sin().unsqueeze(1).to(self.dtype)


def _fuse(weights: dict[str, torch.Tensor], index: int) -> Layer:
    def take(name: str) -> torch.Tensor | None:
        return weights.pop(f"model.layers.{index}.{name}", None)

    def join(names: list[str]) -> torch.Tensor | None:
        found = [tensor for tensor in map(take, names) if tensor is not None]
        assert len(found) in (0, len(names)), f"layer {index} has some of {names} only"
        return torch.cat(found) if found else None

    def need(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None, f"layer {index} lacks a tensor that the loader should have demanded"
        return tensor

    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        input_norm=need(take("input_layernorm.weight")),
        post_norm=need(take("post_attention_layernorm.weight")),
        qkv=need(join([f"{name}.weight" for name in projections])),
        qkv_bias=join([f"{name}.bias" for name in projections]),
        out=need(take("self_attn.o_proj.weight")),
        out_bias=take("self_attn.o_proj.bias"),
        q_norm=take("self_attn.q_norm.weight"),
        k_norm=take("self_attn.k_norm.weight"),
        gate_up=need(join(["mlp.gate_proj.weight", "mlp.up_proj.weight"])),
        down=need(take("mlp.down_proj.weight")),
    )


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotary embedding of (t, heads, head_dim), halves as pairs, written to `out`."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


def _mlp(normed: torch.Tensor, layer: Layer, gate_up: torch.Tensor, hidden: torch.Tensor) -> None:
    """SwiGLU (arXiv:2002.05202), added to `hidden`; the activation overwrites the gate in place."""
    torch.mm(normed, layer.gate_up.t(), out=gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    F.silu(gate, inplace=True).mul_(up)
    hidden.addmm_(gate, layer.down.t())


class PagedDecoder:
    """A decoder on its arena: what a run calls.

    Args:
        decoder: the model.
        arena: its KV.
    """

    def __init__(self, decoder: Decoder, arena: KVArena) -> None:
        self.decoder, self.arena = decoder, arena

    @property
    def pages(self) -> PageArena:
        """The accounting of the arena."""
        return self.arena.pages

    def forward(self, chunk: Chunk) -> torch.Tensor:
        """(r, hidden) float32 states of the rows to read."""
        return self.decoder.forward(chunk, self.arena)

    def logits(self, states: torch.Tensor, rows: Int64s, vocab_ids: Int64s) -> npt.NDArray[np.float32]:
        """(len(rows), len(vocab_ids)) float32 logits of some of the states."""
        picked = states.index_select(0, torch.from_numpy(rows).to(states.device))
        found: npt.NDArray[np.float32] = self.decoder.head(picked, vocab_ids).cpu().numpy()
        return found

    def answer_mass(self, states: torch.Tensor, rows: Int64s, vocab_ids: Int64s) -> npt.NDArray[np.float32]:
        """(len(rows),) share of the probability that some vocabulary rows hold; over the whole vocabulary."""
        picked = states.index_select(0, torch.from_numpy(rows).to(states.device))
        size = self.decoder.config.vocab_size
        pieces = [
            self.decoder.head(picked, np.arange(start, min(start + MASS_VOCAB_ROWS, size))).logsumexp(dim=1)
            for start in range(0, size, MASS_VOCAB_ROWS)
        ]
        whole = torch.stack(pieces).logsumexp(dim=0)
        wanted = self.decoder.head(picked, np.unique(vocab_ids)).logsumexp(dim=1)
        found: npt.NDArray[np.float32] = (wanted - whole).exp().cpu().numpy()
        return found
