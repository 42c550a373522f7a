"""Which tensors a decoder must have, and a file of them written piece by piece."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quail.errors import ModelError
from quail.models.config import DecoderConfig

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_STORED_NAMES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int32": "I32",
    "torch.int8": "I8",
}
_SHOWN_NAMES = 8


def num_weights(config: DecoderConfig) -> int:
    """Elements of all tensors of a decoder, a tied head counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a decoder, by the names of Hugging Face's Llama; no head where it is tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer["self_attn.q_proj.bias"] = (q_rows,)
        layer["self_attn.k_proj.bias"] = (kv_rows,)
        layer["self_attn.v_proj.bias"] = (kv_rows,)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = (config.head_dim,)
        layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse a model whose tensors are not exactly the expected ones.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape; the message lists them.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    faults = [
        f"{len(names)} {kind}: {_listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if faults:
        raise ModelError(
            f"{where}: the tensors do not fit the configuration; " + "; ".join(faults),
            hint="the file is incomplete, or its configuration belongs to another model",
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def check_finite(name: str, tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Raises:
        ModelError: naming the tensor and how many of its values are not finite.
    """
    import torch

    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    num_bad = int((~torch.isfinite(tensor)).sum())
    raise ModelError(
        f"{where}: {num_bad} of {tensor.numel()} values of tensor {name} are not finite in {tensor.dtype}",
        hint="the file is damaged, or the model needs a dtype of wider range",
    )


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
) -> str:
    """Write a safetensors file tensor by tensor, so that only one is in memory, and return the file's
    SHA-256.

    Args:
        path: the file, written and flushed to disk.
        shapes: the tensors in the order of the file.
        dtype: of every tensor, or of each by its name.
        read: gives a tensor of that shape and dtype.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in _safetensors_blocks(shapes, dtype, read):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _safetensors_blocks(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
) -> Iterator[memoryview | bytes]:
    import torch

    dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, torch.dtype) else dtype
    header, position = {}, 0
    for name, shape in shapes.items():
        stop = position + int(np.prod(shape, dtype=np.int64)) * dtypes[name].itemsize
        header[name] = {
            "dtype": _STORED_NAMES[str(dtypes[name])],
            "shape": list(shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins on a cache line
    yield len(text).to_bytes(8, "little") + text
    for name, shape in shapes.items():
        tensor = read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtypes[name]), name
        raw: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
        yield raw.data
