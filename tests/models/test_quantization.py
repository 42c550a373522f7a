"""Every number format of GGUF, with the `gguf` package's own dequantization as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quail.errors import ModelError
from quail.models.gguf import config_from_gguf, read_tensor
from quail.models.gguf_file import TENSOR_TYPES, read_gguf_header
from quail.models.loader import load_model
from tests.models.gguf_files import folder_weights, permuted, write_gguf
from tests.models.tiny import make_tiny

QUANTIZABLE = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, elements, num_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, num_bytes))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_float32_is_the_exact_dequantization_and_bfloat16_that_rounded(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    folder = tiny("llama", tied=False)
    quantized = dict.fromkeys(
        ["_q.weight", "_k.weight", "ffn_up.weight", "_embd.weight", "output.weight"], kind
    )
    path = write_gguf(folder, tmp_path / "model.gguf", types=quantized)
    found = load_model(str(path), dtype=torch.float32, cache_dir=tmp_path).weights
    rounded = load_model(str(path), dtype=torch.bfloat16, cache_dir=tmp_path).weights
    for hf_name, weight in folder_weights(folder).items():
        expected = weight
        if any(
            part in hf_name for part in ("q_proj", "k_proj", "o_proj", "up_proj", "embed_tokens", "lm_head")
        ):
            num_heads = {"q_proj": 4, "k_proj": 2}.get(hf_name.split(".")[-2], 0)
            stored = permuted(weight, num_heads) if num_heads else weight
            expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
            if num_heads:  # the inverse permutation, spelled out
                pairs = expected.reshape(num_heads, -1, 2, weight.shape[1])
                expected = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(weight.shape)
        assert np.array_equal(found[hf_name].numpy(), expected), hf_name
        assert torch.equal(rounded[hf_name], torch.from_numpy(expected).bfloat16()), hf_name


def k_quant_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Random blocks whose scales are finite float16 numbers."""
    random = np.random.default_rng(int(kind))
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for offset in scales:
        halves = random.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_dequantize_as_the_gguf_package_does(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    folder = make_tiny(tmp_path / "m", "qwen2", hidden=256, layers=1)
    path = write_gguf(folder, tmp_path / "model.gguf", pre="qwen2")
    raw = k_quant_blocks(kind, 512, 256)
    path = _with_raw_tensor(path, tmp_path / "k.gguf", "blk.0.ffn_up.weight", raw, kind)
    file = read_gguf_header(path)
    assert file.tensors["blk.0.ffn_up.weight"].type_name == name
    config = config_from_gguf(file)
    found = read_tensor(file, config, "model.layers.0.mlp.up_proj.weight", torch.float32).numpy()
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(found, expected)


def _with_raw_tensor(
    path: Path, to: Path, name: str, raw: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> Path:
    """Copy a GGUF file with one tensor replaced by raw blocks."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, "qwen2")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_large_tensors_are_dequantized_in_pieces(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf", types={"_embd.weight": kind})
    file = read_gguf_header(path)
    config = config_from_gguf(file)
    name = "model.embed_tokens.weight"
    whole = read_tensor(file, config, name, torch.float32)
    monkeypatch.setattr("quail.models.gguf._DEQUANTIZED_ELEMENTS", 1000)
    assert torch.equal(read_tensor(file, config, name, torch.float32), whole)


def test_other_number_formats_are_refused_by_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf")
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert raw[at : at + 4] == (0).to_bytes(4, "little")
    raw[at : at + 4] = (19).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has the unsupported type number 19"):
        read_gguf_header(path)
