"""What a decoder is made of, read from a Hugging Face `config.json`; refused if a part is not understood."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from quail.errors import ModelError
from quail.models import rope

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")

_LARGEST = {
    "num_layers": 4096,
    "hidden_size": 2**20,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "vocab_size": 2**24,
    "context_tokens": 2**31,
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder of the Llama, Qwen2 or Qwen3 family.

    Attributes:
        family: "llama", "qwen2" or "qwen3".
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of one head, which need not be `hidden_size / num_heads`.
        intermediate_size: width of the gated feed-forward part.
        vocab_size: rows of the embedding (a tokenizer may have fewer tokens).
        context_tokens: the longest prompt that the model was made for.
        norm_eps: epsilon of every RMS norm.
        rope_base: base of the rotary embedding before scaling.
        rope_inverse_frequencies: angle per token of each of the `head_dim / 2` pairs, scaling applied.
        attention_bias: whether query, key and value projections have biases.
        output_bias: whether the attention's output projection has one.
        qk_norm: whether each query and key head goes through an RMS norm of its own.
        tied_head: whether the head is the embedding.

    Raises:
        ModelError: the numbers do not make a model.
    """

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope_base: float
    rope_inverse_frequencies: tuple[float, ...]
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_head: bool

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"unknown model family {self.family!r}", hint=f"known: {', '.join(FAMILIES)}")
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise ModelError(f"{name} is {value}; it must lie between 1 and {largest}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ModelError(f"a head of {self.head_dim} dimensions cannot be rotated in pairs")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"norm epsilon is {self.norm_eps}; it must lie between 0 and 1")
        if not (self.rope_base > 0 and math.isfinite(self.rope_base)):
            raise ModelError(f"rotary base is {self.rope_base}; it must be positive and finite")
        if len(self.rope_inverse_frequencies) != self.head_dim // 2:
            raise ModelError(
                f"{len(self.rope_inverse_frequencies)} rotary frequencies for a head of {self.head_dim}; "
                f"{self.head_dim // 2} are needed"
            )
        if not all(0 < value < math.inf for value in self.rope_inverse_frequencies):
            raise ModelError("a rotary frequency is not positive and finite")


def config_from_hf(fields: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read the fields of a Hugging Face `config.json`, in its old form (`rope_scaling`) or new
    (`rope_parameters`).

    Args:
        fields: the parsed file.
        where: names the file in errors.

    Raises:
        ModelError: an unknown architecture, rotary scaling or variant, or a field that is missing or no
            number.
    """
    model_type = fields.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"{where}: unknown architecture {reprlib.repr(model_type)}",
            hint=f"known architectures: {', '.join(FAMILIES)}",
        )
    family = cast(Family, model_type)
    _refuse_variants(fields, where)
    heads = _integer(fields, "num_attention_heads", where)
    hidden = _integer(fields, "hidden_size", where)
    head_dim = _head_dim(fields, family, hidden, heads, where)
    context = _integer(fields, "max_position_embeddings", where)
    rope_base, frequencies = _rope(fields, head_dim, context, where)
    bias = _flag(fields, "attention_bias", where)
    return checked_config(
        where,
        family=family,
        num_layers=_integer(fields, "num_hidden_layers", where),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", where, default=heads),
        head_dim=head_dim,
        intermediate_size=_integer(fields, "intermediate_size", where),
        vocab_size=_integer(fields, "vocab_size", where),
        context_tokens=context,
        norm_eps=_number(fields, "rms_norm_eps", where, default=1e-6),
        rope_base=rope_base,
        rope_inverse_frequencies=frequencies,
        attention_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        qk_norm=family == "qwen3",
        tied_head=_flag(fields, "tie_word_embeddings", where),
    )


def checked_config(where: str, **fields: Any) -> DecoderConfig:
    """Make a configuration; its errors name the file that the fields came from.

    Raises:
        ModelError: the numbers do not make a model.
    """
    try:
        return DecoderConfig(**fields)
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}", hint=error.hint) from error


def _head_dim(fields: Mapping[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if fields.get("head_dim") is not None:
        return _integer(fields, "head_dim", where)
    if family == "qwen3":
        return 128
    if hidden % heads:
        raise ModelError(f"{where}: no head_dim, and hidden_size {hidden} does not divide by {heads} heads")
    return hidden // heads


def _refuse_variants(fields: Mapping[str, Any], where: str) -> None:
    """Fields that change what the model computes in a way the forward pass does not have."""
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            f"{where}: hidden_act {reprlib.repr(fields['hidden_act'])} is not supported; silu is"
        )
    if fields.get("quantization_config") is not None:
        raise ModelError(
            f"{where}: quantized safetensors are not supported",
            hint="use the unquantized model, or a GGUF file of it",
        )
    for name in ("mlp_bias", "use_sliding_window"):
        if fields.get(name):
            raise ModelError(f"{where}: {name} = {reprlib.repr(fields[name])} is not supported")
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ModelError(
            f"{where}: layer_types has other layers than full_attention, which are not supported"
        )


def _rope(
    fields: Mapping[str, Any], head_dim: int, context: int, where: str
) -> tuple[float, tuple[float, ...]]:
    """The rotary base and the scaled inverse frequencies."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{where}: rope_scaling is {reprlib.repr(scaling)}, not an object")
    nested = next((name for name, value in scaling.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise ModelError(f"{where}: rope settings of their own for {nested!r} are not supported")
    base = _number(fields, "rope_theta", where, default=10000.0)
    base = _number(scaling, "rope_theta", where, default=base)
    for settings in (fields, scaling):
        if _number(settings, "partial_rotary_factor", where, default=1.0) != 1.0:
            raise ModelError(f"{where}: partial_rotary_factor is not supported; every dimension is rotated")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not rope.is_base(base) or not 2 <= head_dim <= _LARGEST["head_dim"]:
        raise ModelError(f"{where}: rotary base {base} over {head_dim} dimensions makes no frequencies")
    frequencies = rope.inverse_frequencies(head_dim, base)
    if kind == "linear":
        factor = _number(scaling, "factor", where)
        if not rope.is_factor(factor):
            raise ModelError(f"{where}: the linear rope scaling has the factor {factor}")
        frequencies = rope.scale_linear(frequencies, factor)
    elif kind == "llama3":
        frequencies = rope.scale_llama3(frequencies, _llama3_scaling(scaling, fields, context, where))
    elif kind != "default":
        raise ModelError(
            f"{where}: unknown rope type {reprlib.repr(kind)}",
            hint="known rope types: default, linear, llama3",
        )
    return base, tuple(frequencies.tolist())


def _llama3_scaling(
    scaling: Mapping[str, Any], fields: Mapping[str, Any], context: int, where: str
) -> rope.Llama3Scaling:
    original_name = "original_max_position_embeddings"
    original = _integer(fields, original_name, where, default=context)
    result = rope.Llama3Scaling(
        factor=_number(scaling, "factor", where),
        low_freq_factor=_number(scaling, "low_freq_factor", where),
        high_freq_factor=_number(scaling, "high_freq_factor", where),
        original_context_tokens=_integer(scaling, original_name, where, default=original),
    )
    if not (rope.is_factor(result.factor) and 0 < result.low_freq_factor < result.high_freq_factor):
        raise ModelError(f"{where}: the llama3 rope scaling {reprlib.repr(scaling)} has factors out of order")
    return result


def _integer(fields: Mapping[str, Any], name: str, where: str, *, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**53:
        raise ModelError(f"{where}: {name} is {reprlib.repr(value)}; a positive whole number is needed")
    return value


def _number(fields: Mapping[str, Any], name: str, where: str, *, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ModelError(f"{where}: {name} is {reprlib.repr(value)}; a number is needed")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str, where: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{where}: {name} is {reprlib.repr(value)}; true or false is needed")
    return bool(value)
