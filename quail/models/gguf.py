"""GGUF files as models: configuration from the metadata, weights dequantized by the `gguf` package.

Files of the llama architecture hold the rows of the query and key projections (and their biases) in the order
of an interleaved rotary embedding; they are put back into halves. Files of other architectures are not
permuted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quail.errors import ModelError
from quail.models import rope
from quail.models.config import FAMILIES, DecoderConfig, Family, checked_config
from quail.models.gguf_file import GGUFFile, GGUFTensor
from quail.models.weights import EMBEDDING, HEAD, check_tensors, tensor_shapes

if TYPE_CHECKING:
    import torch

ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Metadata that changes the forward pass where it is not zero, and that the forward pass does not have.
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
_DEQUANTIZED_ELEMENTS = 1 << 22


def gguf_name(name: str) -> str:
    """The name that GGUF gives to a tensor of Hugging Face's Llama."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    assert match is not None, name
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Read the configuration of a GGUF file and check that its tensors are exactly those of that
    configuration.

    Raises:
        ModelError: an unknown architecture, rotary scaling or variant; missing, unexpected or misshapen
            tensors.
    """
    where = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ModelError(
            f"{where}: unknown architecture {reprlib.repr(architecture)}",
            hint=f"known architectures: {', '.join(FAMILIES)}",
        )
    keys = _Keys(file.metadata, f"{architecture}.", where)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{where}: one part of a model split into {reprlib.repr(file.metadata['split.count'])} files",
            hint="merge the parts first (llama-gguf-split --merge)",
        )
    for key in _UNSUPPORTED_KEYS:
        if keys.get(key, 0):
            raise ModelError(
                f"{where}: {architecture}.{key} = {reprlib.repr(keys.get(key))} is not supported"
            )
    config = _decoder_config(cast(Family, architecture), keys, file)
    expected = {gguf_name(name): shape for name, shape in tensor_shapes(config).items()}
    if ROPE_FACTORS in file.tensors:
        expected[ROPE_FACTORS] = (config.head_dim // 2,)
    check_tensors({name: tensor.shape for name, tensor in file.tensors.items()}, expected, where)
    return config


def _decoder_config(family: Family, keys: _Keys, file: GGUFFile) -> DecoderConfig:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, default=head_dim) != head_dim:
            raise ModelError(
                f"{keys.where}: {key} is {reprlib.repr(keys.get(key))}, but a head has {head_dim} dimensions"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{keys.where}: the tensor token_embd.weight is missing")
    num_layers = keys.integer("block_count")
    if num_layers > len(file.tensors):
        raise ModelError(f"{keys.where}: {num_layers} layers, but only {len(file.tensors)} tensors")
    base, frequencies = _rope(keys, file, head_dim)
    return checked_config(
        keys.where,
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        vocab_size=embedding.shape[0],
        context_tokens=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_base=base,
        rope_inverse_frequencies=frequencies,
        attention_bias=family == "qwen2" or _any_layer_has(file, "attn_q.bias"),
        output_bias=_any_layer_has(file, "attn_output.bias"),
        qk_norm=family == "qwen3",
        tied_head="output.weight" not in file.tensors,
    )


def _any_layer_has(file: GGUFFile, suffix: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{suffix}") for name in file.tensors)


def _rope(keys: _Keys, file: GGUFFile, head_dim: int) -> tuple[float, tuple[float, ...]]:
    base = keys.number("rope.freq_base", default=10000.0)
    if not rope.is_base(base) or not 2 <= head_dim <= 2**14:
        raise ModelError(f"{keys.where}: rotary base {base} over {head_dim} dimensions makes no frequencies")
    frequencies = rope.inverse_frequencies(head_dim, base)
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{keys.where}: unknown rope type {reprlib.repr(kind)}",
            hint="known: none, linear, and factors in the tensor rope_freqs.weight",
        )
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=1.0))
    if not rope.is_factor(factor):
        raise ModelError(f"{keys.where}: the rope scaling factor is {factor}")
    if kind == "linear" or keys.get("rope.scaling.type") is None:
        frequencies = rope.scale_linear(frequencies, factor)
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if factors.type_name != "F32" or factors.shape != (head_dim // 2,):
            raise ModelError(
                f"{keys.where}: rope_freqs.weight is {factors.type_name} {list(factors.shape)}; "
                f"F32 [{head_dim // 2}] is needed"
            )
        values = _raw(file, factors, 0, 1).view("<f4").reshape(-1)
        if not bool(np.all(np.isfinite(values) & (values >= 1 / rope.MOST_STRETCHED))):
            raise ModelError(f"{keys.where}: rope_freqs.weight holds values that are not positive and finite")
        frequencies = rope.scale_by_factors(frequencies, values)
    return base, tuple(frequencies.tolist())


def read_tensor(file: GGUFFile, config: DecoderConfig, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize one tensor, by its Hugging Face name, to float32 and round it to `dtype`."""
    import torch

    tensor = file.tensors[gguf_name(name)]
    num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    step = max(1, _DEQUANTIZED_ELEMENTS * num_rows // max(1, int(np.prod(tensor.shape, dtype=np.int64))))
    result = torch.empty(tensor.shape, dtype=dtype)
    rows = result.reshape(num_rows, -1)
    for start in range(0, num_rows, step):
        stop = min(num_rows, start + step)
        rows[start:stop] = torch.from_numpy(_dequantized(file, tensor, start, stop)).to(dtype)
    if config.family == "llama":
        for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if f"self_attn.{projection}." in name:
                return _halves_from_pairs(result, heads)
    return result


def _raw(file: GGUFFile, tensor: GGUFTensor, start_row: int, stop_row: int) -> np.ndarray[Any, Any]:
    num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.num_bytes // num_rows
    count = (stop_row - start_row) * row_bytes
    try:
        data = np.fromfile(file.path, np.uint8, count, offset=tensor.start + start_row * row_bytes)
    except OSError as error:
        raise ModelError(f"{file.path}: cannot be read: {error.strerror or error}") from error
    if len(data) != count:
        raise ModelError(f"{file.path}: the file became shorter while it was read")
    return data.reshape(stop_row - start_row, row_bytes)


def _dequantized(file: GGUFFile, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray[Any, Any]:
    """Rows of a tensor as float32."""
    data = _raw(file, tensor, start, stop)
    if tensor.type_name == "F32":
        return data.view("<f4")
    if tensor.type_name == "F16":
        return data.view("<f2").astype(np.float32)
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_number)
    with np.errstate(all="ignore"):  # a damaged scale is refused by name afterwards
        return np.ascontiguousarray(gguf.quants.dequantize(data, kind), dtype=np.float32)


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from (0, half, 1, half + 1, ...) back to (0, 1, ...)."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


class _Keys:
    """Typed access to the metadata keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str, where: str) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(self._prefix + key, default)

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self.where}: {self._prefix}{key} is {reprlib.repr(value)}; a whole number is needed"
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number; float32 values become the shortest decimal that rounds to them, as people write them."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
            raise ModelError(
                f"{self.where}: {self._prefix}{key} is {reprlib.repr(value)}; a number is needed"
            )
        return float(str(np.float32(value)))
