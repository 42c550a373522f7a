"""Each native kernel equals its plain twin, over random shapes, layouts and lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quail.execution.chunk import BlockTable, Segments
from quail.kernels import attention, reference
from quail.kernels.compiled import NativeKernels
from quail.kernels.interface import HeadNorms, PageWrites
from quail.kernels.reference import TorchKernels
from tests.engine.kernel_sets import native_kernels, plain_kernels
from tests.engine.test_attention import PAGE, make_case

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Largest difference allowed, as a share of the largest element."""

sizes = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def native(request):
    kernels = native_kernels(request.param)
    assert isinstance(kernels, NativeKernels)
    return kernels, request.param


def draw(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    found, expected = found.float(), expected.float()
    assert torch.equal(found.isnan(), expected.isnan())
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    gap = (found - expected).nan_to_num(0.0, 0.0, 0.0).abs().max()
    assert gap <= share * scale, f"differs by {gap}, the largest element is {scale}"


@sizes
@given(st.integers(1, 70), st.integers(1, 200), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_norm(native, rows, width, seed, scale):
    kernels, dtype = native
    x, weight = draw(seed, rows, width, scale=scale), draw(seed + 1, width)
    x[0] = 0.0
    found, expected = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    kernels.norm(x, weight, 1e-5, found)
    plain_kernels().norm(x, weight, 1e-5, expected)
    assert_near(found, expected, ROUNDING[dtype])


@sizes
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 99), st.sampled_from([1e-40, 1.0, 30.0, 1e3]))
def test_gate(native, rows, width, seed, scale):
    kernels, dtype = native
    gate_up = draw(seed, rows, 2 * width, scale=scale).to(dtype)
    found = torch.empty(rows, width, dtype=dtype)
    kernels.gate(gate_up, found)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert_near(found, torch.nn.functional.silu(gate) * up, ROUNDING[dtype])


@sizes
@given(
    st.integers(1, 40),
    st.sampled_from([(4, 4, 8), (9, 3, 64), (4, 2, 32), (3, 1, 6), (16, 8, 128)]),
    st.booleans(),
    st.integers(0, 99),
    st.data(),
)
def test_rotation_and_writes(native, rows, shape, normed, seed, data):
    kernels, dtype = native
    num_q, num_kv, head_dim = shape
    num_pages = rows // PAGE + 2
    heads = draw(seed, rows, num_q + 2 * num_kv, head_dim).to(dtype)
    angles = draw(seed + 1, rows, head_dim // 2, scale=100.0)
    norms = HeadNorms(draw(seed + 2, head_dim), draw(seed + 3, head_dim)) if normed else None
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, rows - 1)))), dtype=torch.int64)
    slots = torch.randperm(num_pages * PAGE, generator=torch.Generator().manual_seed(seed))[: len(kept)]
    slot_of_row = torch.full((rows,), -1).index_copy_(0, kept, slots)
    results = []
    for each in (kernels, plain_kernels()):
        mine = heads.clone()
        k_pages = torch.full((num_pages, PAGE, num_kv, head_dim), 7.0, dtype=dtype)
        v_pages = torch.full_like(k_pages, -7.0)
        writes = PageWrites(kept, slots, slot_of_row)
        each.rotate(mine, angles.cos(), angles.sin(), norms, 1e-6, k_pages, v_pages, writes)
        results.append((mine, k_pages, v_pages))
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected, ROUNDING[dtype])
    turned, k_pages, v_pages = results[0]
    keys, values = turned[:, num_q : num_q + num_kv], turned[:, num_q + num_kv :]
    assert torch.equal(k_pages.flatten(0, 1)[slots], keys[kept])
    assert torch.equal(v_pages.flatten(0, 1)[slots], values[kept])
    assert int((k_pages == 7.0).all(dim=-1).all(dim=-1).sum()) == num_pages * PAGE - len(kept)


segment = st.tuples(
    st.integers(1, 150), st.sampled_from([0, 0, 1, 16, 50, 127, 128, 129, 300]), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(segment, min_size=1, max_size=6),
    st.sampled_from(
        [
            (4, 4, 16),
            (4, 2, 8),
            (9, 3, 64),
            (6, 1, 32),
            (2, 2, 48),
            (16, 2, 128),
            (3, 3, 6),
            (40, 1, 16),
            (2, 1, 80),
        ]
    ),
    st.integers(0, 10_000),
    st.booleans(),
    st.sampled_from([1e-30, 1.0, 20.0]),
)
@example(  # scores of 80: queries rounded once more before they meet keys cost a quarter more than the bound
    [(1, 0, False), (1, 0, False), (130, 0, False), (150, 0, False), (150, 127, False), (150, 0, False)],
    (16, 2, 128),
    60,
    False,
    20.0,
)
def test_attention(native, segments, shape, seed, scattered, spread):
    kernels, dtype = native
    lengths, paged, contexts = zip(*segments, strict=True)
    heads, kv_heads, head_dim = shape
    case = make_case(
        list(lengths),
        list(paged),
        contexts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=seed,
        scattered=scattered,
        dtype=dtype,
    )
    case = (case[0] * spread, *case[1:])
    expected, expected_lse = reference.attend(*case, scale=head_dim**-0.5)
    found, found_lse = kernels.attend(*case, scale=head_dim**-0.5)
    assert_near(found, expected, 2 * ROUNDING[dtype])
    assert_near(found_lse, expected_lse, 1e-5)


@pytest.mark.parametrize("cut", [1, 16, 100, 127, 128, 129, 250, 300])
@pytest.mark.parametrize("place", ["pages", "rows of the pass"])
def test_attention_has_the_same_bits_where_a_part_was_computed_before(native, cut, place):
    kernels, dtype = native
    rows, heads, kv_heads, dim = 310, 6, 2, 64
    q = draw(0, rows, heads, dim).to(dtype)
    k, v = draw(1, rows, kv_heads, dim).to(dtype), draw(2, rows, kv_heads, dim).to(dtype)
    num_pages = -(-rows // PAGE)
    k_pages, v_pages = torch.zeros(2, num_pages, PAGE, kv_heads, dim, dtype=dtype)
    k_pages.flatten(0, 1)[:rows], v_pages.flatten(0, 1)[:rows] = k, v
    table = BlockTable.of([list(range(num_pages))])

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts, stops, paged, contexts = zip(*segments, strict=True)
        arrays = [np.array(each) for each in (starts, stops, [0] * len(starts), paged)]
        return kernels.attend(
            q, k, v, k_pages, v_pages, Segments(*arrays, context=contexts), table, scale=dim**-0.5
        )

    whole, whole_lse = attend(q, k, v, (0, rows, 0, ()))
    if place == "pages":
        found, lse = attend(q[cut:], k[cut:], v[cut:], (0, rows - cut, cut, ()))
    else:
        found, lse = attend(q, k, v, (0, cut, 0, ()), (cut, rows, 0, ((0, cut),)))
        assert torch.equal(found[:cut], whole[:cut]) and torch.equal(lse[:cut], whole_lse[:cut])
        found, lse = found[cut:], lse[cut:]
    assert torch.equal(found, whole[cut:]) and torch.equal(lse, whole_lse[cut:])


def test_attention_reads_views_of_one_tensor(native):
    kernels, dtype = native
    heads = draw(0, 21, 15, 64).to(dtype)
    q, k, v = heads[:, :9], heads[:, 9:12], heads[:, 12:]
    pages = torch.zeros(1, PAGE, 3, 64, dtype=dtype)
    segments = Segments(np.array([0, 4]), np.array([4, 21]), np.array([-1, -1]), np.array([0, 0]))
    arguments = (pages, pages, segments, BlockTable.of([]))
    found, _ = kernels.attend(q, k, v, *arguments, scale=0.125)
    expected, _ = reference.attend(q.contiguous(), k.contiguous(), v.contiguous(), *arguments, scale=0.125)
    assert_near(found, expected, 2 * ROUNDING[dtype])


def test_a_partner_s_attention_does_not_depend_on_its_neighbours(native):
    """Stacked partners of one anchor, in any company: the same bits."""
    kernels, dtype = native
    lengths, paged = [7, 5, 8, 1, 7, 20, 3], [200] * 7

    def attend(places):
        case = make_case(
            lengths, paged, [False] * 7, heads=9, kv_heads=3, head_dim=64, seed=5, scattered=True, dtype=dtype
        )
        q, k, v, k_pages, v_pages, segments, block_table = case
        rows = torch.cat([torch.arange(segments.q_start[p], segments.q_stop[p]) for p in places])
        sizes = np.array([lengths[p] for p in places])
        stops = np.cumsum(sizes)
        some = Segments(
            stops - sizes, stops, np.zeros(len(places), dtype=np.int64), np.full(len(places), 200)
        )
        out, lse = kernels.attend(q[rows], k[rows], v[rows], k_pages, v_pages, some, block_table, scale=0.125)
        return out.split(sizes.tolist()), lse.split(sizes.tolist())

    together, lse_together = attend(range(7))
    for place in range(7):
        alone, lse_alone = attend([place])
        assert torch.equal(alone[0], together[place])
        assert torch.equal(lse_alone[0], lse_together[place])


def test_what_is_not_finite_stays_in_its_segment(native):
    kernels, dtype = native
    case = make_case(
        [30, 30], [0, 0], [False] * 2, heads=4, kv_heads=2, head_dim=16, seed=1, scattered=False, dtype=dtype
    )
    clean, _ = kernels.attend(*case, scale=0.25)
    q, k, v, *rest = case
    k[3], v[9, 0, 0], q[5] = float("inf"), float("nan"), float("nan")
    found, _ = kernels.attend(q, k, v, *rest, scale=0.25)
    assert torch.equal(found[30:], clean[30:])
    assert found[9:30, :2].isnan().any(dim=-1).all(), "a NaN among the values that a row reads is lost"
    assert found[5].isnan().all()


@pytest.mark.parametrize("ill", range(5))
def test_what_is_not_finite_stays_in_its_partner(native, ill):
    """Partners of one anchor are attended to side by side; one of them holds NaN among its keys and values."""
    kernels, dtype = native
    lengths = [7, 5, 20, 1, 7]
    case = make_case(
        lengths, [150] * 5, [False] * 5, heads=9, kv_heads=3, head_dim=64, seed=5, scattered=True, dtype=dtype
    )
    q, k, v, k_pages, v_pages, segments, block_table = case
    segments.table_row[:] = 0
    assert segments.with_history == ((0, 5),)
    clean, clean_lse = kernels.attend(*case, scale=0.125)
    rows = slice(sum(lengths[:ill]), sum(lengths[: ill + 1]))
    k[rows], v[rows] = float("nan"), float("inf")
    found, found_lse = kernels.attend(q, k, v, k_pages, v_pages, segments, block_table, scale=0.125)
    assert found[rows].isnan().all()
    healthy = torch.ones(len(q), dtype=torch.bool)
    healthy[rows] = False
    assert torch.equal(found[healthy], clean[healthy])
    assert torch.equal(found_lse[healthy], clean_lse[healthy])


def test_scores_of_minus_infinity_weigh_nothing(native):
    kernels, dtype = native
    q = torch.ones(3, 2, 8, dtype=dtype)
    k = draw(1, 3, 1, 8).to(dtype)
    k[1] = float("-inf")
    v = draw(2, 3, 1, 8).to(dtype)
    pages = torch.zeros(1, PAGE, 1, 8, dtype=dtype)
    arguments = (pages, pages, Segments(np.array([0]), np.array([3]), np.array([-1]), np.array([0])))
    found, lse = kernels.attend(q, k, v, *arguments, BlockTable.of([]), scale=0.5)
    expected, expected_lse = reference.attend(q, k, v, *arguments, BlockTable.of([]), scale=0.5)
    assert expected.isfinite().all()
    assert_near(found, expected, 2 * ROUNDING[dtype])
    assert_near(lse, expected_lse, 1e-5)


def test_torch_attention_and_the_native_one_agree_on_a_pass_of_documents():
    kernels = native_kernels(torch.float32)
    case = make_case(
        [300, 7, 7, 300, 20],
        [0, 300, 300, 0, 300],
        [False] * 5,
        heads=9,
        kv_heads=3,
        head_dim=64,
        seed=3,
        scattered=False,
    )
    found, found_lse = kernels.attend(*case, scale=0.125)
    expected, expected_lse = TorchKernels(attention.attend).attend(*case, scale=0.125)
    assert_near(found, expected, 1e-5)
    assert_near(found_lse, expected_lse, 1e-5)
