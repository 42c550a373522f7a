"""How llama.cpp is driven, on a fake of its C interface that keeps the tokens of each sequence."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers.engines import ADAPTERS

NUM_ANSWERS = 5
READOUT = [[token] for token in range(NUM_ANSWERS)]


class FakeInterface:
    """Sequences of tokens in place of KV; the best answer is a hash of a row's whole context."""

    def __init__(self) -> None:
        self.sequences: dict[int, list[int]] = defaultdict(list)
        self.rows: dict[int, list[int]] = {}
        self.batches: list[int] = []

    def llama_memory_clear(self, memory, data) -> None:
        self.sequences.clear()

    def llama_memory_seq_rm(self, memory, sequence, start, stop) -> None:
        assert stop == -1
        del self.sequences[sequence][max(start, 0) :]

    def llama_memory_seq_cp(self, memory, source, target, start, stop) -> None:
        assert (start, stop) == (0, -1) and not self.sequences[target]
        self.sequences[target] = list(self.sequences[source])

    def llama_decode(self, context, batch) -> int:
        self.rows.clear()
        self.batches.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            held = self.sequences[batch.seq_id[row][0]]
            assert batch.pos[row] == len(held), "a token stands behind those of its sequence"
            held.append(batch.token[row])
            if batch.logits[row]:
                self.rows[row] = list(held)
        return 0

    def llama_get_logits_ith(self, context, place):
        logits = np.zeros(NUM_ANSWERS)
        logits[expected(self.rows[place])] = 1.0
        return logits


def expected(prompt: list[int]) -> int:
    return hash(tuple(prompt)) % NUM_ANSWERS


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ADAPTERS))
    return importlib.import_module("run_llama_cpp")


@pytest.fixture
def engine(module):
    made = module.LlamaCpp()
    made.api, made.context, made.memory, made.current = FakeInterface(), None, None, []
    rows = module.BATCH
    made.batch = SimpleNamespace(
        token=[0] * rows,
        pos=[0] * rows,
        n_seq_id=[0] * rows,
        seq_id=[[0] for _ in range(rows)],
        logits=[0] * rows,
        n_tokens=0,
    )
    return made


def step(*tails: list[int], frame: tuple[int, ...] = ()) -> dict[str, object]:
    return {"frame": list(frame), "tails": list(tails)}


def check(engine, documents) -> dict[str, list[int]]:
    """Runs documents and compares every answer with that of the whole prompt."""
    steps = max(len(document["steps"]) for document in documents)
    reply = engine.run({"documents": documents, "readouts": [READOUT] * steps})
    for document, answers in zip(documents, reply["answers"], strict=True):
        for asked, found in zip(document["steps"], answers, strict=True):
            prompts = [[*document["ids"], *asked["frame"], *tail] for tail in asked["tails"]]
            assert found == [expected(prompt) for prompt in prompts]
    return reply


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_a_second_question_computes_its_own_tokens_only(engine) -> None:
    document = {"ids": ids(300, 1), "steps": [step([1, 2, 3]), step([4, 5])]}
    assert check(engine, [document])["computed"] == [303, 2]


def test_what_documents_begin_with_is_computed_once(engine) -> None:
    head = ids(200, 1)
    documents = [{"ids": head + ids(50, seed), "steps": [step([1, 2])]} for seed in (2, 3)]
    assert check(engine, documents)["computed"] == [252 + 52]


def test_partners_branch_off_their_anchor(engine) -> None:
    documents = [
        {"ids": ids(150, seed), "steps": [step([9]), step(*(ids(7, t) for t in range(80)), frame=(3, 4))]}
        for seed in (1, 2)
    ]
    assert check(engine, documents)["computed"] == [2 * 151, 2 * (2 + 80 * 7)]


def test_short_documents_run_several_to_a_batch(engine, module) -> None:
    documents = [{"ids": ids(20, seed), "steps": [step([1])]} for seed in range(100)]
    check(engine, documents)
    assert len(engine.api.batches) == -(-100 // (module.MICRO_BATCH // 21))
    assert max(engine.api.batches) <= module.MICRO_BATCH


def test_long_documents_come_in_pieces(engine, module) -> None:
    document = {"ids": ids(2 * module.BATCH + 100, 1), "steps": [step([1])]}
    assert check(engine, [document])["computed"] == [2 * module.BATCH + 101]
    assert engine.api.batches == [module.BATCH, module.BATCH, 101]


def test_a_prompt_that_is_there_already_computes_its_last_token(engine) -> None:
    document = {"ids": ids(200, 1), "steps": [step([1]), step([1])]}
    assert check(engine, [document])["computed"] == [201, 1]
