"""The kernels for CUDA equal their plain twins: through Triton's interpreter, and on a card where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.execution.chunk import BlockTable, Segments
from quail.kernels import attention, gathered, reference
from quail.kernels.interface import HeadNorms, PageWrites
from tests.engine.kernel_sets import CUDA_DEVICES, cuda_device, cuda_kernels, plain_kernels
from tests.engine.test_kernels import DTYPES, ROUNDING, assert_near, draw

PAGE = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MORE = bool(os.environ.get("QUAIL_MORE_EXAMPLES"))

LEAST_NORMAL = 2.0**-126
"""Triton's interpreter rounds float32 to bfloat16 wrongly below it."""

few = settings(max_examples=200 if MORE else 8, deadline=None)
fewer = settings(max_examples=100 if MORE else 5, deadline=None)


def assert_rounded(found, expected, dtype):
    """Equal within the rounding of a dtype."""
    found, expected = found.cpu(), expected.float()
    if found.dtype == torch.bfloat16 and INTERPRETED:
        tiny = expected.abs() < LEAST_NORMAL
        assert (found[tiny].abs() <= LEAST_NORMAL).all()
        found, expected = found.float().masked_fill(tiny, 0.0), expected.masked_fill(tiny, 0.0)
    assert_near(found, expected, ROUNDING[dtype])


@pytest.fixture(scope="module", params=CUDA_DEVICES)
def device(request):
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield cuda_device(request.param)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=["gathered", "gathered without Triton", "paged"])
def attend(request, device, dtype):
    path = request.param.split()[0]
    if path == "gathered" and device.type == "cuda" and dtype == torch.float32:
        pytest.skip("varlen_attn takes bfloat16")
    return cuda_kernels(dtype, device, path, has_triton="without" not in request.param).attend


@few
@given(
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 99),
    st.sampled_from([1e-40, 1e-30, 1e-3, 1.0, 1e4]),
)
def test_norm(device, dtype, rows, width, seed, scale):
    x, weight = draw(seed, rows, width, scale=scale), draw(seed + 1, width)
    x[0] = 0.0
    found = torch.empty(rows, width, dtype=dtype, device=device)
    expected = torch.empty(rows, width, dtype=dtype)
    cuda_kernels(dtype, device).norm(x.to(device), weight.to(device), 1e-5, found)
    plain_kernels().norm(x, weight, 1e-5, expected)
    assert_rounded(found, expected, dtype)


@few
@given(
    st.integers(1, 40),
    st.integers(1, 90),
    st.integers(0, 99),
    st.sampled_from([1e-40, 1e-20, 1.0, 30.0, 1e3]),
)
def test_gate(device, dtype, rows, width, seed, scale):
    kernels = cuda_kernels(dtype, device)
    eye = torch.eye(width, dtype=dtype, device=device)
    gate_up = draw(seed, rows, 2 * width, scale=scale).to(dtype)
    found = torch.empty(rows, width, dtype=dtype, device=device)
    kernels._rows.gate(gate_up.to(device), found)
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert_rounded(found, expected, dtype)
    same = torch.empty_like(found)
    kernels.gated_product(gate_up[:, :width].contiguous().to(device), kernels.gated_matrix(eye, eye), same)
    assert_rounded(same, torch.nn.functional.silu(gate) * gate, dtype)


@few
@given(
    st.integers(1, 40),
    st.sampled_from([(4, 4, 8), (9, 3, 64), (4, 2, 32), (3, 1, 6), (5, 1, 2), (2, 1, 128)]),
    st.booleans(),
    st.integers(0, 99),
    st.data(),
)
def test_rotation_and_writes(device, dtype, rows, shape, normed, seed, data):
    num_q, num_kv, head_dim = shape
    num_pages = rows // PAGE + 2
    heads = draw(seed, rows, num_q + 2 * num_kv, head_dim).to(dtype)
    angles = draw(seed + 1, rows, head_dim // 2, scale=100.0)
    norms = HeadNorms(draw(seed + 2, head_dim), draw(seed + 3, head_dim)) if normed else None
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, rows - 1)))), dtype=torch.int64)
    slots = torch.randperm(num_pages * PAGE, generator=torch.Generator().manual_seed(seed))[: len(kept)]
    slot_of_row = torch.full((rows,), -1).index_copy_(0, kept, slots)

    def rotated(kernels, place):
        mine = heads.clone().to(place)
        k_pages = torch.full((num_pages, PAGE, num_kv, head_dim), 7.0, dtype=dtype, device=place)
        v_pages = torch.full_like(k_pages, -7.0)
        writes = PageWrites(kept.to(place), slots.to(place), slot_of_row.to(place))
        there = None if norms is None else HeadNorms(norms.q.to(place), norms.k.to(place))
        cos, sin = angles.cos().to(place), angles.sin().to(place)
        kernels.rotate(mine, cos, sin, there, 1e-6, k_pages, v_pages, writes)
        return [each.cpu() for each in (mine, k_pages, v_pages)]

    found = rotated(cuda_kernels(dtype, device), device)
    for each, expected in zip(found, rotated(plain_kernels(), torch.device("cpu")), strict=True):
        assert_near(each, expected, ROUNDING[dtype])
    turned, k_pages, v_pages = found
    keys, values = turned[:, num_q : num_q + num_kv], turned[:, num_q + num_kv :]
    assert torch.equal(values, heads[:, num_q + num_kv :])
    assert torch.equal(k_pages.flatten(0, 1)[slots], keys[kept])
    assert torch.equal(v_pages.flatten(0, 1)[slots], values[kept])
    assert int((k_pages == 7.0).all(dim=-1).all(dim=-1).sum()) == num_pages * PAGE - len(kept)


@few
@given(st.integers(1, 20), st.sampled_from([(4, 8), (9, 64), (1, 6)]), st.integers(0, 99), st.data())
def test_merge(device, dtype, rows, shape, seed, data):
    heads, head_dim = shape
    out, other = draw(seed, rows, heads, head_dim).to(dtype), draw(seed + 1, rows, heads, head_dim).to(dtype)
    lse, other_lse = draw(seed + 2, rows, heads, scale=20.0), draw(seed + 3, rows, heads, scale=20.0)
    lse[0, 0] = other_lse[0, 0]
    other_lse[-1] = float("-inf")
    if rows > 2:
        lse[1], other_lse[1] = float("-inf"), 5.0
    picked = torch.tensor(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    results = []
    for place, merge in (
        (device, cuda_kernels(dtype, device)._rows.merge),
        (torch.device("cpu"), gathered.merge),
    ):
        mine, mine_lse = out.clone().to(place), lse.clone().to(place)
        targets = picked.to(torch.int32).to(place)
        merge(mine, mine_lse, other[picked].to(place), other_lse[picked].to(place), targets)
        results.append((mine.cpu(), mine_lse.cpu()))
    whole, whole_lse = out.clone(), lse.clone()
    attention.merge(whole, whole_lse, other, other_lse)
    for mine, mine_lse in results:
        assert_near(mine[picked], whole[picked], ROUNDING[dtype])
        assert_near(mine_lse[picked], whole_lse[picked], 1e-6)
        rest = torch.tensor([row for row in range(rows) if row not in picked.tolist()], dtype=torch.int64)
        assert torch.equal(mine[rest], out[rest]) and torch.equal(mine_lse[rest], lse[rest])


@few
@given(
    st.integers(1, 60),
    st.sampled_from([(4, 8), (3, 64), (1, 6)]),
    st.sampled_from([0, 3]),
    st.integers(0, 99),
)
def test_gathered_rows_are_those_of_pages_and_pass(device, dtype, count, shape, num_pages, seed):
    heads = draw(seed, 11, 2 * shape[0] + 5, shape[1]).to(dtype)
    k, v = heads[:, 5 : 5 + shape[0]], heads[:, 5 + shape[0] :]
    k_pages = draw(seed + 1, num_pages, PAGE, *shape).to(dtype)
    v_pages = draw(seed + 2, num_pages, PAGE, *shape).to(dtype)
    source = torch.from_numpy(np.random.default_rng(seed).integers(-11, num_pages * PAGE, count))
    expected_k = torch.stack([k[-1 - s] if s < 0 else k_pages.flatten(0, 1)[s] for s in source.tolist()])
    expected_v = torch.stack([v[-1 - s] if s < 0 else v_pages.flatten(0, 1)[s] for s in source.tolist()])
    for place, gather in (
        (device, cuda_kernels(dtype, device)._rows.gather),
        (torch.device("cpu"), gathered.gather),
    ):
        whole = heads.to(place)
        arguments = (
            whole[:, 5 : 5 + shape[0]],
            whole[:, 5 + shape[0] :],
            k_pages.to(place),
            v_pages.to(place),
        )
        found_k, found_v = gather(*arguments, source.to(torch.int32).to(place))
        assert torch.equal(found_k.cpu(), expected_k) and torch.equal(found_v.cpu(), expected_v)


def make_pass(parts, *, heads, kv_heads, head_dim, seed, dtype, spread=1.0, scattered=True):
    """Arguments of `attend`.

    Args:
        parts: for each segment its rows, paged tokens, how many context ranges, and whether it reads the
            history of the segment before.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([part[0] for part in parts])
    stops = np.cumsum(lengths)
    starts = stops - lengths
    num_pages = sum(-(-part[1] // PAGE) for part in parts) + 3
    order = list(rng.permutation(num_pages) if scattered else range(num_pages))
    tables, table_row, paged, context = [], [], [], []
    for place, (_, tokens, num_ranges, again) in enumerate(parts):
        if place and again:
            table_row.append(table_row[-1])
            paged.append(paged[-1])
            context.append(context[-1])
            continue
        table_row.append(len(tables) if tokens else -1)
        if tokens:
            tables.append([order.pop() for _ in range(-(-tokens // PAGE))])
        paged.append(tokens)
        cuts = np.sort(
            rng.choice(starts[place] + 1, min(2 * num_ranges, starts[place] // 2 * 2), replace=False)
        )
        context.append(tuple((int(a), int(b)) for a, b in cuts.reshape(-1, 2)))
    segments = Segments(starts, stops, np.array(table_row), np.array(paged), tuple(context))
    # One tensor holds queries, keys and values, as in a decoder.
    all_heads = draw(seed, int(stops[-1]), heads + 2 * kv_heads, head_dim)
    all_heads[:, :heads] *= spread
    all_heads = all_heads.to(dtype)
    pages = draw(seed + 1, 2, num_pages, PAGE, kv_heads, head_dim).to(dtype)
    return all_heads, pages, kv_heads, segments, BlockTable.of(tables)


def both(attend, device, made):
    """What an attention and the reference find: outputs and log-sum-exps."""
    heads, pages, kv_heads, segments, table = made
    results = []
    for run, place in ((attend, device), (reference.attend, torch.device("cpu"))):
        there, held = heads.to(place), pages.to(place)
        num_q = heads.shape[1] - 2 * kv_heads
        q, k, v = there.split([num_q, kv_heads, kv_heads], dim=1)
        out, lse = run(q, k, v, held[0], held[1], segments, table, scale=heads.shape[2] ** -0.5)
        results += [out.cpu(), lse.cpu()]
    return results


def assert_same(attend, device, dtype, made):
    found, found_lse, expected, expected_lse = both(attend, device, made)
    assert_near(found, expected, 2 * ROUNDING[dtype])
    assert_near(found_lse, expected_lse, 1e-5)


part = st.tuples(
    st.sampled_from([1, 1, 2, 7, 20, 70, 150]),
    st.sampled_from([0, 0, 1, 15, 16, 17, 50, 130, 300]),
    st.integers(0, 2),
    st.booleans(),
)
shapes = st.sampled_from(
    [(4, 4, 16), (4, 2, 8), (9, 3, 64), (6, 1, 32), (2, 2, 48), (7, 1, 128), (40, 1, 16)]
)


@fewer
@given(
    st.lists(part, min_size=1, max_size=4),
    shapes,
    st.integers(0, 10_000),
    st.sampled_from([1e-30, 1.0, 20.0]),
)
def test_attention(attend, device, dtype, parts, shape, seed, spread):
    heads, kv_heads, head_dim = shape
    made = make_pass(
        parts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, dtype=dtype, spread=spread
    )
    assert_same(attend, device, dtype, made)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(part, min_size=1, max_size=12), shapes, st.integers(0, 10_000), st.booleans())
def test_attention_over_many_passes(attend, device, dtype, parts, shape, seed, scattered):
    heads, kv_heads, head_dim = shape
    made = make_pass(
        parts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, dtype=dtype, scattered=scattered
    )
    assert_same(attend, device, dtype, made)


PASSES = {
    "one row alone": [(1, 0, 0, False)],
    "documents without history": [(30, 0, 0, False), (1, 0, 0, False), (140, 0, 0, False), (3, 0, 0, False)],
    "questions after a rewind": [(9, 77, 0, False), (9, 16, 0, False), (1, 15, 0, False)],
    "partners of paged anchors": [
        (7, 200, 0, False),
        *[(5, 0, 0, True)] * 9,
        (4, 33, 0, False),
        (1, 0, 0, True),
    ],
    "a fresh anchor with its partners": [(40, 0, 0, False), (6, 0, 1, False), *[(6, 0, 0, True)] * 5],
    "a pass that spans anchors": [(60, 32, 0, False), (5, 64, 2, False), (8, 0, 0, True), (3, 0, 2, False)],
    "a prefill in pieces": [(200, 160, 0, False)],
}


@pytest.mark.parametrize("kind", PASSES)
def test_attention_of_what_a_scheduler_sends(attend, device, dtype, kind):
    made = make_pass(PASSES[kind], heads=6, kv_heads=2, head_dim=16, seed=4, dtype=dtype)
    assert_same(attend, device, dtype, made)


def test_what_is_not_finite_stays_in_its_segment(attend, device, dtype):
    parts = [(5, 40, 0, False), (6, 0, 0, True), (7, 0, 0, True)]
    made = make_pass(parts, heads=4, kv_heads=2, head_dim=16, seed=1, dtype=dtype)
    clean, clean_lse, *_ = both(attend, device, made)
    heads = made[0]
    heads[6, 4], heads[8, 6, 0], heads[9, 0] = float("inf"), float("nan"), float("nan")
    found, lse, *_ = both(attend, device, made)
    others = [*range(5), *range(11, 18)]
    assert torch.equal(found[others], clean[others]) and torch.equal(lse[others], clean_lse[others])
    assert found[8:11, :2].isnan().any(dim=-1).all(), "a NaN among the values that a row reads is lost"
    assert found[9, 0].isnan().all()


def test_scores_of_minus_infinity_weigh_nothing(attend, device, dtype):
    heads = torch.ones(3, 4, 8)
    heads[:, 2:] = draw(1, 3, 2, 8)
    heads[1, 2] = float("-inf")
    nothing = Segments(np.array([0]), np.array([3]), np.array([-1]), np.array([0]))
    made = (heads.to(dtype), torch.zeros(2, 1, PAGE, 1, 8, dtype=dtype), 1, nothing, BlockTable.of([]))
    found, found_lse, expected, expected_lse = both(attend, device, made)
    assert expected.isfinite().all()
    assert_near(found, expected, 2 * ROUNDING[dtype])
    assert_near(found_lse, expected_lse, 1e-5)


def test_a_run_of_partners_gathers_its_history_once():
    made = make_pass(
        [(7, 200, 0, False), *[(5, 0, 0, True)] * 9],
        heads=2,
        kv_heads=1,
        head_dim=8,
        seed=0,
        dtype=torch.float32,
    )
    own, far = gathered.plan(made[3], made[4], PAGE, torch.device("cpu"))
    assert own.source is None and own.window == gathered.CAUSAL
    assert len(far.source) == 200 and far.window == gathered.UNMASKED and far.longest_q == 52


def test_documents_without_history_are_not_gathered():
    made = make_pass(
        [(7, 0, 0, False), (5, 0, 0, False)], heads=2, kv_heads=1, head_dim=8, seed=0, dtype=torch.float32
    )
    (only,) = gathered.plan(made[3], made[4], PAGE, torch.device("cpu"))
    assert only.source is None and only.rows is None


@pytest.mark.parametrize("most_gathered", [1, 40, 130, 400])
@pytest.mark.parametrize("kind", PASSES)
def test_what_is_gathered_at_a_time_changes_no_answer(device, dtype, kind, most_gathered):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("varlen_attn takes bfloat16")
    kernels = cuda_kernels(dtype, device, "gathered")
    kernels.limit_gathered(most_gathered)
    made = make_pass(PASSES[kind], heads=6, kv_heads=2, head_dim=16, seed=4, dtype=dtype)
    assert_same(kernels.attend, device, dtype, made)


@few
@given(st.lists(part, min_size=1, max_size=8), st.integers(0, 500), st.integers(0, 10_000))
def test_a_pass_gathers_no_more_than_it_may(parts, most_gathered, seed):
    """Of one segment, or one history, all is gathered."""
    made = make_pass(parts, heads=4, kv_heads=2, head_dim=8, seed=seed, dtype=torch.float32)
    segments = made[3]
    calls = gathered.plan(segments, made[4], PAGE, torch.device("cpu"), most_gathered)
    whole = gathered.plan(segments, made[4], PAGE, torch.device("cpu"), 10**9)
    assert len(whole) <= 2
    spans = [call.span for call in calls if call.rows is None]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == segments.q_stop[-1]
    for name in ("source", "rows"):
        found, expected = (
            [
                value
                for call in some
                if getattr(call, name) is not None
                for value in getattr(call, name).tolist()
            ]
            for some in (calls, whole)
        )
        assert found == expected
    for call in calls:
        num_runs = len(call.k_ends) - 1
        assert call.source is None or len(call.source) <= most_gathered or num_runs == 1


def test_a_bound_that_nothing_reaches_makes_one_call():
    made = make_pass(
        PASSES["questions after a rewind"], heads=2, kv_heads=1, head_dim=8, seed=0, dtype=torch.float32
    )
    sizes = [
        len(gathered.plan(made[3], made[4], PAGE, torch.device("cpu"), most))
        for most in (127, 126, 111, 110, 1)
    ]
    assert sizes == [1, 2, 2, 2, 3]  # of 86, 25 and 16 keys


SOURCE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quail.kernels import triton_attention, triton_rows

def compile_it(kernel, types, constants, capability, warps=4, stages=2):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.asm["cubin"]
    return made

def arguments(kernel, constants, **types):
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}

for capability in (80, 90):
    for dtype in ("bf16", "fp32"):
        rows, at = triton_rows, triton_attention
        for head_dim, group in ((64, 3), (128, 4)) if dtype == "bf16" else ((64, 3),):
            shape = at.TileShape.of(group, head_dim, torch.bfloat16 if dtype == "bf16" else torch.float32)
            constants = dict(NUM_KV=2, GROUP=group, HEAD_DIM=head_dim, BLOCK_DIM=head_dim, PAGE=16,
                             LINES=shape.lines, KEYS=shape.keys, FIELDS=8,
                             PRECISION="tf32" if dtype == "bf16" else "ieee", WIDE=False)
            pointers = {name: "*" + dtype for name in ("q", "k", "v", "k_pages", "v_pages", "out")}
            pointers |= {name: "*i32" for name in ("tiles", "table", "context", "first_of_row")}
            types = arguments(at._attend_kernel, constants, lse="*fp32", factor="fp32", **pointers)
            made = compile_it(at._attend_kernel, types, constants, capability, shape.warps, shape.stages)
            print("attend", capability, dtype, head_dim, group, "shared", made.metadata.shared)
        constants = dict(ROWS=2, BLOCK=1024)
        types = arguments(rows._norm_kernel, constants, x="*fp32", weight="*fp32", out="*" + dtype, eps="fp32")
        compile_it(rows._norm_kernel, types, constants, capability)
        types = arguments(rows._gate_kernel, constants, gate_up="*" + dtype, out="*" + dtype)
        compile_it(rows._gate_kernel, types, constants, capability)
        pointers = {name: "*" + dtype for name in ("k", "v", "k_pages", "v_pages", "keys", "values")}
        types = arguments(rows._gather_kernel, constants, source="*i32", **pointers)
        compile_it(rows._gather_kernel, types, constants, capability)
        constants = dict(NUM_HEADS=8, HEAD_DIM=64, LINES=16, BLOCK=64)
        types = arguments(rows._merge_kernel, constants, out="*" + dtype, other="*" + dtype, lse="*fp32",
                          other_lse="*fp32", targets="*i32")
        compile_it(rows._merge_kernel, types, constants, capability)
        for normed in (False, True):
            constants = dict(NUM_Q=4, NUM_KV=2, HALF=32, NORMED=normed, ROWS=16, BLOCK=32)
            pointers = {name: "*fp32" for name in ("cos", "sin", "q_norm", "k_norm")}
            pointers |= {name: "*" + dtype for name in ("heads", "k_pages", "v_pages")}
            types = arguments(rows._rotate_kernel, constants, slot_of_row="*i64", eps="fp32", **pointers)
            compile_it(rows._rotate_kernel, types, constants, capability)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kernels_compile_for_cards_that_are_not_here(tmp_path):
    """Triton compiles without a card; the interpreter alone would let through what it cannot translate."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = tmp_path / "compile_kernels.py"
    script.write_text(SOURCE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = [int(line.rsplit(maxsplit=1)[1]) for line in done.stdout.splitlines() if line]
    assert len(shared) == 6 and max(shared) <= 99 * 1024, (
        "a program takes more shared memory than small cards have"
    )


def test_triton_is_imported_for_a_card_only():
    code = "import sys, quail.execution.runner, quail.models.decoder, quail.kernels.cuda; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
