"""The forward pass and whole queries with the kernels for CUDA, interpreted on the CPU, equal those with plain ones."""

from __future__ import annotations

import gc
import importlib
import sys

import numpy as np
import pytest
import torch

import quail
from quail.config import EngineConfig
from quail.errors import ConfigError
from quail.kernels import choice as choices
from quail.kernels import cuda
from quail.kernels.choice import KernelChoice
from quail.kernels.cuda import Card, CudaKernels, adds_in_float32
from quail.models import decoder as decoders
from quail.models.decoder import Decoder
from quail.models.loader import load_model
from tests.engine.kernel_sets import CUDA_DEVICES, cuda_device, cuda_kernels, plain_kernels
from tests.engine.test_decoder import make_arena, prompt, run_piece
from tests.models.tiny import make_tiny

PATHS = ("gathered", "paged")
WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]
FILTERS = " AND ".join(
    f"AI.IF(PROMPT('{question} {{0}}', body))" for question in ("Is this about the sea?", "Is it dull?")
)
PAIR = "AI.IF(PROMPT('Does {0} speak of the same thing as {1}?', l.body, r.body))"
LABEL = "AI.CLASSIFY(PROMPT('{0} The mood is', body), ['rather happy', 'rather sad', 'neither'])"
QUERIES = {
    "filters": f"SELECT id FROM t WHERE {FILTERS}",
    "join": f"SELECT l.id, r.id FROM l JOIN r ON {PAIR}",
    "labels": f"SELECT id, {LABEL} FROM t",
    "scores": f"SELECT l.id, r.id, {PAIR.replace('AI.IF', 'AI.SCORE')} FROM l, r",
}


@pytest.fixture(scope="module", params=CUDA_DEVICES)
def device(request):
    with np.errstate(all="ignore"):
        yield cuda_device(request.param)


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen2", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    head_dim = 32 if request.param == "qwen3" else None
    return make_tiny(
        tmp_path_factory.mktemp("model"), request.param, seed=7, head_dim=head_dim, layers=2, context=512
    )


def decoder_of(folder, cache, kernels, dtype, device) -> Decoder:
    loaded = load_model(str(folder), dtype=dtype, cache_dir=cache)
    return Decoder(loaded.config, {n: t.clone().to(device) for n, t in loaded.weights.items()}, kernels)


@pytest.fixture(scope="module", params=PATHS)
def pair(request, device, folder, tmp_path_factory):
    """(a decoder with the kernels for CUDA, one with plain kernels on the CPU)."""
    cache, dtype = tmp_path_factory.mktemp("cache"), torch.float32
    if device.type == "cuda" and request.param == "gathered":
        pytest.skip("varlen_attn takes bfloat16")
    kernels = cuda_kernels(dtype, device, request.param)
    fast = decoder_of(folder, cache, kernels, dtype, device)
    return fast, decoder_of(folder, cache, plain_kernels(), dtype, torch.device("cpu"))


def assert_near_logits(found, expected, share=2e-5):
    assert (found.cpu() - expected).abs().max() <= share * expected.abs().max()


def test_prefill_and_questions_after_a_rewind(pair):
    document = prompt(70)
    tables = [(decoder, arena := make_arena(decoder), arena.pages.open("document", 70)) for decoder in pair]
    for count, question in enumerate([prompt(5, seed=5), prompt(23, seed=6)]):
        ids, start = np.concatenate([document, question]), 70 if count else 0
        found, expected = (
            run_piece(decoder, arena, ids, start, len(ids), table, writes=0 if count else 70)
            for decoder, arena, table in tables
        )
        assert_near_logits(found, expected)


def test_prefill_in_pieces(pair):
    ids = prompt(70)
    logits = []
    for decoder in pair:
        arena = make_arena(decoder)
        table = arena.pages.open("prompt", 70)
        pieces = [(0, 33), (33, 34), (34, 70)]
        logits.append(
            torch.cat([run_piece(decoder, arena, ids, a, b, table, writes=b - a).cpu() for a, b in pieces])
        )
    assert_near_logits(*logits)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_stays_within_its_rounding(device, folder, tmp_path, path):
    dtype, ids = torch.bfloat16, prompt(60)
    fast = decoder_of(folder, tmp_path, cuda_kernels(dtype, device, path), dtype, device)
    plain = decoder_of(folder, tmp_path, plain_kernels(), dtype, torch.device("cpu"))
    exact = decoder_of(folder, tmp_path, plain_kernels(), torch.float32, torch.device("cpu"))
    found, rounded, expected = (
        run_piece(each, make_arena(each), ids, 0, 60, None, writes=0).cpu() for each in (fast, plain, exact)
    )
    size = expected.square().mean().sqrt()
    error, error_of_plain = ((each - expected).square().mean().sqrt() / size for each in (found, rounded))
    assert 0 < error <= 1.25 * error_of_plain < 0.1


@pytest.mark.parametrize("path", PATHS)
def test_a_pass_is_indexed_once_whatever_its_layers(device, folder, tmp_path, monkeypatch, path):
    copies = []
    planning = {"gathered": "quail.kernels.gathered", "paged": "quail.kernels.triton_attention"}
    for module in (decoders, importlib.import_module(planning[path])):

        def counted(arrays, device, original=module.upload):
            copies.append(len(arrays))
            return original(arrays, device)

        monkeypatch.setattr(module, "upload", counted)
    dtype = torch.bfloat16
    decoder = decoder_of(folder, tmp_path, cuda_kernels(dtype, device, path), dtype, device)
    arena = make_arena(decoder)
    table = arena.pages.open("prompt", 40)
    for done, (start, stop) in enumerate([(0, 30), (30, 40)], start=1):
        run_piece(decoder, arena, prompt(40), start, stop, table, writes=stop - start)
        assert len(copies) == 2 * done, "one copy for the model, one for its attention"
    gc.collect()
    assert not decoder.kernels._plans, "a pass that is done is forgotten"


def test_the_same_segments_with_another_table_are_another_pass(device):
    from quail.execution.chunk import BlockTable
    from quail.kernels import reference
    from tests.engine.test_attention import make_case

    for path in PATHS:
        kernels = cuda_kernels(torch.bfloat16, device, path)
        case = make_case(
            [5],
            [20],
            [False],
            heads=2,
            kv_heads=1,
            head_dim=16,
            seed=2,
            scattered=False,
            dtype=torch.bfloat16,
        )
        *tensors, segments, _ = case
        q, k, v, k_pages, v_pages = (each.to(device) for each in tensors)
        for pages in ([0, 1], [2, 3]):
            table = BlockTable.of([pages])
            found, _ = kernels.attend(q, k, v, k_pages, v_pages, segments, table, scale=0.25)
            expected, _ = reference.attend(*case[:6], table, scale=0.25)
            torch.testing.assert_close(found.cpu().float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=7, context=512, layers=2)


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"{number} " + " ".join(rng.choice(WORDS, rng.integers(1, 12))) for number in range(count)]


def rows_of(folder, cache, sql: str, **settings):
    settings = {"model": str(folder), "dtype": "float32", "layout": "completion", **settings}
    config = EngineConfig(cache_dir=cache, kv_memory="4MiB", answers="off", **settings)
    with quail.Session(config) as session:
        session.register("t", {"id": list(range(12)), "body": texts(12, 3)})
        session.register("l", {"id": list(range(5)), "body": texts(5, 4)})
        session.register("r", {"id": list(range(4)), "body": texts(4, 5)})
        result = session.sql(sql).run(progress=False)
        return sorted(result.fetchall()), result.report


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUERIES)
def test_queries_have_the_same_rows(llama, tmp_path, monkeypatch, kind, path):
    cpu = cuda_device("cpu")
    expected, _ = rows_of(llama, tmp_path, QUERIES[kind], kernels="reference")
    kernels = cuda_kernels(torch.float32, cpu, path)
    monkeypatch.setattr(KernelChoice, "kernels", lambda self, dtype, device, threads: kernels)
    with np.errstate(all="ignore"):
        found, report = rows_of(llama, tmp_path, QUERIES[kind], kernels="reference", token_budget=512)
    assert expected and len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4) if kind == "scores" else row == other
    assert kernels._paths == {16: path}, "another attention ran"
    assert kernels._most_gathered == 2 * 512, "what is gathered is not what the plan counts"
    tokens = report.tokens
    assert tokens["reused_rewind"] > 0 or kind == "labels"


ABLE = Card((8, 0), (2, 11), has_triton=True)


@pytest.mark.parametrize(
    ("card", "dtype", "head_dim", "expected"),
    [
        (ABLE, torch.bfloat16, 64, "gathered"),
        (ABLE, torch.bfloat16, 256, "gathered"),
        (ABLE, torch.float32, 64, "reference"),
        (ABLE, torch.bfloat16, 60, "paged"),
        (ABLE, torch.bfloat16, 512, "reference"),
        (Card((7, 5), (2, 13), has_triton=True), torch.bfloat16, 64, "paged"),
        (Card((9, 0), (2, 10), has_triton=True), torch.bfloat16, 64, "paged"),
        (Card((7, 5), (2, 13), has_triton=False), torch.bfloat16, 64, "reference"),
        (Card((10, 0), (3, 0), has_triton=False), torch.bfloat16, 128, "gathered"),
    ],
)
def test_auto_takes_the_first_attention_that_can_run(card, dtype, head_dim, expected):
    assert card.path("auto", dtype, head_dim) == expected


@pytest.mark.parametrize(
    ("card", "wanted", "dtype", "head_dim", "message"),
    [
        (ABLE, "gathered", torch.float32, None, "takes bfloat16, and the model runs in float32"),
        (ABLE, "gathered", torch.bfloat16, 60, "a multiple of 8, and the model's have 60"),
        (ABLE, "paged", torch.bfloat16, 512, "heads up to 256, and the model's have 512"),
        (
            Card((7, 5), (2, 13), has_triton=True),
            "gathered",
            torch.bfloat16,
            None,
            "8.0, and the card has 7.5",
        ),
        (
            Card((9, 0), (2, 10), has_triton=True),
            "gathered",
            torch.bfloat16,
            None,
            "torch 2.11, and this is 2.10",
        ),
        (
            Card((9, 0), (2, 13), has_triton=False),
            "paged",
            torch.bfloat16,
            None,
            "'paged', but it needs Triton",
        ),
    ],
)
def test_an_attention_that_cannot_run_is_refused(card, wanted, dtype, head_dim, message):
    with pytest.raises(ConfigError, match=message):
        card.path(wanted, dtype, head_dim)


def triton_rows():
    return importlib.import_module("quail.kernels.triton_rows")


def with_card(monkeypatch, capability=(9, 0)):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(choices, "_fault_of_triton", choices._fault_of_triton.__wrapped__)  # asked anew
    monkeypatch.setattr("quail.kernels.triton_rows.launch", lambda device: None)


def test_the_choice_for_a_card(tmp_path, monkeypatch):
    with_card(monkeypatch)
    choice = KernelChoice.of("auto", "cuda", tmp_path).compiled("auto")
    assert choice.description == (
        "cuda triton (norms, rotary positions, activation by Triton; "
        "attention: gathered in bfloat16, reference in float32)"
    )
    cpu = torch.device("cpu")
    kernels = choice.kernels(torch.bfloat16, cpu, 1)
    assert isinstance(kernels, CudaKernels) and kernels.name == "cuda triton"
    assert [kernels.attention_path(size) for size in (64, 60)] == ["gathered", "paged"]
    demanded = KernelChoice.of("auto", "cuda", tmp_path, "gathered")
    assert "none in float32: attention = 'gathered', but varlen_attn takes bfloat16" in demanded.description
    with pytest.raises(ConfigError, match="runs in float32"):
        demanded.kernels(torch.float32, cpu, 1)
    assert KernelChoice.of("reference", "cuda", tmp_path).description == "reference (kernels = 'reference')"


def test_an_old_card_is_told(tmp_path, monkeypatch):
    with_card(monkeypatch, (7, 5))
    description = KernelChoice.of("auto", "cuda", tmp_path).description
    assert "attention: paged in bfloat16" in description
    assert "varlen_attn needs compute capability 8.0, and the card has 7.5" in description


def test_without_triton_torch_does_the_rest(tmp_path, monkeypatch):
    with_card(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    choice = KernelChoice.of("auto", "cuda", tmp_path)
    assert choice.description.startswith("cuda torch (by torch, since Triton cannot be imported: ")
    assert "\n" not in choice.description
    with pytest.raises(
        ConfigError, match="kernels = 'native', but there are none here: Triton cannot be imported"
    ):
        KernelChoice.of("native", "cuda", tmp_path)
    with pytest.raises(ConfigError, match="attention = 'paged', but it needs Triton"):
        KernelChoice.of("auto", "cuda", tmp_path, "paged").kernels(torch.bfloat16, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify via CC\nenvironment"),
            "Failed to find C compiler.",
        ),
        (OSError(2, "No such file or directory", "gcc"), "No such file or directory: 'gcc'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_triton_that_cannot_compile_is_as_good_as_none(tmp_path, monkeypatch, error, said):
    """Containers without a C compiler have a Triton that is imported without fault."""
    with_card(monkeypatch)

    def fails(device):
        raise error

    monkeypatch.setattr("quail.kernels.triton_rows.launch", fails)
    choice = KernelChoice.of("auto", "cuda", tmp_path)
    assert choice.description.startswith("cuda torch (by torch, since Triton cannot launch a kernel: ")
    assert said in choice.description and "\n" not in choice.description
    kernels = choice.kernels(torch.bfloat16, torch.device("cpu"), 1)
    assert isinstance(kernels, cuda.CudaKernels)
    assert kernels._rows is None and kernels.attention_path(64) == "gathered"
    with pytest.raises(ConfigError, match="'native', but there are none here: Triton cannot launch a kernel"):
        KernelChoice.of("native", "cuda", tmp_path)


def test_the_kernel_that_tries_triton_runs(device):
    triton_rows().launch(device)


def test_a_kernel_without_effect_is_found_out(device, monkeypatch):
    monkeypatch.setattr("quail.kernels.triton_rows.gate", lambda gate_up, out: out.fill_(7.0))
    with pytest.raises(RuntimeError, match=r"silu\(0\) comes out as 7.0"):
        triton_rows().launch(device)


@pytest.mark.parametrize(("device_type", "mode"), [("cpu", "auto"), ("cuda", "reference"), ("mps", "auto")])
def test_attention_of_cards_is_refused_elsewhere(tmp_path, device_type, mode):
    with pytest.raises(ConfigError, match="attention = 'paged' is for the kernels of CUDA devices"):
        KernelChoice.of(mode, device_type, tmp_path, "paged")


def test_products_are_added_to_float32_sums():
    kernels = cuda_kernels(torch.bfloat16, torch.device("cpu"), has_triton=False)
    x, weight, bias = torch.randn(5, 32).bfloat16(), torch.randn(7, 32).bfloat16(), torch.arange(7.0)
    total = torch.full((5, 7), 1000.5)
    kernels.add_product(x, kernels.matrix([weight]), bias, total)
    product = x.double() @ weight.double().t()
    assert (total.double() - 1000.5 - bias - product).abs().max() <= 2**-8 * product.abs().max() + 1e-3


def test_what_torch_cannot_do_is_found_out():
    """This torch adds products of bfloat16 to float32 sums on cards only."""
    assert not adds_in_float32(torch.bfloat16, torch.device("cpu"))
