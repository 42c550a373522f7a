"""Label trees: the right product for every label, and branches that read just their own past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.execution.label_tree import LabelTree
from quail.execution.requests import Document, Request
from quail.execution.scheduler import Scheduler
from quail.kv.pages import PageArena
from tests.engine.driver import ids_of
from tests.engine.hash_model import HashModel, state_of

END = 0
labels_strategy = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple), min_size=2, max_size=8, unique=True
)


def brute_force(labels, logits_of) -> list[float]:
    """Log-probability of each label by walking the trie token by token."""
    found = []
    for label in labels:
        total = 0.0
        for depth in range(len(label) + 1):
            path = label[:depth]
            going = [other for other in labels if other[:depth] == path]
            choices = {other[depth] for other in going if len(other) > depth}
            if path in labels and choices:
                choices.add(END)
            if depth == len(label):
                token = END
                if not choices:
                    continue
            else:
                token = label[depth]
            scores = logits_of(path)
            every = np.array([scores[c] for c in choices])
            total += scores[token] - np.log(np.exp(every - every.max()).sum()) - every.max()
        found.append(total)
    return found


@settings(max_examples=300, deadline=None)
@given(labels_strategy, st.integers(0, 1000))
def test_probabilities_are_the_restricted_products(labels, seed):
    table: dict[tuple, np.ndarray] = {}

    def logits_of(path):
        key = tuple(path)
        rng = np.random.default_rng([seed, *key])
        return table.setdefault(key, (3 * rng.standard_normal(4)).astype(np.float32))

    tree = LabelTree.build(labels, END)
    paths = [()]
    for branch in tree.branches:
        paths.append(paths[branch.parent + 1] + tuple(branch.ids.tolist()))
    logits = [logits_of(path)[ids][None] for path, ids in zip(paths, tree.children, strict=True)]
    found = tree.log_probabilities(logits)[0]
    np.testing.assert_allclose(found, brute_force(labels, logits_of), atol=1e-5)
    assert np.exp(found).sum() == pytest.approx(1.0, abs=1e-5)
    order = np.random.default_rng(seed).permutation(len(labels))
    again = LabelTree.build([labels[i] for i in order], END)
    paths = [()]
    for branch in again.branches:
        paths.append(paths[branch.parent + 1] + tuple(branch.ids.tolist()))
    logits = [logits_of(path)[ids][None] for path, ids in zip(paths, again.children, strict=True)]
    np.testing.assert_allclose(again.log_probabilities(logits)[0], found[order], atol=1e-6)


def test_labels_of_one_token_run_nothing_beside_the_question():
    tree = LabelTree.build([[5], [6], [7]], END)
    assert tree.num_tokens == 0
    assert [ids.tolist() for ids in tree.children] == [[5, 6, 7]]


def test_a_common_beginning_is_run_once_and_never_decides():
    tree = LabelTree.build([[9, 8, 5], [9, 8, 6], [9, 8, 6, 4]], END)
    assert [branch.ids.tolist() for branch in tree.branches] == [[9, 8], [6]]
    assert [ids.tolist() for ids in tree.children] == [[], [5, 6], [0, 4]]
    assert tree.paths == (((1, 0),), ((1, 1), (2, 0)), ((1, 1), (2, 1)))


@settings(max_examples=200, deadline=None)
@given(
    labels_strategy,
    st.integers(0, 40),
    st.integers(1, 10),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_branches_never_read_wrong_kv(labels, length, suffix_length, budget, keep, seed):
    rng = np.random.default_rng(seed)
    tree = LabelTree.build(labels, END)
    budget = max(budget, tree.num_tokens + 1)
    arena = PageArena(20)
    scheduler = Scheduler(arena, token_budget=budget, longest_suffix_tokens=suffix_length + tree.num_tokens)
    model = HashModel(20)
    documents = [Document(d, ids_of(rng, length, vocab=4), keep=keep) for d in range(3)]
    expected = {}
    for document in documents:
        scheduler.add(document)
        for stage in range(2):
            suffix = ids_of(rng, suffix_length, vocab=4)
            request = Request(document, stage, 0, suffix, length, branches=tree.branches)
            scheduler.submit(request)
            paths = [np.concatenate([document.ids, suffix])]
            for branch in tree.branches:
                paths.append(np.concatenate([paths[branch.parent + 1], branch.ids]))
            expected[document.handle, stage] = [state_of(path) for path in paths]
    while (planned := scheduler.next_pass()) is not None:
        states = model.forward(planned.chunk)
        arena.check_integrity()
        scheduler.complete()
        assert len(planned.chunk) <= budget
        for request, first in zip(planned.answered, planned.first_reads, strict=True):
            found = states[first : first + 1 + len(request.branches)].tolist()
            assert found == expected.pop((request.document.handle, request.stage))
    assert not expected
    scheduler.finish()
    scheduler.ledger.check()
    assert scheduler.ledger.computed == model.rows_run
    assert arena.num_free_pages == 20
