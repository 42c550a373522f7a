"""GGUF files for tests, written by the `gguf` package from Hugging Face folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

CONTROL, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL


def permuted(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Query or key rows in the order of an interleaved rotary embedding."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def folder_weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a float32 model folder."""
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= safetensors.numpy.load_file(path)
    return weights


def write_gguf(
    folder: Path,
    path: Path,
    *,
    pre: str | None = "smollm",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    rename: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    keys: dict[str, int | float | str | bool] | None = None,
) -> Path:
    """Write the model in `folder` as a GGUF file.

    Args:
        folder: a float32 model of `make_tiny`.
        path: the file to write.
        pre: tag of the pre-tokenizer; left out when None.
        types: number formats by the ending of a GGUF tensor name; F32 for all others.
        rename: new names of GGUF tensors.
        drop: GGUF tensors to leave out.
        extra: more tensors.
        keys: more metadata, e.g. `{"llama.expert_count": 8}`.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    _add_tokenizer(writer, folder, config["vocab_size"], pre)
    for key, value in (keys or {}).items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        kinds[type(value)](key, value)  # type: ignore[operator]
    _add_tensors(writer, folder, config, types or {}, rename or {}, drop)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int, pre: str | None) -> None:
    fields = json.loads((folder / "tokenizer.json").read_text())
    control = {token["content"] for token in fields["added_tokens"]}
    tokens = sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].__getitem__)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in control else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def _add_tensors(
    writer: gguf.GGUFWriter,
    folder: Path,
    config: dict[str, Any],
    types: dict[str, gguf.GGMLQuantizationType],
    rename: dict[str, str],
    drop: tuple[str, ...],
) -> None:
    architecture = {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
    }[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name, weight in folder_weights(folder).items():
        if config["model_type"] == "llama" and "q_proj" in hf_name:
            weight = permuted(weight, config["num_attention_heads"])
        if config["model_type"] == "llama" and "k_proj" in hf_name:
            weight = permuted(weight, config["num_key_value_heads"])
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None or name in drop:
            assert name is not None, hf_name
            continue
        kind = next((kind for ending, kind in types.items() if name.endswith(ending)), None)
        name = rename.get(name, name)
        if kind is None:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)


def llama3_factors(folder: Path) -> np.ndarray[Any, Any]:
    """The `rope_freqs.weight` of a model with Llama-3 scaling, by the formula of llama.cpp's converter."""
    config = json.loads((folder / "config.json").read_text())
    rope, dim = config["rope_parameters"], config["head_dim"]
    frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    context, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def header(*, tensors: int, keys: int, rest: bytes = b"", magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """The first bytes of a GGUF file with any counts, for hostile files."""
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw
