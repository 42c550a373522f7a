"""Weights that were converted once (dequantized, or rounded to another dtype), kept so that later boots map
them.

A folder `<cache>/converted/<digest of the source>-<dtype>/` holds `weights.safetensors`, `tokenizer.json` and
`model.json`, which describes the other two. It is written under another name and renamed when whole. When
read, sizes and digests are checked; a folder that fails is built again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quail.errors import ModelError
from quail.models.config import DecoderConfig
from quail.models.files import DigestIndex, exclusive, sync_folder, write_atomically
from quail.models.safetensors_file import map_file, read_header, torch_dtype
from quail.models.tokenizer import TokenizerSource
from quail.models.weights import check_tensors, tensor_shapes, write_safetensors

_FORMAT = 1


@dataclass(frozen=True)
class ConvertedModel:
    """A model as its converted folder holds it; the weights are mapped into memory."""

    config: DecoderConfig
    tokenizer: TokenizerSource
    weights: dict[str, torch.Tensor]


def converted_folder(cache_dir: Path, revision: str, dtype: torch.dtype) -> Path:
    """Where the conversion of a source of that digest lies."""
    return cache_dir / "converted" / f"{revision}-{str(dtype).removeprefix('torch.')}"


def read_converted(folder: Path, dtype: torch.dtype, digests: DigestIndex) -> ConvertedModel | None:
    """Map a converted model, or return None if there is none that is whole and right."""
    try:
        fields = json.loads((folder / "model.json").read_bytes())
        if fields["format"] != _FORMAT:
            return None
        tokenizer_json = (folder / "tokenizer.json").read_bytes()
        weights_path = folder / "weights.safetensors"
        if hashlib.sha256(tokenizer_json).hexdigest() != fields["tokenizer_sha256"]:
            return None
        if digests.sha256(weights_path) != fields["weights_sha256"]:
            return None
        frequencies = tuple(fields["config"].pop("rope_inverse_frequencies"))
        config = DecoderConfig(**fields["config"], rope_inverse_frequencies=frequencies)
        tokenizer = TokenizerSource(json=tokenizer_json.decode(), **fields["tokenizer"])
        stored = read_header(weights_path)
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        check_tensors(shapes, tensor_shapes(config), str(folder))
        if any(torch_dtype(tensor.type_name) != dtype for tensor in stored.values()):
            return None
        weights = map_file(weights_path, stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ModelError):
        return None
    return ConvertedModel(config, tokenizer, weights)


def write_converted(
    folder: Path,
    config: DecoderConfig,
    tokenizer: TokenizerSource,
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
    digests: DigestIndex,
) -> None:
    """Write a converted model, replacing what is there. The caller holds the folder's lock.

    Args:
        folder: from `converted_folder`.
        config: of the model.
        tokenizer: of the model.
        dtype: of every tensor.
        read: gives a tensor in that dtype by its name.
        digests: learns the digest of the weights.

    Raises:
        OSError: no room, or the folder cannot be written.
    """
    building, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    try:
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir(parents=True)
        weights_sha256 = write_safetensors(
            building / "weights.safetensors", tensor_shapes(config), dtype, read
        )
        tokenizer_json = tokenizer.json.encode()
        write_atomically(building / "tokenizer.json", tokenizer_json)
        fields = {
            "format": _FORMAT,
            "config": dataclasses.asdict(config),
            "tokenizer": {k: v for k, v in dataclasses.asdict(tokenizer).items() if k != "json"},
            "tokenizer_sha256": hashlib.sha256(tokenizer_json).hexdigest(),
            "weights_sha256": weights_sha256,
        }
        write_atomically(building / "model.json", json.dumps(fields, indent=1).encode())
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, old)
        os.rename(building, folder)
        sync_folder(folder.parent)
        digests.learn(folder / "weights.safetensors", weights_sha256)
    finally:
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)


def lock_of(folder: Path) -> contextlib.AbstractContextManager[None]:
    """The lock under which a converted folder is written."""
    return exclusive(folder.with_name(f"{folder.name}.lock"))
