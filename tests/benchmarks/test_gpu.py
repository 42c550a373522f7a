"""The GPU benchmark: says so without a card, and all of its code runs on a CPU at tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main
from quail.config import EngineConfig
from quail.models.config import config_from_hf
from quail.models.weights import tensor_shapes

TINY = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
}
SIZES = gpu.Sizes(documents=12, tokens=24, anchors=3, partners=4, families=2, members=3, equal=6)


def test_without_a_card_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks", "gpu"])
    assert main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no CUDA device here")
    with pytest.raises(SystemExit):
        gpu.main(["7B"])


def test_the_shapes_are_those_of_their_names() -> None:
    for name, fields in gpu.SHAPES.items():
        config = config_from_hf({**gpu.QWEN3, **fields}, name)
        num_weights = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
        assert num_weights == pytest.approx(float(name[:-1]) * 1e9, rel=0.03)


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(device="cpu", dtype="float32", kv_memory="32MiB", token_budget=256)
    figures, equal = gpu.measure(config, TINY, SIZES, 1)
    by_name = {(figure.model, figure.workload): figure for figure in figures}
    assert set(by_name) == {(model, name) for model in ("default", "tiny") for name in gpu.STATEMENTS}
    for figure in figures:
        assert figure.seconds > figure.gap_seconds >= 0
        assert figure.prompt_tokens >= figure.computed_tokens > 0
        assert figure.passes > 0
    chain, shared = by_name["tiny", "chain"], by_name["tiny", "shared prefixes"]
    assert chain.prompt_tokens > 1.5 * chain.computed_tokens, "the second question computes itself only"
    assert shared.prompt_tokens > shared.computed_tokens
    exact, rounded = equal
    assert (exact.dtype, exact.flips, exact.clear_flips) == ("float32", 0, 0)
    assert exact.greatest_gap < 1e-3
    assert rounded.clear_flips == 0
    assert rounded.rows == 6 + 10
    path = gpu.store(tmp_path, "NVIDIA H200 (a test)", SIZES, figures, equal)
    assert path.name.startswith("gpu-nvidia-h200-a-test-")
    stored = json.loads(path.read_text())
    assert len(stored["figures"]) == len(figures)
    assert "tokens/s" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "compare", lambda *arguments: gpu.Equality("float32", 1, 0.0, 0, 0))
    measured: list[str] = []
    monkeypatch.setattr(gpu, "measure_model", lambda name, *rest: measured.append(name) or [])
    large: dict[str, Any] = {"large": TINY["tiny"] | {"hidden_size": 512, "max_position_embeddings": 2**20}}
    config = EngineConfig(device="cpu", dtype="float32", kv_memory="1GiB", token_budget=256)
    monkeypatch.setattr("quail.cost.grants.default_limit_bytes", lambda: int(1.62 * 2**30))
    gpu.measure(config, large, SIZES, 1)
    assert measured == ["default"]
    assert "large: left out" in capsys.readouterr().out
