"""The answer store: durable, shared, honest about what it cannot read or write."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from quail.answers.digests import digest_of, text_digest
from quail.answers.store import AnswerStore, Question
from quail.errors import StoreError

FIRST, SECOND = Question(b"1" * 16, text="first"), Question(b"2" * 16, text="second")


def contents(count: int, start: int = 0) -> list[bytes]:
    return [text_digest(f"document {number}") for number in range(start, start + count)]


def logits(count: int, width: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def test_what_is_stored_is_found_bit_by_bit_and_nothing_else_is():
    store = AnswerStore()
    names, values = contents(2_000), logits(2_000, 3)
    store.add([(FIRST, names, values)])
    found = store.find(FIRST.digest, [*names, *contents(5, start=10_000)])
    assert set(found) == set(names)
    np.testing.assert_array_equal(np.stack([found[name] for name in names]), values)
    assert not store.find(SECOND.digest, names)


def test_a_file_keeps_its_answers(tmp_path):
    path = tmp_path / "answers"
    store = AnswerStore(path)
    store.add([(FIRST, contents(3), logits(3)), (SECOND, contents(1), logits(1))])
    store.close()
    store.close()
    again = AnswerStore(path)
    assert [(each["text"], each["answers"]) for each in again.questions()] == [("first", 3), ("second", 1)]
    assert again.check() == []
    again.close()


def test_parts_of_a_digest_do_not_run_together():
    assert len({digest_of(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""])}) == 4


def test_a_damaged_answer_counts_as_missing(tmp_path):
    path = tmp_path / "answers"
    store = AnswerStore(path)
    names = contents(3)
    store.add([(FIRST, names, logits(3))])
    store.close()
    with sqlite3.connect(path) as raw:
        (packed,) = raw.execute("SELECT logits FROM answers WHERE content = ?", (names[1],)).fetchone()
        damaged = bytes([*packed[:-1], packed[-1] ^ 1])
        raw.execute("UPDATE answers SET logits = ? WHERE content = ?", (damaged, names[1]))
    raw.close()
    again = AnswerStore(path)
    assert set(again.find(FIRST.digest, names)) == {names[0], names[2]}
    assert len(list(again.rows())) == 2
    again.add([(FIRST, [names[1]], logits(1))])
    assert set(again.find(FIRST.digest, names)) == set(names)
    again.close()


def test_pruning_drops_questions_and_gives_the_space_back(tmp_path):
    store = AnswerStore(tmp_path / "answers")
    store.add([(FIRST, contents(5_000), logits(5_000)), (SECOND, contents(2), logits(2))])
    large = store.size_bytes()
    assert store.prune([1]) == 5_000
    assert store.size_bytes() < large / 4
    assert [each["question"] for each in store.questions()] == [2]
    store.add([(FIRST, contents(1), logits(1))])
    assert store.find(FIRST.digest, contents(1))
    store.close()


def _looked_up(path: Path, names: list[bytes]) -> tuple[Mapping[bytes, np.ndarray], str]:
    """What a store answers, and why it does not."""
    try:
        store = AnswerStore(path)
        try:
            return store.find(FIRST.digest, names), "; ".join(store.check())
        finally:
            store.close()
    except StoreError as error:
        return {}, str(error)


@pytest.mark.parametrize("tail", ["-wal", ""])
def test_a_cut_file_loses_the_last_batch_or_says_that_it_is_damaged(tmp_path, tail):
    """The log cut at every byte of its last batch: all earlier batches are there. The file itself cut: never a
    wrong answer, and no batch that SQLite still reads is lost silently."""
    path = tmp_path / "answers"
    store = AnswerStore(path)
    batches = [contents(4, start=4 * number) for number in range(6)]
    values = [logits(4, seed=number) for number in range(6)]
    sizes = []
    for names, some in zip(batches, values, strict=True):
        store.add([(FIRST, names, some)])
        sizes.append(Path(f"{path}-wal").stat().st_size)
    if not tail:
        store.close()
    whole = Path(f"{path}{tail}").read_bytes()
    stops = range(sizes[-2], sizes[-1]) if tail else range(0, len(whole), 97)
    num_kept, num_damaged = 0, 0
    for number, stop in enumerate(stops):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        if tail:
            shutil.copy(path, folder / "answers")
        (folder / f"answers{tail}").write_bytes(whole[:stop])
        found, problem = _looked_up(folder / "answers", [name for names in batches for name in names])
        shutil.rmtree(folder)
        if problem:
            assert not tail, f"the log cut at byte {stop}: {problem}"
            assert "damaged" in problem
            num_damaged += 1
            continue
        for names, some in zip(batches, values, strict=True):
            for name, right in zip(names, some, strict=True):
                assert name not in found or (found[name] == right).all(), "a wrong answer"
        if tail:
            assert set(found) >= {name for names in batches[:-1] for name in names}
        num_kept += 1
    store.close()
    assert num_kept
    assert tail or num_damaged


def _write(path: str, start: int) -> None:
    store = AnswerStore(Path(path))
    for number in range(start, start + 50):
        store.add([(FIRST, contents(20, start=20 * number), logits(20, seed=number))])
    store.close()


def test_two_processes_write_at_once(tmp_path):
    path = str(tmp_path / "answers")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, start)) for start in (0, 25)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = AnswerStore(Path(path))
    (question,) = store.questions()
    assert question["answers"] == 75 * 20
    found = store.find(FIRST.digest, contents(20, start=20 * 60))
    names = contents(20, start=20 * 60)
    np.testing.assert_array_equal(np.stack([found[name] for name in names]), logits(20, seed=60))
    store.close()


def test_what_is_no_store_is_refused_and_left_alone(tmp_path):
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as raw:
        raw.execute("CREATE TABLE mine (a)")
    raw.close()
    with pytest.raises(StoreError, match=r"other\.sqlite: is a SQLite database, but no answer store"):
        AnswerStore(other)
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, but long enough to be looked at" * 20)
    before = text.read_bytes()
    with pytest.raises(StoreError, match="damaged: move it away"):
        AnswerStore(text)
    assert text.read_bytes() == before
    with pytest.raises(StoreError, match=r"must exist and be writable"):
        AnswerStore(tmp_path / "missing" / "answers")


def test_a_full_disk_is_an_error_that_keeps_the_answers_so_far(tmp_path):
    store = AnswerStore(tmp_path / "answers")
    store.add([(FIRST, contents(10), logits(10))])
    store._connection.execute("PRAGMA max_page_count = 12")
    with pytest.raises(StoreError, match="answers so far are kept"):
        store.add([(FIRST, contents(5_000, start=100), logits(5_000))])
    assert len(store.find(FIRST.digest, contents(5_100))) == 10
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.add([(FIRST, contents(5_000, start=100), logits(5_000))])
    assert len(list(store.rows())) == 5_010
    store.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 160 KiB, where this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_runs_full_keeps_every_batch_before(small_disk):
    store = AnswerStore(small_disk / "answers")
    num_batches = 0
    with pytest.raises(StoreError, match="disk is full"):  # noqa: PT012
        while num_batches < 1_000:
            store.add([(FIRST, contents(50, start=50 * num_batches), logits(50, seed=num_batches))])
            num_batches += 1
    store.close()
    assert num_batches
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    again = AnswerStore(small_disk / "answers")
    assert again.check() == []
    assert len(list(again.rows())) == 50 * num_batches
    again.add([(FIRST, contents(1, start=10**6), logits(1))])
    again.close()


@pytest.mark.parametrize("has_answers", [False, True])
def test_a_file_system_that_cannot_be_written_is_an_error_that_says_so(small_disk, has_answers):
    path = small_disk / "answers"
    if has_answers:
        store = AnswerStore(path)
        store.add([(FIRST, contents(10), logits(10))])
        store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="answers") as raised:
        AnswerStore(path)
    assert "must exist and be writable" in str(raised.value) + str(raised.value.hint)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    again = AnswerStore(path)
    assert len(list(again.rows())) == (10 if has_answers else 0)
    again.close()
