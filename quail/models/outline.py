"""A model without its weights: configuration, tokenizer, chat template, layout; torch is not needed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from quail.errors import ModelError
from quail.models import registry
from quail.models.chat import ChatPieces, chat_pieces
from quail.models.config import DecoderConfig
from quail.models.files import sha256_of_file
from quail.models.gguf import config_from_gguf
from quail.models.gguf_file import read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.safetensors_folder import read_config, read_tokenizer_source
from quail.models.tokenizer import Tokenizer, TokenizerSource


@dataclass(frozen=True)
class ModelOutline:
    """What decides about prompts and their cost.

    Attributes:
        name: alias, folder or file name, or hub id.
        revision: SHA-256 of all that the model is made of, or empty where it is not known.
        config: the model's shape.
        tokenizer: its tokenizer.
        source: what its files say about the tokenizer.
    """

    name: str
    revision: str
    config: DecoderConfig
    tokenizer: Tokenizer
    source: TokenizerSource

    @property
    def chat(self) -> ChatPieces | None:
        """What its chat template puts around a user's text, or None without a usable template."""
        return self._chat[0]

    @property
    def chat_problem(self) -> str:
        """Why `chat` is None."""
        return self._chat[1]

    @property
    def layout(self) -> registry.Layout:
        """The prompt layout that suits it."""
        known = registry.known_layout(self.name, self.revision)
        return known or registry.default_layout(self.name, self.revision, self.chat is not None)

    @functools.cached_property
    def _chat(self) -> tuple[ChatPieces | None, str]:
        """Rendered when it is first wanted: known models mostly do without."""
        if self.source.chat_template is None:
            return None, f"{self.name} has no chat template"
        try:
            return _chat_without_bos(self.source, self.tokenizer, self.name), ""
        except ModelError as error:
            return None, error.message


def outline_of(name: str, revision: str, config: DecoderConfig, source: TokenizerSource) -> ModelOutline:
    """Puts together what the files of a model say.

    Raises:
        ModelError: the tokenizer is damaged, or belongs to another model.
    """
    tokenizer = Tokenizer(source, name)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{name}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the embedding only "
            f"{config.vocab_size} rows",
            hint="the tokenizer belongs to another model",
        )
    return ModelOutline(name, revision, config, tokenizer, source)


def read_outline(spec: str, cache_dir: Path) -> ModelOutline | None:
    """The outline of a model whose files are here, None where they would have to be fetched first.

    Raises:
        ModelError: its files are not understood.
    """
    source = registry.resolve_local(spec, cache_dir.expanduser())
    if source is None:
        return None
    try:
        return _read(source.name, source.path, source.path.stat().st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=2)
def _read(name: str, path: Path, _changed_ns: int) -> ModelOutline:
    """Kept for the next explain, as long as the files stay as they are."""
    if path.is_dir():
        return outline_of(name, "", read_config(path), read_tokenizer_source(path))
    file = read_gguf_header(path)
    return outline_of(
        name, _revision_if_known(path), config_from_gguf(file), tokenizer_from_gguf(file.metadata, str(path))
    )


def _revision_if_known(path: Path) -> str:
    """The digest of a file that may be a known model's, by its size; else empty."""
    sizes = [known.member.member_bytes for known in registry.KNOWN_MODELS.values()]
    return sha256_of_file(path) if path.stat().st_size in sizes else ""


def _chat_without_bos(source: TokenizerSource, tokenizer: Tokenizer, name: str) -> ChatPieces:
    """The chat pieces; a BOS token that the template writes is taken off where `bos_ids` holds it already."""
    assert source.chat_template is not None
    pieces = chat_pieces(
        source.chat_template, bos_token=source.bos_token, eos_token=source.eos_token, where=name
    )
    if source.bos_token and tokenizer.bos_ids:
        return ChatPieces(pieces.opener.removeprefix(source.bos_token), pieces.closer)
    return pieces
