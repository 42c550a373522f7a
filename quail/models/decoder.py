"""The forward pass of Llama, Qwen2 and Qwen3 decoders over a packed chunk.

One readable loop over layers; its steps are the kernels', which the engine chooses. What a family lacks
(biases, q/k norms) is None and skipped. The hidden state is float32 in every dtype. Keys and values of the
rows that keep theirs are written into pages before the layer's attention reads, so a segment may read pages
that the same pass writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from quail.execution.chunk import Chunk, Int64s
from quail.execution.reads import Pending, Read
from quail.kernels import attention, reference
from quail.kernels.interface import HeadNorms, Kernels, Matrix, PageWrites
from quail.kernels.reference import TorchKernels
from quail.kernels.upload import upload
from quail.kv.arena import KVArena
from quail.kv.pages import PageArena
from quail.models.config import DecoderConfig
from quail.models.packed import PackedMatrices
from quail.models.pending import pending_on

MASS_VOCAB_ROWS = 2**10
"""Rows of the head that a sum over the vocabulary takes at a time: their float32 copy stays in the caches.
It is always at one place, as new memory would cost more than the product."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer; products that share an input are one. Norms and biases are float32.

    Attributes:
        input_norm, post_norm: (hidden,).
        qkv: hidden to (heads + 2 kv_heads) · head_dim, bias or None.
        out: heads · head_dim to hidden, bias or None.
        head_norms: of queries and keys, or None.
        gate_up: hidden to intermediate.
        down: intermediate to hidden.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    out: Matrix
    out_bias: torch.Tensor | None
    head_norms: HeadNorms | None
    gate_up: Matrix
    down: Matrix


class Workspace:
    """Buffers of a pass, made once for the largest one and used again by each layer and pass."""

    def __init__(
        self, num_rows: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = config.num_heads + 2 * config.num_kv_heads
        self.hidden = torch.empty(num_rows, config.hidden_size, device=device)
        self.normed = torch.empty(num_rows, config.hidden_size, dtype=dtype, device=device)
        self.heads = torch.empty(num_rows, heads, config.head_dim, dtype=dtype, device=device)
        self.inner = torch.empty(num_rows, config.intermediate_size, dtype=dtype, device=device)
        self.num_rows = num_rows


class Decoder:
    """A decoder that runs chunks.

    Args:
        config: the architecture.
        weights: tensors by their Hugging Face names, on the device, in the dtype to run; emptied as they are
            laid out.
        kernels: what runs the layers; None takes torch's operations, with the fast attention on a CPU and the
            plain one elsewhere.
        packed: matrices that are laid out already; None lays out all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        kernels: Kernels | None = None,
        packed: PackedMatrices | None = None,
    ) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.final_norm = weights.pop("model.norm.weight").float()
        self.head_weight = self.embedding if config.tied_head else weights.pop("lm_head.weight")
        if kernels is None:
            kernels = TorchKernels(attention.attend if self.device.type == "cpu" else reference.attend)
        self.kernels = kernels
        packed = packed or PackedMatrices()
        self.layers = [_layer(weights, index, kernels, packed) for index in range(config.num_layers)]
        packed.keep()
        self._frequencies = torch.tensor(
            config.rope_inverse_frequencies, dtype=torch.float32, device=self.device
        )
        self._workspace: Workspace | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights, a tied head counted once."""
        tensors = [self.embedding, self.final_norm]
        if self.head_weight is not self.embedding:
            tensors.append(self.head_weight)
        matrices: list[Matrix] = []
        for layer in self.layers:
            tensors += [t for t in vars(layer).values() if isinstance(t, torch.Tensor)]
            tensors += [] if layer.head_norms is None else [layer.head_norms.q, layer.head_norms.k]
            matrices += [m for m in vars(layer).values() if isinstance(m, Matrix)]
        return sum(t.nbytes for t in tensors) + sum(m.num_bytes for m in matrices)

    @torch.inference_mode()
    def forward(self, chunk: Chunk, arena: KVArena) -> torch.Tensor:
        """Runs one pass.

        Returns:
            (r, hidden) float32 states of `chunk.read_rows` behind the final norm, which runs in float32.
        """
        config, kernels, num_rows = self.config, self.kernels, len(chunk)
        space = self._space(num_rows)
        num_q, num_kv, eps = config.num_heads, config.num_kv_heads, config.norm_eps
        hidden, normed = space.hidden[:num_rows], space.normed[:num_rows]
        heads, inner = space.heads[:num_rows], space.inner[:num_rows]
        q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
        flat_heads = heads.flatten(1)
        ids, positions, read_rows, *kept = upload(_indexes(chunk), self.device)
        cos, sin = self._rotation(positions)
        writes = PageWrites(kept[0], kept[1], kept[2])

        hidden.copy_(self.embedding.index_select(0, ids))
        before: Layer | None = None
        mixed = torch.empty(0)  # what the attention of the layer before found
        for index, layer in enumerate(self.layers):
            k_pages, v_pages = arena.layer(index)
            with kernels.fused():
                if before is not None:
                    self._behind_attention(before, mixed, hidden, normed, inner)
                kernels.norm(hidden, layer.input_norm, eps, out=normed)
                kernels.product(normed, layer.qkv, layer.qkv_bias, out=flat_heads)
                kernels.rotate(heads, cos, sin, layer.head_norms, eps, k_pages, v_pages, writes)
            mixed, _ = kernels.attend(
                q, k, v, k_pages, v_pages, chunk.segments, chunk.block_table, scale=config.head_dim**-0.5
            )
            mixed, before = mixed.flatten(1), layer
        # Behind the last attention only the rows to read are of use.
        mixed, hidden = mixed.index_select(0, read_rows), hidden.index_select(0, read_rows)
        normed, inner = normed[: len(read_rows)], inner[: len(read_rows)]
        if len(read_rows):
            with kernels.fused():
                self._behind_attention(self.layers[-1], mixed, hidden, normed, inner)
        return F.rms_norm(hidden, (config.hidden_size,), self.final_norm, eps)

    def _behind_attention(
        self,
        layer: Layer,
        mixed: torch.Tensor,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        inner: torch.Tensor,
    ) -> None:
        """The rest of a layer: adds its attention's output and its network's to `hidden`.

        Args:
            layer: the layer.
            mixed: (t, heads · head_dim) of its attention.
            hidden: (t, hidden) float32, changed.
            normed, inner: space, (t, hidden) and (t, intermediate).
        """
        self.kernels.add_product(mixed, layer.out, layer.out_bias, total=hidden)
        self.kernels.norm(hidden, layer.post_norm, self.config.norm_eps, out=normed)
        self.kernels.gated_product(normed, layer.gate_up, out=inner)
        self.kernels.add_product(inner, layer.down, None, total=hidden)

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
            weight = weight.index_select(0, self.index(vocab_ids))
        return states @ weight.float().t()

    def give_back(self) -> None:
        """Lets go of the buffers of passes; the next pass makes them anew, as large as it needs."""
        self._workspace = None
        self.kernels.give_back()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _space(self, num_rows: int) -> Workspace:
        if self._workspace is None or self._workspace.num_rows < num_rows:
            self._workspace = Workspace(num_rows, self.config, self.dtype, self.device)
        return self._workspace

    def index(self, values: Int64s) -> torch.Tensor:
        """An array on the device. The host does not wait for the copy."""
        return upload([values], self.device)[0]

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(t, head_dim / 2) cosines and sines, in float32."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        return angles.cos(), angles.sin()


def _indexes(chunk: Chunk) -> tuple[Int64s, ...]:
    """Ids, positions, rows to read, and the three of `PageWrites`."""
    slot_of_row = np.full(len(chunk), -1, dtype=np.int64)
    slot_of_row[chunk.write_rows] = chunk.write_slots
    ids = chunk.ids.astype(np.int64)
    return ids, chunk.positions, chunk.read_rows, chunk.write_rows, chunk.write_slots, slot_of_row


def _layer(weights: dict[str, torch.Tensor], index: int, kernels: Kernels, packed: PackedMatrices) -> Layer:
    def take(name: str) -> torch.Tensor | None:
        return weights.pop(f"model.layers.{index}.{name}", None)

    def need(name: str) -> torch.Tensor:
        tensor = take(name)
        assert tensor is not None, f"layer {index} lacks {name}, which the loader should have demanded"
        return tensor

    def several(names: list[str]) -> list[torch.Tensor]:
        found = [tensor for tensor in map(take, names) if tensor is not None]
        assert len(found) in (0, len(names)), f"layer {index} has some of {names} only"
        return found

    def matrix(name: str, *names: str) -> Matrix:
        parts = [need(f"{each}.weight") for each in names]
        return packed.matrix(f"{index}.{name}", lambda: kernels.matrix(parts))

    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    biases = several([f"{name}.bias" for name in projections])
    out_bias = take("self_attn.o_proj.bias")
    gate, up = need("mlp.gate_proj.weight"), need("mlp.up_proj.weight")
    norms = several(["self_attn.q_norm.weight", "self_attn.k_norm.weight"])
    return Layer(
        input_norm=need("input_layernorm.weight").float(),
        post_norm=need("post_attention_layernorm.weight").float(),
        qkv=matrix("qkv", *projections),
        qkv_bias=torch.cat(biases).float() if biases else None,
        out=matrix("out", "self_attn.o_proj"),
        out_bias=None if out_bias is None else out_bias.float(),
        head_norms=HeadNorms(norms[0].float(), norms[1].float()) if norms else None,
        gate_up=packed.matrix(f"{index}.gate_up", lambda: kernels.gated_matrix(gate, up)),
        down=matrix("down", "mlp.down_proj"),
    )


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

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Pending:
        """Starts a pass, its answers computed and copied right behind it; on a CPU it is done when this
        returns. Where a GPU's memory is short, the buffers of passes are given back.
        """
        try:
            states = self.forward(chunk)
            found = [
                (self.answer_mass if read.is_mass else self.logits)(states, read.rows, read.vocab_ids)
                for read in reads
            ]
            return pending_on(self.decoder.device, found)
        except torch.OutOfMemoryError:
            self.decoder.give_back()
            raise

    def forward(self, chunk: Chunk) -> torch.Tensor:
        """(r, hidden) float32 states of the rows to read."""
        return self.decoder.forward(chunk, self.arena)

    def logits(self, states: torch.Tensor, rows: Int64s, vocab_ids: Int64s) -> torch.Tensor:
        """(len(rows), len(vocab_ids)) float32 logits of some of the states."""
        return self.decoder.head(states.index_select(0, self.decoder.index(rows)), vocab_ids)

    def answer_mass(self, states: torch.Tensor, rows: Int64s, vocab_ids: Int64s) -> torch.Tensor:
        """(len(rows),) share of the probability that some vocabulary rows hold; over the whole vocabulary."""
        picked = states.index_select(0, self.decoder.index(rows))
        weight, pieces = self.decoder.head_weight, []
        floats = torch.empty(MASS_VOCAB_ROWS, weight.shape[1], device=weight.device)
        for some in torch.split(weight, MASS_VOCAB_ROWS):
            widened = some if some.dtype == floats.dtype else floats[: len(some)].copy_(some)
            pieces.append((widened @ picked.t()).logsumexp(dim=0))
        whole = torch.stack(pieces).logsumexp(dim=0)
        wanted = self.decoder.head(picked, np.unique(vocab_ids)).logsumexp(dim=1)
        return (wanted - whole).exp()
