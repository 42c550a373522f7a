"""A model without its weights says the same as the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quail.models.loader import load_model
from quail.models.outline import read_outline
from tests.models.tiny import make_tiny


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_outline_equals_the_loaded_model(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "tiny", family)  # type: ignore[arg-type]
    loaded = load_model(folder, dtype=torch.float32, cache_dir=tmp_path)
    outline = read_outline(str(folder), tmp_path)
    assert outline is not None
    assert (outline.name, outline.config, outline.chat) == (loaded.name, loaded.config, loaded.chat)
    assert (outline.layout, outline.chat_problem) == (loaded.layout, loaded.chat_problem)
    text = ["Rain fell on the roofs."]
    assert outline.tokenizer.encode_plain(text)[0].tolist() == loaded.tokenizer.encode_plain(text)[0].tolist()
    assert read_outline(str(folder), tmp_path) is outline


def test_what_would_have_to_be_fetched_has_no_outline(tmp_path: Path) -> None:
    for spec in ("smollm2-135m", "owner/nothing-of-this-name", "no such thing"):
        assert read_outline(spec, tmp_path) is None
    assert not list(tmp_path.iterdir())
