"""Facts about a model from the headers of its files; no weights are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quail.models.config import DecoderConfig
from quail.models.gguf import config_from_gguf
from quail.models.gguf_file import read_gguf_header
from quail.models.safetensors_file import torch_dtype
from quail.models.safetensors_folder import find_weights, read_config, read_tokenizer_source, weight_files
from quail.models.weights import tensor_shapes


@dataclass(frozen=True)
class ModelFacts:
    """What the headers say; the fields are those of `ModelInfo`."""

    description: str
    licence: str
    num_parameters: int
    num_bytes: int
    has_chat_template: bool
    details: dict[str, str | int | float]


def describe_files(path: Path) -> ModelFacts:
    """Describe a GGUF file or a model folder; its tensors are checked as at loading, but not read.

    Raises:
        ModelError: the files are not understood or not whole.
    """
    return _describe_folder(path) if path.is_dir() else _describe_gguf(path)


def _describe_folder(folder: Path) -> ModelFacts:
    config = read_config(folder)
    type_names = find_weights(folder, config).type_names
    dtypes = sorted(str(torch_dtype(name)).removeprefix("torch.") for name in type_names)
    return ModelFacts(
        description=f"{config.family} model in safetensors files",
        licence="unknown",
        num_parameters=_num_parameters(config),
        num_bytes=sum(file.stat().st_size for file in weight_files(folder)),
        has_chat_template=read_tokenizer_source(folder).chat_template is not None,
        details={**_details(config), "stored as": ", ".join(dtypes)},
    )


def _describe_gguf(path: Path) -> ModelFacts:
    file = read_gguf_header(path)
    config = config_from_gguf(file)
    types = sorted({tensor.type_name for tensor in file.tensors.values()})
    return ModelFacts(
        description=str(file.metadata.get("general.name", f"{config.family} model in a GGUF file")),
        licence=str(file.metadata.get("general.license", "unknown")),
        num_parameters=_num_parameters(config),
        num_bytes=path.stat().st_size,
        has_chat_template="tokenizer.chat_template" in file.metadata,
        details={**_details(config), "stored as": ", ".join(types)},
    )


def _num_parameters(config: DecoderConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _details(config: DecoderConfig) -> dict[str, str | int | float]:
    return {
        "family": config.family,
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "query heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "head dimension": config.head_dim,
        "vocabulary": config.vocab_size,
        "context tokens": config.context_tokens,
        "tied head": "yes" if config.tied_head else "no",
    }
