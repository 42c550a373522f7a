"""The default model as a folder in the form of Hugging Face, for peers that read no GGUF.

The weights are the GGUF file's, dequantized, as Quail itself runs them; written once for each dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from quail.config import EngineConfig
from quail.models.config import DecoderConfig
from quail.models.gguf_file import read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.registry import resolve


def model_files(config: EngineConfig, dtype: str) -> tuple[Path, Path]:
    """The folder with safetensors, configuration and tokenizer, and the GGUF file it was made of.

    Raises:
        ValueError: the model is no GGUF file of the Llama family.
    """
    source = resolve(config.model, config.cache_path).path
    if source.suffix != ".gguf":
        raise ValueError(f"{source}: the benchmark wants a GGUF file, which llama.cpp can read too")
    digest = hashlib.sha256(f"{source.resolve()} {source.stat().st_size}".encode()).hexdigest()[:12]
    folder = config.cache_path / "peers" / "weights" / f"{source.stem}-{digest}-{dtype}"
    if not (folder / "config.json").is_file():
        _write(folder, config, source, dtype)
    return folder, source


def _write(folder: Path, config: EngineConfig, source: Path, dtype: str) -> None:
    """Writes the folder under another name and renames it when whole."""
    import torch
    from safetensors.torch import save_file

    from quail.models.loader import load_model

    loaded = load_model(config.model, dtype=getattr(torch, dtype), cache_dir=config.cache_path)
    building = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in loaded.weights.items()}
    save_file(weights, building / "model.safetensors", metadata={"format": "pt"})
    tokenizer = tokenizer_from_gguf(read_gguf_header(source).metadata, str(source))
    (building / "tokenizer.json").write_text(tokenizer.json)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
    (building / "tokenizer_config.json").write_text(json.dumps(about, indent=2))
    (building / "config.json").write_text(json.dumps(hf_config(loaded.config, dtype), indent=2))
    os.rename(building, folder)


def hf_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A `config.json` of the Llama family.

    Raises:
        ValueError: another family, or scaled rotary frequencies.
    """
    base = [config.rope_base ** (-2 * pair / config.head_dim) for pair in range(config.head_dim // 2)]
    frequencies = config.rope_inverse_frequencies
    if config.family != "llama" or any(abs(a - b) > 1e-6 * b for a, b in zip(frequencies, base, strict=True)):
        raise ValueError("only Llama models without rotary scaling are written")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": dtype,
    }
