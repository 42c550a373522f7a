"""What only a card can tell: nothing waits inside a pass, torch's own attention, whole queries on the device."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from quail.kernels import reference
from quail.kernels.cuda import Card, CudaKernels, adds_in_float32
from quail.kernels.interface import Matrix
from tests.engine.test_cuda_engine import PATHS, QUERIES, decoder_of, rows_of
from tests.engine.test_cuda_kernels import make_pass
from tests.engine.test_decoder import make_arena, prompt, run_piece
from tests.models.tiny import make_tiny

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3", seed=7, head_dim=32, layers=2, context=512)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_waits_for_the_card_inside_a_pass(folder, tmp_path, path):
    kernels = CudaKernels(Card.here(has_triton=True), torch.bfloat16, CARD, attention=path)
    decoder = decoder_of(folder, tmp_path, kernels, torch.bfloat16, CARD)
    arena = make_arena(decoder)
    table = arena.pages.open("prompt", 80)

    def piece(start, stop):
        states = []
        head, decoder.head = decoder.head, lambda found: states.append(found)
        try:
            run_piece(decoder, arena, prompt(80), start, stop, table, writes=stop - start)
        finally:
            decoder.head = head

    piece(0, 40)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        piece(40, 80)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_returns_the_log_sum_exp_by_heads_first():
    """As many rows as heads: only the values tell which is which."""
    made = make_pass([(8, 0, 0, False)], heads=8, kv_heads=2, head_dim=64, seed=0, dtype=torch.bfloat16)
    heads, pages, kv_heads, segments, table = made
    kernels = CudaKernels(Card.here(has_triton=True), torch.bfloat16, CARD, attention="gathered")
    q, k, v = heads.split([8, 2, 2], dim=1)
    moved = [each.to(CARD) for each in (q, k, v, pages[0], pages[1])]
    _, found = kernels.attend(*moved, segments, table, scale=0.125)
    _, expected = reference.attend(q, k, v, pages[0], pages[1], segments, table, scale=0.125)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_sums_of_products_are_not_rounded_on_the_way():
    if not adds_in_float32(torch.bfloat16, CARD):
        pytest.skip(f"torch {torch.__version__} rounds them")
    kernels = CudaKernels(Card.here(has_triton=True), torch.bfloat16, CARD)
    x, weight = torch.randn(33, 512).bfloat16().to(CARD), torch.randn(65, 512).bfloat16().to(CARD)
    total = torch.ones(33, 65, device=CARD)
    kernels.add_product(x, Matrix(weight, 65), None, total)
    exact = 1 + x.double() @ weight.double().t()
    assert (total.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["auto", *PATHS])
@pytest.mark.parametrize("kind", QUERIES)
def test_queries_on_the_card_have_the_rows_of_the_cpu(folder, tmp_path, kind, attention, dtype):
    if (attention, dtype) == ("gathered", "float32"):
        pytest.skip("varlen_attn takes bfloat16")
    rows = functools.partial(rows_of, folder, tmp_path, QUERIES[kind])
    expected, _ = rows(device="cpu", kernels="reference")
    found, _ = rows(device="cuda", attention=attention, dtype=dtype)
    if dtype == "float32":
        assert len(found) == len(expected)
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, abs=1e-4) if kind == "scores" else row == other
        return
    rounded, _ = rows(device="cpu", kernels="reference", dtype="bfloat16")
    if kind == "scores":
        error, error_of_cpu = (
            np.sqrt(np.mean([(a[2] - b[2]) ** 2 for a, b in zip(some, expected, strict=True)]))
            for some in (found, rounded)
        )
        assert error <= 1.5 * error_of_cpu + 0.01
    else:  # answers with a small margin flip, as they do on a CPU
        assert len(set(found) ^ set(expected)) <= 2 * len(set(rounded) ^ set(expected)) + 2
