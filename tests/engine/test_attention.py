"""The fast attention equals the plain one over any mixture of segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.execution.chunk import BlockTable, Segments
from quail.kernels import attention, reference

PAGE = 16


def make_case(lengths, paged, contexts, *, heads, kv_heads, head_dim, seed, scattered, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    tables, next_page = [], 0
    num_pages = sum(-(-p // PAGE) for p in paged) + 3
    order = rng.permutation(num_pages) if scattered else np.arange(num_pages)
    for tokens in paged:
        count = -(-tokens // PAGE)
        tables.append(order[next_page : next_page + count].tolist())
        next_page += count
    context = tuple(
        ((int(starts[j]), int(stops[j])),) if wanted and (j := rng.integers(0, max(i, 1))) < i else ()
        for i, wanted in enumerate(contexts)
    )
    segments = Segments(
        starts.astype(np.int64),
        stops.astype(np.int64),
        np.arange(len(lengths)),
        np.array(paged, dtype=np.int64),
        context,
    )
    t = int(stops[-1])
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return (
        draw(t, heads, head_dim),
        draw(t, kv_heads, head_dim),
        draw(t, kv_heads, head_dim),
        draw(num_pages, PAGE, kv_heads, head_dim),
        draw(num_pages, PAGE, kv_heads, head_dim),
        segments,
        BlockTable.of(tables),
    )


segment = st.tuples(st.integers(1, 40), st.integers(0, 50), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(segment, min_size=1, max_size=8),
    st.sampled_from([(4, 4, 16), (4, 2, 8), (9, 3, 16), (6, 1, 32)]),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_fast_attention_equals_the_plain_one(segments, shape, seed, scattered):
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
    )
    scale = head_dim**-0.5
    expected, expected_lse = reference.attend(*case, scale=scale)
    found, found_lse = attention.attend(*case, scale=scale)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
def test_partners_of_one_anchor_share_a_call(scattered):
    lengths, paged = [9, 3, 5, 5, 1, 7], [0, 77, 77, 77, 40, 40]
    case = make_case(
        lengths, paged, [False] * 6, heads=9, kv_heads=3, head_dim=16, seed=5, scattered=scattered
    )
    *_, segments, _ = case
    segments.table_row[:] = [-1, 1, 1, 1, 4, 1]
    assert segments.with_history == ((1, 4), (4, 5), (5, 6))
    expected, expected_lse = reference.attend(*case, scale=0.25)
    found, found_lse = attention.attend(*case, scale=0.25)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, expected_lse, atol=2e-5, rtol=1e-5)


def test_equal_lengths_share_a_call_and_stay_apart():
    case = make_case(
        [7] * 12, [0] * 12, [False] * 12, heads=4, kv_heads=2, head_dim=16, seed=1, scattered=False
    )
    whole, _ = attention.attend(*case, scale=0.25)
    q, k, v, *rest = case
    k[:7] += 1.0
    changed, _ = attention.attend(q, k, v, *rest, scale=0.25)
    assert not torch.equal(changed[:7], whole[:7])
    assert torch.equal(changed[7:], whole[7:]), "a document's attention depends on its neighbour"


@pytest.mark.parametrize("length", [1, 31, 200])
def test_bfloat16_stays_within_its_rounding(length):
    case = make_case(
        [length, 3],
        [77, 0],
        [False, False],
        heads=4,
        kv_heads=2,
        head_dim=16,
        seed=3,
        scattered=True,
        dtype=torch.bfloat16,
    )
    expected, _ = reference.attend(*case, scale=0.25)
    found, _ = attention.attend(*case, scale=0.25)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
