"""A process is killed at any point of a filter, a join and a classification, and goes on where it stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quail
from quail.answers.store import AnswerStore
from quail.config import EngineConfig
from quail.execution import forecast, runner  # noqa: F401 - torch and the engine are here before processes fork
from tests.models.tiny import make_tiny

pytestmark = pytest.mark.alone

STATEMENT = r"""
    SELECT l.id, r.word, AI.CLASSIFY(PROMPT(E'{0}\n\nThis is about a', l.body), ['ship', 'town', 'town music'])
    FROM l, r
    WHERE AI.IF(PROMPT('Is this about the sea? {0}', l.body))
      AND AI.IF(PROMPT('Does {0} speak of {1}?', l.body, r.word))
    ORDER BY ALL"""
WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]


def texts(count: int, length: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


def run(folder: Path, cache: Path, answers: Path, out: Path) -> None:
    """Runs the statement and writes rows and counts, as a process that may die anywhere."""
    config = EngineConfig(
        model=str(folder), dtype="float32", layout="completion", cache_dir=cache, kv_memory="4MiB",
        token_budget=64, answers=answers, threads=1,
    )  # fmt: skip
    with quail.Session(config) as session:
        session.register("l", {"id": list(range(8)), "body": texts(8, 12, seed=1)})
        session.register("r", {"word": texts(3, 4, seed=2)})
        result = session.sql(STATEMENT).run(progress=False)
        asked_seconds = result.report.seconds["run"]
    found = {
        "rows": result.fetchall(),
        "answers": dict(result.report.answers),
        "asked_seconds": asked_seconds,
    }
    out.write_text(json.dumps(found))


class Trials:
    """Runs in forked processes, each with a store of its own.

    torch is imported before and has run nothing, so that a process starts at once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = make_tiny(folder / "model", "llama", seed=7, context=256)
        self._context = multiprocessing.get_context("fork")
        self.whole = self.result(folder / "whole")
        self.num_questions = self.whole["answers"]["asked"]

    def start(self, answers: Path) -> Any:
        arguments = (self._model, self._folder / "cache", answers, Path(f"{answers}.json"))
        process = self._context.Process(target=run, args=arguments)
        process.start()
        return process

    def result(self, answers: Path) -> dict[str, Any]:
        process = self.start(answers)
        process.join(120)
        assert process.exitcode == 0
        return json.loads(Path(f"{answers}.json").read_text())

    def killed(self, answers: Path, seconds: float) -> bool:
        """Kills a run after some time; False if it was done by then."""
        process = self.start(answers)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        return process.exitcode == -signal.SIGKILL

    def seconds(self) -> tuple[float, float]:
        """Of a whole run, and of its last part, in which questions are asked."""
        started = time.perf_counter()
        found = self.result(self._folder / f"timed{started}")
        return time.perf_counter() - started, found["asked_seconds"]


def check_kills(folder: Path, num_kills: int) -> None:
    """Half of the kills come anywhere in a run, half while it asks."""
    trials = Trials(folder)
    seconds, asked_seconds = trials.seconds()
    rng = random.Random(1)
    num_killed = num_with_some = num_missed = 0
    while num_killed < num_kills:
        answers = folder / f"answers{num_killed}"
        first = 0.0 if num_killed % 2 else max(0.0, seconds - 2 * asked_seconds)
        if not trials.killed(answers, rng.uniform(first, seconds)):
            for path in folder.glob(f"{answers.name}*"):
                path.unlink()
            num_missed += 1
            assert num_missed <= 2 * num_kills, "runs end before they can be killed"
            if num_missed % 4 == 0:  # the machine's speed changes
                seconds, asked_seconds = trials.seconds()
            continue
        num_killed += 1
        stored = 0
        if answers.exists():
            store = AnswerStore(answers)
            assert store.check() == []
            stored = len(list(store.rows()))
            store.close()
        num_with_some += 0 < stored < trials.num_questions
        resumed = trials.result(answers)
        assert resumed["rows"] == trials.whole["rows"]
        assert resumed["answers"]["asked"] == trials.num_questions - stored, "a stored answer was asked again"
        for path in folder.glob(f"{answers.name}*"):
            path.unlink()
    assert num_with_some >= num_kills // 20, f"only {num_with_some} of {num_kills} kills came in the middle"


def test_killed_runs_resume(tmp_path):
    check_kills(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_killed_runs_resume(tmp_path):
    check_kills(tmp_path, 200)
