"""Hugging Face model folders: `config.json`, safetensors files (sharded or not), tokenizer; no pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quail.errors import ModelError
from quail.models.config import DecoderConfig, config_from_hf
from quail.models.tokenizer import TokenizerSource
from quail.models.weights import EMBEDDING, HEAD, check_tensors, tensor_shapes

if TYPE_CHECKING:
    import torch

_LARGEST_JSON_BYTES = 1 << 28
_INDEX = "model.safetensors.index.json"
_FLOATS = ("torch.float32", "torch.float16", "torch.bfloat16")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: the file is missing, too large, or no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes are too many for this file")
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: holds {type(fields).__name__}, not an object")
    return fields


def read_config(folder: Path) -> DecoderConfig:
    """The configuration in a model folder.

    Raises:
        ModelError: `config.json` is missing or not understood.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json; this is not a model folder")
    return config_from_hf(read_json(path), str(path))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / _INDEX
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"; {pickles[0]} is a pickle, which can run code and is never read" if pickles else ""
        raise ModelError(f"{folder}: neither model.safetensors nor {_INDEX}{found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: names the file {name!r}, which is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: the file {name}, one of {len(names)}, is missing")
    return [folder / name for name in names]


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a safetensors file into memory; nothing is read before it is used.

    Raises:
        ModelError: the file is damaged or was cut off.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file: {error}",
            hint="the file was cut off or damaged; fetch it again",
        ) from error


def map_folder(folder: Path, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Map all weights of a model folder, checked to be exactly those of the configuration.

    A head beside a tied embedding is accepted, and dropped, if it equals the embedding.

    Raises:
        ModelError: missing, unexpected, misshapen or doubled tensors, a wrong number format, or a head that
            contradicts the tie flag.
    """
    import torch

    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in map_tensors(path).items():
            if name in weights:
                raise ModelError(f"{folder}: tensor {name} is in two files")
            # Old files hold the rotary frequencies too, which the configuration gives.
            if not name.endswith(".self_attn.rotary_emb.inv_freq"):
                weights[name] = tensor
    if config.tied_head and HEAD in weights:
        if EMBEDDING not in weights or not torch.equal(weights[HEAD], weights[EMBEDDING]):
            raise ModelError(
                f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}",
                hint="set tie_word_embeddings to false if the file is right",
            )
        del weights[HEAD]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(shapes, tensor_shapes(config), str(folder))
    for name, tensor in weights.items():
        if str(tensor.dtype) not in _FLOATS:
            raise ModelError(
                f"{folder}: tensor {name} is {tensor.dtype}; float32, float16 and bfloat16 are read"
            )
    return weights


def read_tokenizer_source(folder: Path) -> TokenizerSource:
    """What the files of a model folder say about its tokenizer.

    Raises:
        ModelError: `tokenizer.json` is missing, or a file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json",
            hint="save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    try:
        if path.stat().st_size > _LARGEST_JSON_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size} bytes are too many for this file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    add_bos = settings.get("add_bos_token")
    return TokenizerSource(
        json=text,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        chat_template=_chat_template(folder, settings),
    )


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
