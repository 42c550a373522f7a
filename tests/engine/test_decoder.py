"""The forward pass against Hugging Face transformers: whole, in pieces, after a rewind, packed with
others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quail.execution.chunk import BlockTable, Chunk, Segments
from quail.kernels import attention, reference
from quail.kernels.reference import TorchKernels
from quail.kv.arena import KVArena
from quail.kv.pages import PageTable
from quail.models.config import config_from_hf
from quail.models.decoder import Decoder
from tests.engine.kernel_sets import native_kernels
from tests.models.tiny import make_tiny

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 100, 1000)
VARIANTS = [(family, tied) for family in ("llama", "llama3", "qwen2", "qwen3") for tied in (True, False)]


def make_arena(decoder: Decoder, num_pages: int = 80) -> KVArena:
    config = decoder.config
    return KVArena(
        num_pages,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )


def run_piece(
    decoder, arena, ids, start: int, stop: int, table: PageTable | None, *, writes: int
) -> torch.Tensor:
    """Runs rows [start, stop) of a prompt, keeping KV of the first `writes`; logits of all its rows."""
    num = stop - start
    chunk = Chunk(
        ids=np.asarray(ids[start:stop], dtype=np.int32),
        positions=np.arange(start, stop, dtype=np.int64),
        segments=Segments(np.array([0]), np.array([num]), np.array([0 if start else -1]), np.array([start])),
        block_table=BlockTable.of([table.pages] if start else []),
        write_rows=np.arange(writes, dtype=np.int64),
        write_slots=table.append(writes) if writes else np.zeros(0, dtype=np.int64),
        read_rows=np.arange(num, dtype=np.int64),
    )
    return decoder.head(decoder.forward(chunk, arena))


@pytest.fixture(
    scope="module",
    params=[(*each, "native") for each in VARIANTS] + [(*each, "reference") for each in VARIANTS if each[1]],
    ids=lambda v: f"{v[0]}-{'tied' if v[1] else 'untied'}-{v[2]}",
)
def pair(request, tmp_path_factory):
    """(our decoder, the Hugging Face model) of one tiny random model in float32."""
    from transformers import AutoModelForCausalLM

    family, tied, kernels = request.param
    head_dim = 32 if family == "qwen3" else None
    folder = make_tiny(tmp_path_factory.mktemp(family), family, tied=tied, seed=7, head_dim=head_dim)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    if tied:
        weights.pop("lm_head.weight", None)
    config = config_from_hf(oracle.config.to_dict(), "the tiny model")
    chosen = native_kernels(torch.float32) if kernels == "native" else TorchKernels(attention.attend)
    return Decoder(config, weights, chosen), oracle


def oracle_logits(oracle, ids) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.as_tensor(np.asarray(ids, dtype=np.int64)).unsqueeze(0)).logits[0].float()


def assert_close(found: torch.Tensor, expected: torch.Tensor, scale: float = 1e-4) -> None:
    gap = (found - expected).abs().max().item()
    assert gap <= scale * expected.abs().max().item(), (
        f"gap {gap}, largest logit {expected.abs().max().item()}"
    )


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(20, 500, num_tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prefill(pair, length):
    decoder, oracle = pair
    ids = prompt(length)
    found = run_piece(decoder, make_arena(decoder), ids, 0, length, None, writes=0)
    assert_close(found, oracle_logits(oracle, ids))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("piece", [1, 7, 16])
def test_prefill_in_pieces(pair, length, piece):
    decoder, oracle = pair
    if piece == 1 and length > 100:
        length = 130
    ids = prompt(length)
    arena = make_arena(decoder)
    table = arena.pages.open("prompt", length)
    found = [
        run_piece(
            decoder, arena, ids, start, min(start + piece, length), table, writes=min(piece, length - start)
        )
        for start in range(0, length, piece)
    ]
    assert_close(torch.cat(found), oracle_logits(oracle, ids))


@pytest.mark.parametrize("length", LENGTHS)
def test_questions_after_a_rewind(pair, length):
    decoder, oracle = pair
    document, questions = prompt(length), [prompt(n, seed=n) for n in (5, 23, 5)]
    arena = make_arena(decoder)
    table = arena.pages.open("document", length)
    for count, question in enumerate(questions):
        ids = np.concatenate([document, question])
        start = 0 if count == 0 else length
        found = run_piece(decoder, arena, ids, start, len(ids), table, writes=length if count == 0 else 0)
        assert_close(found, oracle_logits(oracle, ids)[start:])


@pytest.mark.parametrize("length", [33, 100])
def test_resuming_at_any_cached_length(pair, length):
    decoder, oracle = pair
    ids = prompt(length)
    expected = oracle_logits(oracle, ids)
    for cached in range(1, length, 1 if length < 50 else 7):
        arena = make_arena(decoder, 8)
        table = arena.pages.open("prompt", length)
        run_piece(decoder, arena, ids, 0, cached, table, writes=cached)
        assert_close(run_piece(decoder, arena, ids, cached, length, table, writes=0), expected[cached:])


@pytest.mark.parametrize("attend", [None, attention.attend, reference.attend])
def test_packed_prompts_do_not_see_each_other(pair, attend, monkeypatch):
    decoder, oracle = pair
    if attend is not None:
        monkeypatch.setattr(decoder, "kernels", TorchKernels(attend))
    prompts = [prompt(n, seed=n) for n in (17, 4, 40, 4)]
    stops = np.cumsum([len(p) for p in prompts])
    starts = stops - [len(p) for p in prompts]

    def run(first):
        packed = [first, *prompts[1:]]
        chunk = Chunk(
            ids=np.concatenate(packed).astype(np.int32),
            positions=np.concatenate([np.arange(len(p)) for p in packed]),
            segments=Segments(starts, stops, np.full(4, -1), np.zeros(4, dtype=np.int64)),
            block_table=BlockTable.of([]),
            write_rows=np.zeros(0, dtype=np.int64),
            write_slots=np.zeros(0, dtype=np.int64),
            read_rows=stops - 1,
        )
        return decoder.head(decoder.forward(chunk, make_arena(decoder, 1)))

    found = run(prompts[0])
    for row, ids in enumerate(prompts):
        assert_close(found[row], oracle_logits(oracle, ids)[-1])
    assert torch.equal(run(prompt(17, seed=99))[1:], found[1:]), "an answer changes with its neighbour"


@pytest.mark.parametrize("reads", [[], [3], [19, 0, 7]])
def test_behind_the_last_attention_only_rows_to_read_are_computed(pair, reads, monkeypatch):
    decoder, oracle = pair
    rows_of_call = []
    gated_product = type(decoder.kernels).gated_product

    def counted(self, x, matrix, out):
        rows_of_call.append(len(x))
        gated_product(self, x, matrix, out)

    monkeypatch.setattr(type(decoder.kernels), "gated_product", counted)
    ids = prompt(20)
    chunk = Chunk(
        ids=ids.astype(np.int32),
        positions=np.arange(20),
        segments=Segments(np.array([0]), np.array([20]), np.array([-1]), np.array([0])),
        block_table=BlockTable.of([]),
        write_rows=np.zeros(0, dtype=np.int64),
        write_slots=np.zeros(0, dtype=np.int64),
        read_rows=np.array(reads, dtype=np.int64),
    )
    found = decoder.head(decoder.forward(chunk, make_arena(decoder, 1)))
    assert len(found) == len(reads)
    if reads:
        assert_close(found, oracle_logits(oracle, ids)[reads])
    before_last = [20] * (decoder.config.num_layers - 1)
    assert rows_of_call == before_last + [len(reads)] * bool(reads)


def test_the_head_computes_only_the_wanted_rows(pair):
    decoder, _ = pair
    states = torch.randn(3, decoder.config.hidden_size)
    wanted = np.array([5, 400, 7])
    torch.testing.assert_close(
        decoder.head(states, wanted), decoder.head(states)[:, wanted], atol=1e-5, rtol=1e-5
    )
