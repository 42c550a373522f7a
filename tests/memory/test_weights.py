"""A booted model holds its weights once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quail.models.config import config_from_hf
from quail.models.weights import tensor_shapes, write_safetensors
from tests.memory.processes import MiB, measured, needs_proc
from tests.models.tiny import make_tiny

pytestmark = pytest.mark.alone

BOOT = """
import torch, pathlib, time, warnings
from quail.models.decoder import Decoder
from quail.models.loader import load_model
folder, cache, dtype = sys.argv[1], pathlib.Path(sys.argv[2]), getattr(torch, sys.argv[3])
torch.randn(64, 64) @ torch.randn(64, 64)
load_model(sys.argv[4], dtype=torch.float32, cache_dir=cache)  # what is imported and made by any load
before = peak()
started = time.perf_counter()
loaded = load_model(folder, dtype=dtype, cache_dir=cache)
decoder = Decoder(loaded.config, loaded.weights)
boot = time.perf_counter() - started
for layer in decoder.layers:
    for held in vars(layer).values():
        for tensor in [held, *vars(held).values()] if hasattr(held, "__dict__") else []:
            if isinstance(tensor, torch.Tensor):
                tensor.sum()
decoder.embedding.sum()
print(json.dumps({"peak": peak() - before, "weights": decoder.num_weight_bytes, "boot": boot}))
"""


def write_model(folder: Path, dtype: torch.dtype, *, layers: int = 12, is_alphabetical: bool) -> Path:
    """A model of about 150 MiB in float32, with the tokenizer of a tiny one.

    Args:
        folder: made here.
        dtype: of the file.
        layers: of the model.
        is_alphabetical: tensors lie in the order of their names, as other programs write them, so that query, key
            and value projections do not lie side by side.
    """
    make_tiny(folder, "llama")
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "dtype": str(dtype).removeprefix("torch."),
    }
    path.write_text(json.dumps(fields))
    shapes = tensor_shapes(config_from_hf(fields, "x"))
    if is_alphabetical:
        shapes = dict(sorted(shapes.items()))
    write_safetensors(
        folder / "model.safetensors", shapes, dtype, lambda name: torch.full(shapes[name], 0.01, dtype=dtype)
    )
    return folder


@needs_proc
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_in_memory_once(stored: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", stored, is_alphabetical=True)
    small = make_tiny(tmp_path / "small", "llama")
    for _ in range(2):  # converted or checked at the first boot, mapped at the second
        found = measured(BOOT, str(folder), str(tmp_path / "cache"), "float32", str(small))
        assert found["weights"] > 100 * MiB
        assert found["peak"] < 1.12 * found["weights"] + 24 * MiB, found
