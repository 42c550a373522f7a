"""Hugging Face model folders: `config.json`, safetensors files (sharded or not), tokenizer; no pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quail.errors import ModelError
from quail.models.config import DecoderConfig, config_from_hf
from quail.models.safetensors_file import FLOATS, StoredTensor, map_file, read_header
from quail.models.tokenizer import TokenizerSource
from quail.models.weights import EMBEDDING, HEAD, check_tensors, tensor_shapes

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"
_LARGEST_BYTES = 1 << 24
_LARGEST_TOKENIZER_BYTES = 1 << 26
"""The largest tokenizers in use have 35 MB; objects of Python take up to 25 times the text."""

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Endings of files that hold pickles, which run code when they are read."""


def check_name(path: Path) -> None:
    """Refuse a file that is no model by itself, by its name.

    Raises:
        ModelError: it is a pickle, or one file of a folder.
    """
    if path.is_dir():
        return
    if path.suffix.lower() == ".safetensors":
        raise ModelError(f"{path}: one file of a model", hint="name its folder, which holds config.json too")
    if path.suffix.lower() in PICKLES:
        raise ModelError(
            f"{path}: {path.name} is a pickle, which can run code and is never read", hint=PICKLE_HINT
        )


PICKLE_HINT = (
    "use a safetensors folder or a GGUF file of the model; transformers writes safetensors: "
    "model.save_pretrained(folder, safe_serialization=True)"
)


def find_file(folder: Path, name: str) -> Path | None:
    """A file of a model folder, None where there is none.

    Raises:
        ModelError: it is a link that leads out of the folder. (Snapshots of the hub's cache link to the blobs
            beside them.)
    """
    path = folder / name
    if not path.is_file():
        return None
    if path.is_symlink():
        real, home = path.resolve(), folder.resolve()
        if real.parent not in (home, home.parent.parent / "blobs"):
            raise ModelError(
                f"{path}: links to {real}, outside the model's folder",
                hint="put the file itself into the folder",
            )
    return path


def read_text(path: Path, largest_bytes: int = _LARGEST_BYTES) -> str:
    """Read a text file.

    Raises:
        ModelError: the file is too large, cannot be read, or is not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > largest_bytes:
            raise ModelError(
                f"{path}: {size} bytes are too many for this file; at most {largest_bytes} are read"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: the file cannot be read, is too large, or is no JSON object.
    """
    try:
        fields = json.loads(read_text(path))
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
    path = find_file(folder, "config.json")
    if path is None:
        raise ModelError(f"{folder}: no config.json; this is not a model folder")
    return config_from_hf(read_json(path), str(path))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    single = find_file(folder, "model.safetensors")
    if single is not None:
        return [single]
    index = find_file(folder, _INDEX)
    if index is None:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES)
        found = f"; {pickles[0]} is a pickle, which can run code and is never read" if pickles else ""
        raise ModelError(
            f"{folder}: neither model.safetensors nor {_INDEX}{found}", hint=PICKLE_HINT if pickles else None
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: names the file {name!r}, which is no safetensors file of this folder")
        if find_file(folder, name) is None:
            raise ModelError(f"{folder}: the file {name}, one of {len(names)}, is missing")
    return [folder / name for name in names]


@dataclass(frozen=True)
class StoredWeights:
    """Where the weights of a model folder lie, by name; checked to be exactly those of a configuration."""

    places: Mapping[str, tuple[Path, StoredTensor]]

    @property
    def type_names(self) -> set[str]:
        """The number formats that occur."""
        return {stored.type_name for _, stored in self.places.values()}

    def map(self, name: str) -> torch.Tensor:
        """A weight, mapped into memory anew: what was read of it leaves memory when it is let go."""
        path, stored = self.places[name]
        return map_file(path, {name: stored})[name]


def find_weights(folder: Path, config: DecoderConfig) -> StoredWeights:
    """Find all weights of a model folder and check their headers against the configuration.

    A head beside a tied embedding is accepted, and dropped, if it equals the embedding.

    Raises:
        ModelError: missing, unexpected, misshapen or doubled tensors, a wrong number format, or a head that
            contradicts the tie flag.
    """
    import torch

    places: dict[str, tuple[Path, StoredTensor]] = {}
    for path in weight_files(folder):
        for name, stored in read_header(path).items():
            if name in places:
                raise ModelError(f"{folder}: tensor {name} is in two files")
            # Old files hold the rotary frequencies too, which the configuration gives.
            if not name.endswith(".self_attn.rotary_emb.inv_freq"):
                places[name] = path, stored
    for name, (_, stored) in places.items():
        if stored.type_name not in FLOATS:
            raise ModelError(
                f"{folder}: tensor {name} is {stored.type_name}; {', '.join(FLOATS)} are read",
                hint="use the unquantized model, or a GGUF file of it",
            )
    weights = StoredWeights(places)
    if config.tied_head and HEAD in places:
        if EMBEDDING not in places or not torch.equal(weights.map(HEAD), weights.map(EMBEDDING)):
            raise ModelError(
                f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}",
                hint="set tie_word_embeddings to false if the file is right",
            )
        del places[HEAD]
    shapes = {name: stored.shape for name, (_, stored) in places.items()}
    check_tensors(shapes, tensor_shapes(config), str(folder))
    return weights


def read_tokenizer_source(folder: Path) -> TokenizerSource:
    """What the files of a model folder say about its tokenizer.

    Raises:
        ModelError: `tokenizer.json` is missing, or a file is damaged.
    """
    path = find_file(folder, _TOKENIZER)
    if path is None:
        raise ModelError(
            f"{folder}: no {_TOKENIZER}",
            hint="save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    text = read_text(path, _LARGEST_TOKENIZER_BYTES)
    settings_path = find_file(folder, "tokenizer_config.json")
    settings = {} if settings_path is None else read_json(settings_path)
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
    path = find_file(folder, "chat_template.jinja")
    if path is not None:
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
