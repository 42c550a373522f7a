"""Loaded weights, with `transformers` as the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quail.errors import ModelError
from quail.models.loader import LoadedModel, load_model
from tests.models.conftest import FAMILIES
from tests.models.gguf_files import folder_weights, llama3_factors, write_gguf
from tests.models.tiny import Family, make_tiny


def hf_weights(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as `transformers` has them in memory, without the head where it is the embedding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def load(path: Path, cache: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(str(path), dtype=dtype, cache_dir=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_as_in_transformers(
    family: Family, tied: bool, dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny(family, tied=tied)
    model = load(folder, tmp_path, dtype)
    assert model.config.tied_head is tied
    assert_same_weights(model.weights, hf_weights(folder, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_f32_gguf_loads_as_the_folder_it_was_written_from(
    family: Family, tied: bool, dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny(family, tied=tied)
    extra = {"rope_freqs.weight": llama3_factors(folder)} if family == "llama3" else {}
    path = write_gguf(folder, tmp_path / "model.gguf", extra=extra)
    assert_same_weights(load(path, tmp_path, dtype).weights, hf_weights(folder, dtype))


def test_shards_load_as_one_file(tiny: Callable[..., Path], tmp_path: Path) -> None:
    sharded = tiny("qwen2", shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same_weights(load(sharded, tmp_path).weights, hf_weights(sharded, torch.float32))
    assert_same_weights(load(sharded, tmp_path).weights, load(tiny("qwen2"), tmp_path).weights)


def test_query_and_key_biases_of_a_llama_gguf_are_put_back(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", "llama", settings={"attention_bias": True})
    path = write_gguf(folder, tmp_path / "model.gguf")
    model = load(path, tmp_path)
    assert model.config.attention_bias
    assert model.config.output_bias
    assert_same_weights(model.weights, hf_weights(folder, torch.float32))


def test_a_head_of_another_size_than_hidden_by_heads(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = load(tiny("qwen3"), tmp_path)
    assert (model.config.hidden_size, model.config.num_heads, model.config.head_dim) == (64, 4, 32)
    assert model.weights["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert model.weights["model.layers.0.self_attn.q_norm.weight"].shape == (32,)


def test_a_float16_folder_widens_exactly(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "half")
    halves = {name: torch.from_numpy(w).half() for name, w in folder_weights(folder).items()}
    safetensors.torch.save_file(halves, folder / "model.safetensors")
    found = load(folder, tmp_path).weights
    assert_same_weights(found, {name: tensor.float() for name, tensor in halves.items()})


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a single-file folder."""
    weights = {name: torch.from_numpy(w) for name, w in folder_weights(folder).items()}
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


def set_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_tied_model_may_carry_its_embedding_as_head(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert_same_weights(load(folder, tmp_path).weights, load(tiny("llama"), tmp_path).weights)


def test_a_tie_flag_that_contradicts_the_head_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    untied = copied(tiny("llama", tied=False), tmp_path / "a")
    set_config(untied, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"ties the head .* lm_head\.weight differs"):
        load(untied, tmp_path)
    headless = copied(tiny("llama"), tmp_path / "b")
    set_config(headless, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        load(headless, tmp_path)


def test_all_faults_of_the_tensors_are_listed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("qwen2"), tmp_path / "m")

    def damage(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.gate_proj.wait"] = weights.pop("model.layers.1.mlp.gate_proj.weight")
        del weights["model.layers.2.self_attn.k_proj.bias"]
        weights["model.norm.weight"] = torch.ones(63)

    rewrite(folder, damage)
    with pytest.raises(ModelError) as caught:
        load(folder, tmp_path)
    message = str(caught.value)
    assert "2 missing: model.layers.1.mlp.gate_proj.weight, model.layers.2.self_attn.k_proj.bias" in message
    assert "1 unexpected: model.layers.1.mlp.gate_proj.wait" in message
    assert "1 misshapen: model.norm.weight is [63], not [64]" in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"drop": ("blk.1.attn_k.bias",)}, r"1 missing: blk\.1\.attn_k\.bias"),
        ({"drop": ("output_norm.weight",)}, r"1 missing: output_norm\.weight"),
        (
            {"rename": {"blk.0.ffn_up.weight": "blk.0.ffn_upp.weight"}},
            r"1 unexpected: blk\.0\.ffn_upp\.weight",
        ),
        ({"drop": ("token_embd.weight",)}, r"token_embd\.weight is missing"),
    ],
)
def test_gguf_tensors_are_checked_by_their_own_names(
    arguments: dict[str, object], named: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny("qwen2"), tmp_path / "model.gguf", pre="qwen2", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=named):
        load(path, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["folder", "folder as bfloat16", "gguf"])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, kind: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    rewrite(folder, lambda w: w["model.layers.1.mlp.up_proj.weight"][3].fill_(value))
    path = write_gguf(folder, tmp_path / "model.gguf") if kind == "gguf" else folder
    dtype = torch.bfloat16 if kind == "folder as bfloat16" else torch.float32
    for _ in range(2):  # the second time must not find a cached "yes"
        with pytest.raises(ModelError, match=r"64 of 8192 values of tensor model\.layers\.1\.mlp\.up_proj"):
            load(path, tmp_path, dtype)


def test_a_value_too_large_for_the_dtype_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    rewrite(folder, lambda w: w["model.norm.weight"].fill_(1e6))
    with pytest.raises(ModelError, match="wider range"):
        load(folder, tmp_path, torch.float16)
    load(folder, tmp_path, torch.bfloat16)


def test_integer_weights_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    rewrite(folder, lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I8"):
        load(folder, tmp_path)


def test_pickles_are_never_read(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load(folder, tmp_path)


def test_a_shard_index_is_not_trusted(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("qwen2", shard_bytes=100_000), tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    for name in ("../other.safetensors", "/etc/passwd", "model.bin"):
        first = next(iter(original["weight_map"]))
        index.write_text(json.dumps({"weight_map": {**original["weight_map"], first: name}}))
        with pytest.raises(ModelError, match="no safetensors file of this folder"):
            load(folder, tmp_path)
    index.write_text(json.dumps(original))
    (folder / sorted(set(original["weight_map"].values()))[1]).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-\d+\.safetensors, one of \d+, is missing"):
        load(folder, tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", "llama", vocab=300)
    other = make_tiny(tmp_path / "n", "llama", vocab=512)
    shutil.copy(other / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(ModelError, match="ids up to 511, but the embedding only 300 rows"):
        load(folder, tmp_path)


def test_the_revision_follows_every_file(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    first = load(folder, tmp_path).revision
    assert load(copied(folder, tmp_path / "same"), tmp_path).revision == first
    rewrite(folder, lambda w: w["model.norm.weight"][0].add_(1))
    second = load(folder, tmp_path).revision
    set_config(folder, rms_norm_eps=1e-6)
    third = load(folder, tmp_path).revision
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_unsupported_dtypes_are_refused(
    dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="float32, bfloat16 or float16"):
        load(tiny("llama"), tmp_path, dtype)


def test_changing_loaded_weights_does_not_reach_the_files(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    load(folder, tmp_path).weights["model.norm.weight"].fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before
