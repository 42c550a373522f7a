"""Answers that outlive their run: raw answer logits by the content of question and texts, in a SQLite file.

SQLite in WAL mode: a process may be killed at any point and two may write at once; what was committed stays,
a torn tail of the log is dropped. Each answer carries a checksum; one that does not match counts as missing.
Documents themselves are never stored, only digests of them.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quail.errors import StoreError

Float32s = npt.NDArray[np.float32]

FORMAT = 1
"""Of the tables below; a file of another format is refused."""

_IN_ONE_QUERY = 500
_WAIT_SECONDS = 60.0
_CHECKSUM_BYTES = 4

_TABLES = """
CREATE TABLE IF NOT EXISTS questions (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    model TEXT NOT NULL,
    revision TEXT NOT NULL,
    dtype TEXT NOT NULL,
    layout TEXT NOT NULL,
    text TEXT NOT NULL,
    since REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS answers (
    question INTEGER NOT NULL,
    content BLOB NOT NULL,
    logits BLOB NOT NULL,
    PRIMARY KEY (question, content)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS anchors (join_digest BLOB PRIMARY KEY, side INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Question:
    """What is asked, apart from the texts.

    Attributes:
        digest: 16 bytes over everything that its answers depend on but the texts: ids around them, what is
            read, model revision and dtype.
        model: name of the model, for people.
        revision: digest of the model's files.
        dtype: of products; with int8 KV is bfloat16.
        layout: name of the prompt layout.
        text: the call as it was written, for people.
    """

    digest: bytes
    model: str = ""
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    text: str = ""


class AnswerStore:
    """A file of answers, or answers in memory.

    Args:
        path: the file, made where there is none; None keeps answers in memory until `close`.

    Raises:
        StoreError: the file cannot be opened, is no answer store, or is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._ids: dict[bytes, int] = {}
        with self._reporting("opened"):
            self._connection = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=_WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._reporting("opened"):
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        if self.path is not None:
            execute("PRAGMA journal_mode = WAL")
            execute("PRAGMA synchronous = NORMAL")
        ((version,),) = execute("PRAGMA user_version").fetchall()
        ((num_tables,),) = execute("SELECT count(*) FROM sqlite_master").fetchall()
        if version not in (0, FORMAT) or (version == 0 and num_tables):
            raise StoreError(
                f"{self.path}: is a SQLite database, but no answer store of format {FORMAT} "
                f"(its format is {version})",
                hint="name another file for the answers",
            )
        if version == 0:
            self._connection.executescript(f"BEGIN IMMEDIATE;{_TABLES}PRAGMA user_version = {FORMAT};COMMIT;")

    def find(self, question: bytes, contents: Sequence[bytes]) -> Mapping[bytes, Float32s]:
        """Answers that are there.

        Args:
            question: digest of the question.
            contents: digests of the texts asked about.

        Returns:
            (answers,) float32 logits by content.
        """
        number = self._number(question)
        found: dict[bytes, Float32s] = {}
        if number is None:
            return found
        with self._reporting("read"):
            for start in range(0, len(contents), _IN_ONE_QUERY):
                some = contents[start : start + _IN_ONE_QUERY]
                marks = ",".join("?" * len(some))
                sql = f"SELECT content, logits FROM answers WHERE question = ? AND content IN ({marks})"
                for content, packed in self._connection.execute(sql, (number, *some)):
                    logits = _unpacked(content, packed)
                    if logits is not None:
                        found[content] = logits
        return found

    def add(self, answers: Sequence[tuple[Question, Sequence[bytes], Float32s]]) -> None:
        """Stores answers, all or none of them; one that is there already stays.

        Args:
            answers: question, contents, and (contents, answers) float32 logits.

        Raises:
            StoreError: the file cannot be written, for example because the disk is full.
        """
        with self._reporting("written"), self._transaction():
            for question, contents, logits in answers:
                number = self._number(question.digest)
                if number is None:
                    number = self._add_question(question)
                rows = [
                    (number, content, _packed(content, row))
                    for content, row in zip(contents, np.ascontiguousarray(logits, "<f4"), strict=True)
                ]
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)

    def anchor(self, join: bytes) -> int | None:
        """The argument that was the anchor when a join (by a digest of it) was first answered."""
        with self._reporting("read"):
            sql = "SELECT side FROM anchors WHERE join_digest = ?"
            row = self._connection.execute(sql, (join,)).fetchone()
        return None if row is None else int(row[0])

    def keep_anchor(self, join: bytes, side: int) -> None:
        """Notes the anchor of a join, if none is noted."""
        with self._reporting("written"):
            self._connection.execute("INSERT OR IGNORE INTO anchors VALUES (?, ?)", (join, side))

    def questions(self) -> list[dict[str, Any]]:
        """Each question with its number, model, revision, dtype, layout, text, count of answers and age."""
        sql = """
            SELECT id, model, revision, dtype, layout, text, since, count(answers.content)
            FROM questions LEFT JOIN answers ON answers.question = id GROUP BY id ORDER BY id
        """
        names = ("question", "model", "revision", "dtype", "layout", "text", "since", "answers")
        with self._reporting("read"):
            return [dict(zip(names, row, strict=True)) for row in self._connection.execute(sql)]

    def rows(self) -> Iterator[tuple[int, bytes, Float32s]]:
        """(question number, content digest, logits) of every answer that is whole."""
        with self._reporting("read"):
            for number, content, packed in self._connection.execute("SELECT * FROM answers"):
                logits = _unpacked(content, packed)
                if logits is not None:
                    yield number, content, logits

    def size_bytes(self) -> int:
        """Bytes of the file, or of the memory."""
        with self._reporting("read"):
            ((pages,),) = self._connection.execute("PRAGMA page_count").fetchall()
            ((page_bytes,),) = self._connection.execute("PRAGMA page_size").fetchall()
        return int(pages) * int(page_bytes)

    def prune(self, questions: Sequence[int]) -> int:
        """Deletes questions with their answers; returns how many answers that were."""
        removed = 0
        with self._reporting("written"):
            with self._transaction():
                for number in questions:
                    cursor = self._connection.execute("DELETE FROM answers WHERE question = ?", (number,))
                    removed += cursor.rowcount
                    self._connection.execute("DELETE FROM questions WHERE id = ?", (number,))
                self._connection.execute("DELETE FROM anchors WHERE NOT EXISTS (SELECT 1 FROM questions)")
            self._ids.clear()
            self._connection.execute("VACUUM")
        return removed

    def check(self) -> list[str]:
        """What SQLite finds wrong with the file; empty if nothing is."""
        with self._reporting("read"):
            found = [str(row[0]) for row in self._connection.execute("PRAGMA quick_check(10)")]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Closes the file. A store can be closed more than once."""
        self._connection.close()

    def _number(self, digest: bytes) -> int | None:
        """The number of a question, None if it was never stored."""
        number = self._ids.get(digest)
        if number is None:
            with self._reporting("read"):
                sql = "SELECT id FROM questions WHERE digest = ?"
                row = self._connection.execute(sql, (digest,)).fetchone()
            if row is None:
                return None
            number = self._ids[digest] = int(row[0])
        return number

    def _add_question(self, question: Question) -> int:
        about = (question.model, question.revision, question.dtype, question.layout, question.text)
        values = (question.digest, *about, time.time())
        sql = "INSERT INTO questions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)"
        return int(self._connection.execute(sql, values).lastrowid or 0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Tells SQLite's errors as what they mean to a user."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            where = "answers in memory" if self.path is None else str(self.path)
            raise StoreError(f"{where}: cannot be {what}: {error}", hint=_way_out(str(error))) from error


def _way_out(message: str) -> str:
    if "full" in message:
        return "the answers so far are kept; make room and run the statement again: only the rest is asked"
    if "readonly" in message or "unable to open" in message:
        return "the folder must exist and be writable, or set answers='off'"
    if "locked" in message:
        return f"another process held the file for {_WAIT_SECONDS:.0f} s; try again when it is done"
    if "malformed" in message or "not a database" in message:
        return "the file is damaged: move it away, or name another one; answers are then asked for anew"
    return "set answers='off' to run without"


def _packed(content: bytes, logits: Float32s) -> bytes:
    data = logits.tobytes()
    return zlib.crc32(content + data).to_bytes(_CHECKSUM_BYTES, "little") + data


def _unpacked(content: bytes, packed: bytes) -> Float32s | None:
    """The logits, None if they are not what was stored."""
    data = packed[_CHECKSUM_BYTES:]
    if zlib.crc32(content + data) != int.from_bytes(packed[:_CHECKSUM_BYTES], "little") or len(data) % 4:
        return None
    logits: Float32s = np.frombuffer(data, dtype="<f4").astype(np.float32)
    return logits
