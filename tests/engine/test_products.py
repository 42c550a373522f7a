"""Products with packed weights in each format, and the steps that run together with them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quail.execution.chunk import Segments
from quail.kernels import reference
from quail.kernels.c_interface import Format
from quail.kernels.compiled import PackedKernels
from quail.kernels.int8 import Int8Kernels, rounded_weights
from quail.kernels.interface import HeadNorms, PageWrites
from tests.engine.kernel_sets import has_pairs, native_choice, native_kernels, packed_kernels
from tests.engine.test_attention import PAGE
from tests.engine.test_kernels import ROUNDING, draw, sizes

EXACTNESS = {Format.BFLOAT16: 2**-14, Format.INT16: 2**-11, Format.INT8: 2**-5}
"""Largest difference of a product, as a share of the sum of its terms' magnitudes. Products of bfloat16 are exact in
float32, their sums are not; with 16 bits it is finer than bfloat16's 8 bits."""


@pytest.fixture(scope="module", params=list(Format), ids=lambda format: format.name)
def packed(request):
    return packed_kernels(request.param)


def test_bfloat16_products_take_the_format_that_is_fast():
    _, build = native_choice()
    kernels = native_kernels(torch.bfloat16)
    if not isinstance(kernels, PackedKernels):
        pytest.skip("this processor multiplies bfloat16 matrices in another way")
    is_fast = has_pairs(build) and build.level.has_fast_pairs
    assert kernels.format == (Format.BFLOAT16 if is_fast else Format.INT16)


@sizes
@given(
    st.integers(1, 60),
    st.sampled_from([1, 2, 31, 65, 127, 192, 193, 200, 576]),
    st.integers(1, 100),
    st.integers(0, 99),
    st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_products(packed, rows, inner, columns, seed, scale):
    x = draw(seed, rows, inner, scale=scale).bfloat16()
    first, second = draw(seed + 1, columns, inner).bfloat16(), draw(seed + 2, columns + 3, inner).bfloat16()
    bias = draw(seed + 3, 2 * columns + 3, scale=scale)
    exact = x.double() @ torch.cat([first, second]).double().t()
    size = float((x.double().abs() @ torch.cat([first, second]).double().abs().t()).max()) + 1e-30
    matrix = packed.matrix([first, second])
    total = torch.ones(rows, 2 * columns + 3)
    packed.add_product(x, matrix, bias, total)
    allowed = EXACTNESS[packed.format] * size
    rounding = 2**-22 * float(bias.abs().max() + 1)  # of the sum with them
    assert (total.double() - 1 - bias.double() - exact).abs().max() <= allowed + rounding
    out = torch.empty(rows, 2 * columns + 3, dtype=torch.bfloat16)
    packed.product(x, matrix, None, out)
    assert (out.double() - exact).abs().max() <= allowed + 2**-8 * exact.abs().max()
    gated = torch.empty(rows, columns, dtype=torch.bfloat16)
    packed.gated_product(x, packed.gated_matrix(first, second[:columns]), gated)
    gate, up = exact[:, :columns], exact[:, columns : 2 * columns]
    expected = torch.nn.functional.silu(gate) * up
    # silu's slope is at most 1.1
    room = allowed * (1.1 * up.abs() + gate.abs() + allowed) + 2**-8 * expected.abs() + 1e-30
    assert ((gated.double() - expected).abs() <= room).all()


def test_products_of_a_row_do_not_depend_on_the_rows_around_it(packed):
    for inner in (40, 576):
        matrix = packed.matrix([draw(1, 96, inner).bfloat16()])
        x = draw(0, 300, inner).bfloat16()
        whole = torch.zeros(300, 96)
        packed.add_product(x, matrix, None, whole)
        for row in (0, 13, 14, 150, 286):
            for rows in range(1, 15):  # of a tile
                few = torch.zeros(rows, 96)
                packed.add_product(x[row : row + rows], matrix, None, few)
                assert torch.equal(few, whole[row : row + rows])


def test_products_keep_what_is_not_finite_in_its_row(packed):
    weights = draw(1, 40, 130).bfloat16()
    matrix = packed.matrix([weights])
    x = draw(0, 9, 130).bfloat16()
    clean, found = torch.zeros(9, 40), torch.zeros(9, 40)
    packed.add_product(x, matrix, None, clean)
    x[2, 129], x[4, 0], x[6, 70] = float("nan"), float("inf"), float("-inf")
    packed.add_product(x, matrix, None, found)
    if packed.format == Format.BFLOAT16:
        torch.testing.assert_close(
            found[[2, 4, 6]], x[[2, 4, 6]].float() @ weights.float().t(), equal_nan=True
        )
    else:
        assert found[[2, 4, 6]].isnan().all()
    rest = [0, 1, 3, 5, 7, 8]
    assert torch.equal(found[rest], clean[rest])


def test_products_of_zeros_and_of_tiny_numbers_are_zero(packed):
    matrix = packed.matrix(
        [torch.zeros(3, 64, dtype=torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16)]
    )
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-38), torch.ones(64)]).bfloat16()
    found = torch.zeros(3, 6)
    packed.add_product(x, matrix, None, found)
    expected = torch.zeros(3, 6)
    expected[2, 3:] = 64.0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_products_of_no_rows(packed):
    nothing = torch.zeros(0, 64, dtype=torch.bfloat16)
    packed.add_product(nothing, packed.matrix([draw(1, 40, 64).bfloat16()]), None, torch.zeros(0, 40))


def test_products_do_not_overflow_where_all_elements_are_large(packed):
    inner = 400
    signs = torch.where(torch.arange(inner) % 3 == 0, -1.0, 1.0)
    x = torch.stack([torch.full((inner,), 3.0), 5 * signs]).bfloat16()
    weights = torch.stack([torch.full((inner,), 2.0), 7 * signs, torch.zeros(inner), signs + 1]).bfloat16()
    found = torch.zeros(2, 4)
    packed.add_product(x, packed.matrix([weights]), None, found)
    exact = x.double() @ weights.double().t()
    size = x.double().abs() @ weights.double().abs().t()
    assert ((found - exact).abs() <= EXACTNESS[packed.format] * size).all(), (found, exact)


@sizes
@given(
    st.integers(1, 40),
    st.sampled_from([1, 3, 63, 64, 65, 100, 192, 576]),
    st.integers(1, 70),
    st.integers(0, 99),
    st.sampled_from([1e-20, 1.0, 1e4]),
    st.sampled_from([1.0, 10.0, 300.0, 1e6]),
    st.integers(1, 100),
)
@example(20, 63, 1, 0, 1e4, 1.0, 1)  # an element half way between two steps
def test_products_in_bytes_equal_plain_ones(rows, inner, columns, seed, scale, outlier, distance):
    native, plain = packed_kernels(Format.INT8), Int8Kernels(reference.attend)
    x = draw(seed, rows, inner, scale=scale)
    x[:, ::distance] *= outlier
    x[0] = 0.0
    x = x.bfloat16()
    first, second = draw(seed + 1, columns, inner).bfloat16(), draw(seed + 2, columns, inner).bfloat16()
    bias = draw(seed + 3, 2 * columns, scale=scale)
    size = float((x.double().abs() @ torch.cat([first, second]).double().abs().t()).max())
    results = []
    for each in (native, plain):
        total, out = torch.ones(rows, 2 * columns), torch.empty(rows, 2 * columns).bfloat16()
        gated = torch.empty(rows, columns).bfloat16()
        matrix = each.matrix([first, second])
        each.add_product(x, matrix, bias, total)
        each.product(x, matrix, bias, out)
        each.gated_product(x, each.gated_matrix(first, second), gated)
        results.append((total, out, gated))
    (total, *rounded), (expected, *others) = results
    assert (total - expected).abs().max() <= 1e-5 * (size + scale + 1)
    for found, other, room in zip(rounded, others, (1e-5 * size, 1e-30), strict=True):
        found, other = found.float(), other.float()
        assert (found - other).abs().max() <= ROUNDING[torch.bfloat16] * other.abs().max() + room


def test_outliers_do_not_coarsen_the_rest_of_their_row():
    kernels = packed_kernels(Format.INT8)
    weights = draw(1, 96, 576).bfloat16()
    matrix, errors = kernels.matrix([weights]), []
    for factor in (1.0, 200.0):
        x = draw(0, 20, 576)
        x[:, [5, 300, 301]] *= factor
        x, found = x.bfloat16(), torch.zeros(20, 96)
        kernels.add_product(x, matrix, None, found)
        errors.append(
            float((found - x.double() @ rounded_weights(weights).double().t()).pow(2).mean().sqrt())
        )
    assert errors[1] < 2 * errors[0], errors


def test_weights_of_few_levels_lose_nothing_in_bytes():
    """Blocks of 16 levels between a least and a largest element, as 4-bit formats store them."""
    levels = torch.randint(0, 16, (40, 2, 64), generator=torch.Generator().manual_seed(0))
    levels[..., 0], levels[..., 1] = 0, 15
    weights = (levels * 0.25 - 1.75).flatten(1).bfloat16()
    torch.testing.assert_close(rounded_weights(weights), weights.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0, 1e30, -1e30, 1e-38])
def test_runs_of_equal_weights_in_bytes(value):
    kernels = packed_kernels(Format.INT8)
    x = torch.ones(3, 130).bfloat16()
    found = torch.zeros(3, 33)
    kernels.add_product(x, kernels.matrix([torch.full((33, 130), value).bfloat16()]), None, found)
    torch.testing.assert_close(
        found, torch.full((3, 33), 130 * float(torch.tensor(value).bfloat16())), rtol=1e-5, atol=0
    )


def test_a_row_of_outliers_alone_and_one_that_reaches_far():
    """More outliers than the list is for, and an element 1e30 times the others: the row keeps its size."""
    kernels, plain = packed_kernels(Format.INT8), Int8Kernels(reference.attend)
    x = torch.zeros(4, 192)
    x[0, ::2] = 1.0
    x[1] = torch.logspace(-6, 6, 192)
    x[2, 7], x[2, 8] = 1e30, 1.0
    x[3] = draw(0, 192) ** 7
    x = x.bfloat16()
    weights = draw(1, 40, 192).bfloat16()
    found, expected = torch.zeros(4, 40), torch.zeros(4, 40)
    kernels.add_product(x, kernels.matrix([weights]), None, found)
    plain.add_product(x, plain.matrix([weights]), None, expected)
    exact = x.double() @ weights.double().t()
    for row in range(4):
        size = float(exact[row].abs().max())
        assert (found[row] - expected[row]).abs().max() <= 1e-5 * size, row
        assert (found[row] - exact[row]).abs().max() <= 2**-5 * size, row


@pytest.mark.parametrize("rows", [1, 55, 700])
def test_threads_do_not_change_products(packed, rows):
    one, many = packed_kernels(packed.format, threads=1), packed_kernels(packed.format, threads=3)
    x = draw(0, rows, 192).bfloat16()
    weights = draw(1, 80, 192).bfloat16()
    results = []
    for kernels in (one, many):
        total = torch.zeros(rows, 80)
        kernels.add_product(x, kernels.matrix([weights]), None, total)
        results.append(total)
    assert torch.equal(*results)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 55, 200, 700])
@pytest.mark.parametrize("width", [64, 2000, 5000], ids=["one round", "rounds", "alone"])
def test_fused_steps_have_the_bits_of_steps_alone(packed, rows, width, threads):
    kernels = packed_kernels(packed.format, threads)
    heads, head_dim = 4, 32
    gated = kernels.gated_matrix(draw(1, width, 96).bfloat16(), draw(2, width, 96).bfloat16())
    down = kernels.matrix([draw(3, 96, width).bfloat16() * width**-0.5])
    qkv = kernels.matrix([draw(4, heads * head_dim, 96).bfloat16()])
    angles, norms = draw(5, rows, head_dim // 2), HeadNorms(draw(9, head_dim), draw(10, head_dim))
    slots = torch.arange(rows).flip(0)
    slots[: rows // 3] = -1
    kept = (slots >= 0).nonzero().flatten()

    def run(fused: bool) -> list[torch.Tensor]:
        hidden, bias = draw(0, rows, 96), draw(6, heads * head_dim)
        normed, inner = torch.empty(rows, 96).bfloat16(), torch.empty(rows, width).bfloat16()
        mixed = torch.empty(rows, heads, head_dim).bfloat16()
        pages = [torch.zeros(-(-rows // PAGE) + 1, PAGE, 1, head_dim).bfloat16() for _ in range(2)]
        with kernels.fused() if fused else nullcontext():
            kernels.norm(hidden, draw(7, 96), 1e-5, out=normed)
            kernels.gated_product(normed, gated, out=inner)
            kernels.add_product(inner, down, None, total=hidden)
            kernels.norm(hidden, draw(8, 96), 1e-5, out=normed)
            kernels.product(normed, qkv, bias, out=mixed.flatten(1))
            writes = PageWrites(kept, slots[kept], slots)
            kernels.rotate(mixed, angles.cos(), angles.sin(), norms, 1e-5, pages[0], pages[1], writes)
            assert not fused or not rows or torch.equal(hidden, draw(0, rows, 96)), "they wait"
        if fused:
            assert len(kernels.fused_seconds) == 6
            assert all(seconds > 0 for seconds in kernels.fused_seconds) or not rows
        return [hidden, normed, inner, mixed, *pages]

    for together, alone in zip(run(fused=True), run(fused=False), strict=True):
        assert torch.equal(together, alone)


def test_nothing_that_cannot_wait_is_called_within_fused_steps(packed):
    q = torch.zeros(1, 1, 32).bfloat16()
    with packed.fused(), pytest.raises(AssertionError, match="waits"):
        packed.attend(
            q, q, q, q.unsqueeze(0), q.unsqueeze(0), Segments(*np.zeros((4, 0), np.int64)), None, scale=1
        )


def test_what_fails_within_fused_steps_runs_none_of_them(packed):
    x, matrix = draw(0, 5, 64).bfloat16(), packed.matrix([draw(1, 40, 64).bfloat16()])
    total = torch.zeros(5, 40)

    def fail() -> None:
        with packed.fused():
            packed.add_product(x, matrix, None, total)
            packed.add_product(x, matrix, None, torch.zeros(5, 41))

    with pytest.raises(AssertionError):
        fail()
    assert not total.any()
    packed.add_product(x, matrix, None, total)
    assert total.all(), "and the next works as ever"
