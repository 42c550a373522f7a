"""Configurations, with `transformers` as the oracle of the rotary frequencies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quail.errors import ModelError
from quail.models.config import DecoderConfig, config_from_hf
from quail.models.gguf import config_from_gguf
from quail.models.gguf_file import read_gguf_header
from quail.models.safetensors_folder import read_config
from tests.models.conftest import FAMILIES
from tests.models.gguf_files import llama3_factors, write_gguf
from tests.models.tiny import LLAMA3_ROPE, Family

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def hf_frequencies(fields: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The inverse frequencies that `transformers` computes for these fields."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**{k: v for k, v in fields.items() if k != "model_type"})
    return np.asarray(LlamaRotaryEmbedding(config).inv_freq.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_those_of_transformers(family: Family, tiny: Callable[..., Path]) -> None:
    import transformers

    folder = tiny(family)
    config = read_config(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(
        config.rope_inverse_frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=5e-7
    )
    assert config.head_dim == model.config.head_dim if family != "qwen2" else config.head_dim == 16
    assert config.num_kv_heads == 2
    assert config.attention_bias is (family == "qwen2")
    assert config.qk_norm is (family == "qwen3")


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}},
        {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "factor": 32.0}},
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}, "head_dim": 128},
    ],
)
def test_old_and_new_forms_of_rope_settings(rope: dict[str, Any]) -> None:
    fields = {**LLAMA, **rope}
    expected = hf_frequencies(json.loads(json.dumps(fields)))
    np.testing.assert_allclose(config_from_hf(fields, "x").rope_inverse_frequencies, expected, rtol=5e-7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_the_same_configuration(
    family: Family, tied: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny(family, tied=tied)
    extra = {"rope_freqs.weight": llama3_factors(folder)} if family == "llama3" else {}
    path = write_gguf(folder, tmp_path / "model.gguf", extra=extra)
    found, expected = config_from_gguf(read_gguf_header(path)), read_config(folder)
    np.testing.assert_allclose(found.rope_inverse_frequencies, expected.rope_inverse_frequencies, rtol=5e-7)
    same = {"rope_inverse_frequencies": expected.rope_inverse_frequencies}
    assert DecoderConfig(**{**vars(found), **same}) == expected


def test_gguf_linear_scaling_divides_the_frequencies(tiny: Callable[..., Path], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf", keys=keys)
    plain = read_config(tiny("llama")).rope_inverse_frequencies
    scaled = config_from_gguf(read_gguf_header(path)).rope_inverse_frequencies
    np.testing.assert_allclose(np.array(plain) / 4, scaled, rtol=1e-7)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0.0"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "out of order"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_theta": -1}, "rotary base"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "15 dimensions"),
        ({"head_dim": 10**12}, "makes no frequencies"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 2}, "epsilon"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf({**LLAMA, **change}, "config.json")
    assert named in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "scaling factor"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 512}, "sliding_window"),
        ({"split.count": 3}, "split into 3"),
    ],
)
def test_gguf_variants_are_refused_by_name(
    keys: dict[str, Any], named: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf", keys=keys)
    with pytest.raises(ModelError, match=named):
        config_from_gguf(read_gguf_header(path))


@pytest.mark.parametrize("factors", [np.zeros(8), np.full(8, np.nan), np.ones(4)])
def test_unusable_frequency_factors_are_refused(
    factors: np.ndarray[Any, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_from_gguf(read_gguf_header(path))
