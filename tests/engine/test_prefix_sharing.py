"""Prefix sharing: the tree shares all that whole pages allow, and borrowed KV is never read wrongly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.cost.work import Work
from quail.execution.requests import Document, in_tree_order
from quail.kv.prefix_sharing import PrefixTree
from tests.engine.driver import Driver, ids_of, smallest_arena


def optimum(documents, page: int) -> int:
    """Most tokens that whole pages and the rule of the last token allow, by a trie over pages.

    Of the documents that run through a page, one computes it; so does each whose last token lies in it. The
    others borrow.
    """
    through: dict[tuple, list[bool]] = {}
    for ids in documents:
        for stop in range(page, len(ids) + 1, page):
            through.setdefault(tuple(ids[:stop]), []).append(len(ids) == stop)
    return sum(page * (len(ends) - max(1, sum(ends))) for ends in through.values())


def check_tree(tree: PrefixTree, documents, page: int) -> None:
    place = {index: at for at, index in enumerate(tree.order)}
    assert sorted(place) == list(range(len(documents)))
    owners = []
    for index, ids in enumerate(documents):
        parent, shared = tree.parent[index], tree.shared[index]
        assert (parent is None) == (shared == 0)
        assert shared % page == 0
        assert shared < max(1, len(ids))
        if parent is not None:
            assert place[parent] < place[index], "a parent comes first"
            assert list(documents[parent][:shared]) == list(ids[:shared])
            assert tree.shared[parent] < shared, "the parent owns a part of what it lends"
            owners.append((index, parent))


def test_snapshots_of_one_trace():
    trace = list(range(1900))
    tree = PrefixTree.build([trace[:1000], trace[:1400], trace])
    assert tree == PrefixTree(order=[0, 1, 2], parent=[None, 0, 1], shared=[0, 992, 1392])
    computed = sum(n - shared for n, shared in zip((1000, 1400, 1900), tree.shared, strict=True))
    assert computed == 1916
    labelled = [[7] * 6 + trace[:n] for n in (1000, 1400, 1900)]
    tree = PrefixTree.build(labelled)
    assert tree.shared == [0, 992, 1392]
    assert sum(map(len, labelled)) - sum(tree.shared) == 1934


def test_every_small_set_of_documents_shares_the_optimum():
    words = [w for n in range(5) for w in itertools.product((0, 1), repeat=n)]
    for count in (1, 2, 3):
        for documents in itertools.product(words, repeat=count):
            tree = PrefixTree.build(documents, page_tokens=2)
            check_tree(tree, documents, 2)
            assert sum(tree.shared) == optimum(documents, 2), documents


@pytest.mark.parametrize("part", range(4))
def test_random_sets_share_the_optimum(part):
    rng = np.random.default_rng(part)
    for _ in range(5_000):
        page = int(rng.integers(1, 5))
        vocab = int(rng.integers(1, 4))
        documents = [rng.integers(0, vocab, rng.integers(0, 14)).tolist() for _ in range(rng.integers(0, 9))]
        for _ in range(int(rng.integers(0, 4))):
            if documents:
                base = documents[int(rng.integers(len(documents)))]
                documents.append(base + rng.integers(0, vocab, rng.integers(0, 5)).tolist())
        tree = PrefixTree.build(documents, page_tokens=page)
        check_tree(tree, documents, page)
        assert sum(tree.shared) == optimum(documents, page), (documents, page)


def run_shared(documents, suffixes, *, pages, budget, page=16, passes=lambda d, q: True, depth=1) -> Driver:
    driver = Driver(
        documents,
        suffixes,
        num_pages=pages,
        budget=budget,
        passes=passes,
        shares=True,
        page_tokens=page,
        depth=depth,
    )
    driver.run()
    assert not driver.failures
    return driver


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_small_set_runs_right_on_the_tightest_arena(depth):
    rng = np.random.default_rng(0)
    words = [np.array(w, dtype=np.int32) for n in range(5) for w in itertools.product((0, 1), repeat=n)]
    suffixes = [ids_of(rng, 2), ids_of(rng, 1)]
    cases = list(itertools.product(words, repeat=3))
    for number in range(0, len(cases), 7):
        documents = list(cases[number])
        budget = (2, 3, 5, 16)[number % 4]
        questions = suffixes[: 1 + number % 2]
        pages = smallest_arena(documents, questions, budget, 2)
        driver = run_shared(documents, questions, pages=pages, budget=budget, page=2, depth=depth)
        assert len(driver.answers) == 3 * len(questions)
        ample = run_shared(documents, questions, pages=pages + 20, budget=budget, page=2, depth=depth)
        computed = sum(map(len, documents)) - optimum([d.tolist() for d in documents], 2)
        assert ample.scheduler.ledger.computed == computed + 3 * sum(map(len, questions))
        assert ample.scheduler.ledger.recomputed == 0


families = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=10
)


@settings(max_examples=500, deadline=None)
@given(
    families,
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 80),
    st.integers(0, 15),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_random_families_never_read_wrong_kv(members, suffix_lengths, budget, spare, seed, depth):
    rng = np.random.default_rng(seed)
    trunks = [ids_of(rng, 60, vocab=3) for _ in range(4)]
    documents = [np.concatenate([trunks[t][:n], ids_of(rng, extra, vocab=3)]) for t, n, extra in members]
    suffixes = [ids_of(rng, n, vocab=3) for n in suffix_lengths]
    passing = rng.random((len(documents), len(suffixes))) < 0.7
    pages = smallest_arena(documents, suffixes, budget) + spare
    driver = run_shared(
        documents,
        suffixes,
        pages=pages,
        budget=budget,
        passes=lambda d, q: bool(passing[d, q]),
        depth=depth,
    )
    expected = {(d, q) for d in range(len(documents)) for q in range(len(suffixes)) if passing[d, :q].all()}
    assert set(driver.answers) == expected


@pytest.mark.parametrize("budget", [64, 300, 4096])
@pytest.mark.parametrize("ample", [False, True])
def test_a_deep_chain_of_snapshots(budget, ample):
    rng = np.random.default_rng(1)
    trace = ids_of(rng, 2000)
    documents = [trace[: 10 * n] for n in range(1, 201)]
    suffixes = [ids_of(rng, 7)]
    driver = run_shared(documents, suffixes, pages=400 if ample else 125, budget=budget)
    ledger = driver.scheduler.ledger
    if ample:
        assert ledger.reused_prefix == optimum([d.tolist() for d in documents], 16)
        assert ledger.recomputed == 0
    assert len(driver.answers) == 200


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 4096])
def test_a_wide_fan_computes_its_beginning_once(budget, depth):
    rng = np.random.default_rng(2)
    start = ids_of(rng, 320)
    documents = [np.concatenate([start, [60 + d], ids_of(rng, 20)]).astype(np.int32) for d in range(1000)]
    driver = run_shared(documents, [ids_of(rng, 5)], pages=200, budget=budget, depth=depth)
    assert driver.scheduler.ledger.computed == 320 + 1000 * (21 + 5)
    assert driver.scheduler.ledger.reused_prefix == 999 * 320


def test_identical_and_nearly_identical_documents():
    rng = np.random.default_rng(3)
    for length in (1, 15, 16, 17, 31, 32, 33, 48):
        base = ids_of(rng, length)
        nearly = base.copy()
        nearly[-1] += 1
        driver = run_shared([base, base, nearly, base[: length // 2]], [ids_of(rng, 3)], pages=20, budget=64)
        assert driver.scheduler.ledger.recomputed == 0
        expected = optimum([base.tolist(), base.tolist(), nearly.tolist(), base[: length // 2].tolist()], 16)
        assert driver.scheduler.ledger.reused_prefix == expected


def test_a_single_question_writes_only_what_is_lent():
    rng = np.random.default_rng(4)
    start = ids_of(rng, 32)
    documents = [np.concatenate([start, ids_of(rng, 100)]) for _ in range(2)]
    documents.append(ids_of(rng, 132))
    driver = run_shared(documents, [ids_of(rng, 5)], pages=20, budget=4096)
    assert driver.arena.peak_used_pages == 2


def test_a_failed_parent_leaves_its_children_to_themselves():
    rng = np.random.default_rng(5)
    trunk = ids_of(rng, 64)
    documents = [
        trunk[:40],
        np.concatenate([trunk, ids_of(rng, 30)]),
        np.concatenate([trunk, ids_of(rng, 9)]),
    ]
    driver = Driver(documents, [ids_of(rng, 3)], num_pages=20, budget=256, shares=True)
    driver.submit_all()
    parent = driver.scheduler.document(driver.tree.order[0])
    driver.scheduler.fail(parent.requests[0])
    while driver.step():
        pass
    driver.check_end()
    assert len(driver.answers) == 2


def test_pages_on_loan_give_way_and_are_computed_again():
    """A document that needs the whole arena stands between a parent and its child."""
    rng = np.random.default_rng(6)
    trunk = ids_of(rng, 64)
    parent, big, child = trunk, ids_of(rng, 100), np.concatenate([trunk, ids_of(rng, 10)])
    driver = Driver([parent, big, child], [ids_of(rng, 3), ids_of(rng, 2)], num_pages=7, budget=67)
    known = [Document(d, ids, name=f"row {d}") for d, ids in enumerate(driver.documents)]
    in_tree_order(known, PrefixTree(order=[0, 1, 2], parent=[None, None, 0], shared=[0, 0, 64]))
    for document in known:
        driver.scheduler.add(document)
        driver.submit(document.handle, 0)
    while driver.step():
        pass
    driver.check_end()
    assert len(driver.answers) == 6
    assert driver.scheduler.ledger.recomputed == 64
    assert driver.scheduler.repeated == Work(tokens=64, pairs=64 * 65 / 2)
    assert driver.scheduler.ledger.reused_prefix == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_interruptions_with_sharing_give_all_pages_back(depth):
    class Stop(Exception):
        pass

    rng = np.random.default_rng(7)
    trunk = ids_of(rng, 70)
    documents = [np.concatenate([trunk[: int(n)], ids_of(rng, 5)]) for n in rng.integers(1, 70, 12)]
    suffixes = [ids_of(rng, n) for n in (3, 25)]
    for stop_at in range(50):
        driver = Driver(documents, suffixes, num_pages=9, budget=20, shares=True, depth=depth)
        count = itertools.count()

        def interrupt(count=count, stop_at=stop_at):
            if next(count) == stop_at:
                raise Stop

        driver.submit_all()
        try:
            while driver.step(interrupt):
                pass
        except Stop:
            driver.scheduler.abandon()
            driver.lose_passes()
        driver.arena.check_integrity()
        driver.check_end()
