"""Load a model by name: its configuration, weights, tokenizer and chat template, checked throughout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quail.errors import ModelError
from quail.models import gguf, registry
from quail.models.chat import ChatPieces
from quail.models.config import DecoderConfig
from quail.models.converted import ConvertedModel, converted_folder, lock_of, read_converted, write_converted
from quail.models.files import DigestIndex
from quail.models.gguf_file import read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.outline import ModelOutline, outline_of
from quail.models.safetensors_file import torch_dtype
from quail.models.safetensors_folder import find_weights, read_config, read_tokenizer_source, weight_files
from quail.models.tokenizer import Tokenizer, TokenizerSource
from quail.models.weights import check_finite, tensor_shapes

__all__ = ["ChatPieces", "LoadedModel", "load_model"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SETTINGS_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory (its weights mapped from files where possible; treat them as read-only).

    Attributes:
        name: alias, folder or file name, or hub id.
        revision: SHA-256 of all that the model was loaded from.
        config: its shape.
        weights: by the names of Hugging Face's Llama; no head where it is tied.
        tokenizer: its tokenizer.
        outline: the model without its weights.
    """

    name: str
    revision: str
    config: DecoderConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    outline: ModelOutline

    @property
    def chat(self) -> ChatPieces | None:
        """What its chat template puts around a user's text, or None without a usable template."""
        return self.outline.chat

    @property
    def chat_problem(self) -> str:
        """Why `chat` is None."""
        return self.outline.chat_problem

    @property
    def layout(self) -> registry.Layout:
        """The prompt layout that suits it, "chat" or "completion"."""
        return self.outline.layout


def load_model(
    spec: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    cache_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        spec: an alias, a path to a GGUF file or a model folder, or a Hugging Face id.
        dtype: of the weights: float32, bfloat16 or float16. Weights stored otherwise are converted once and
            kept in the cache; float32 of a GGUF file is its exact dequantization, the others are that
            rounded.
        cache_dir: where fetched and converted files are kept.
        progress: is told what is being done.

    Raises:
        ModelError: there is no such model; it is damaged, incomplete or of an unknown kind; its weights are
            not finite in that dtype.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"weights of {dtype} are not supported", hint="use float32, bfloat16 or float16")
    cache_dir = cache_dir.expanduser()
    loading = _Loading(dtype, cache_dir, DigestIndex(cache_dir / "digests.json"), progress)
    source = registry.resolve(os.fspath(spec), cache_dir, progress)
    try:
        if source.path.is_dir():
            revision, model = _load_folder(source.path, loading)
        else:
            revision = loading.digests.sha256(source.path)
            model = _load_converted(revision, loading, lambda: _open_gguf(source.path, dtype))
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error.strerror or error}") from error
    return _assembled(source.name, revision, model)


@dataclass(frozen=True)
class _Loading:
    """What one call of `load_model` works with."""

    dtype: torch.dtype
    cache_dir: Path
    digests: DigestIndex
    progress: Callable[[str], None] | None

    def say(self, message: str) -> None:
        if self.progress is not None:
            self.progress(message)


@dataclass(frozen=True)
class _Opened:
    """A model whose headers are checked and whose tensors can be read one by one, in the wanted dtype."""

    config: DecoderConfig
    tokenizer: TokenizerSource
    read: Callable[[str], torch.Tensor]
    where: str


def _open_gguf(path: Path, dtype: torch.dtype) -> _Opened:
    file = read_gguf_header(path)
    config = gguf.config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file.metadata, str(path))
    return _Opened(config, tokenizer, lambda name: gguf.read_tensor(file, config, name, dtype), str(path))


def _load_folder(folder: Path, loading: _Loading) -> tuple[str, ConvertedModel]:
    """Map a folder's weights as they are if they have the wanted dtype, else convert them."""
    config = read_config(folder)
    stored = find_weights(folder, config)
    tokenizer = read_tokenizer_source(folder)
    files = weight_files(folder)
    revision = _folder_revision(folder, files, loading.digests)
    if {torch_dtype(name) for name in stored.type_names} != {loading.dtype}:
        opened = _Opened(config, tokenizer, lambda name: stored.map(name).to(loading.dtype), str(folder))
        return revision, _load_converted(revision, loading, lambda: opened)
    if not all(loading.digests.is_finite(file) for file in files):
        for name in stored.places:
            check_finite(name, stored.map(name), str(folder))
        for file in files:
            loading.digests.mark_finite(file)
    return revision, ConvertedModel(config, tokenizer, {name: stored.map(name) for name in stored.places})


def _folder_revision(folder: Path, weight_paths: list[Path], digests: DigestIndex) -> str:
    paths = [folder / name for name in _SETTINGS_FILES] + weight_paths
    lines = [f"{path.name} {digests.sha256(path)}\n" for path in paths if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _load_converted(revision: str, loading: _Loading, open_source: Callable[[], _Opened]) -> ConvertedModel:
    """Map the converted model in the cache, converting it first if it is not there or damaged."""
    folder = converted_folder(loading.cache_dir, revision, loading.dtype)
    model = read_converted(folder, loading.dtype, loading.digests)
    if model is not None:
        return model
    with lock_of(folder):
        model = read_converted(folder, loading.dtype, loading.digests)
        if model is not None:
            return model
        opened = open_source()
        Tokenizer(opened.tokenizer, opened.where)  # refused before the long part
        read = _checked(opened, loading)
        try:
            write_converted(folder, opened.config, opened.tokenizer, loading.dtype, read, loading.digests)
            model = read_converted(folder, loading.dtype, loading.digests)
        except OSError as error:
            loading.say(f"the converted weights cannot be kept ({error.strerror or error}); going on without")
    if model is None:
        weights = {name: read(name) for name in tensor_shapes(opened.config)}
        model = ConvertedModel(opened.config, opened.tokenizer, weights)
    return model


def _checked(opened: _Opened, loading: _Loading) -> Callable[[str], torch.Tensor]:
    """The opened model's tensors, refused if not finite, with a word on how far it is."""
    names = list(tensor_shapes(opened.config))
    places = {name: index for index, name in enumerate(names, 1)}

    def read(name: str) -> torch.Tensor:
        loading.say(f"converting weights {places[name]}/{len(names)}")
        tensor = opened.read(name)
        check_finite(name, tensor, opened.where)
        return tensor

    return read


def _assembled(name: str, revision: str, model: ConvertedModel) -> LoadedModel:
    outline = outline_of(name, revision, model.config, model.tokenizer)
    return LoadedModel(name, revision, model.config, model.weights, outline.tokenizer, outline)
