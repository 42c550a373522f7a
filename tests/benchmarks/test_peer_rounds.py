"""Rounds: who is awake, what is counted, what happens to an engine that fails."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import rounds
from benchmarks.peers.engines import ENGINES, EngineSpec
from benchmarks.peers.process import PeerFailed
from benchmarks.peers.tokens import Document, Step
from benchmarks.peers.workloads import Part, Workload

STEP = Step([], [[9, 9]])
WORKLOAD = Workload(
    "both",
    {"docs": {"id": [0, 1, 2, 3]}},
    (
        Part("first", "first", "SELECT 1", (0,), lambda rows: {(row[0], 0, 0): row[1] for row in rows}),
        Part("later", "later", "SELECT 2", (1,), lambda rows: {(row[0], 1, 0): row[1] for row in rows}),
    ),
    [Document([1] * 8, [STEP, STEP] if row % 2 == 0 else [STEP]) for row in range(4)],
    [[[1], [2]], [[1], [2]]],
)
LOG: list[str] = []


class FakeProcess:
    """Answers at once; documents' answers are their number modulo 2, Quail's are 0."""

    def __init__(self, name: str, *, fails_in: int | None = None) -> None:
        self.name, self.fails_in, self.asked = name, fails_in, 0

    def ask(self, message: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
        LOG.append(f"{self.name} {message['do']}")
        if message["do"] == "forget":
            return {}
        self.asked += 1
        if self.asked == self.fails_in:
            raise PeerFailed(f"{self.name}: out of memory")
        if message["do"] == "query":
            rows = range(4) if message["sql"] == "SELECT 1" else (0, 2)
            return {
                "seconds": [2.0],
                "computed": [5],
                "naive": 10 * len(rows),
                "rows": [[row, 0] for row in rows],
                "speed_of_light": 0.5,
            }
        documents = message["documents"]
        return {
            "seconds": [3.0, 1.0],
            "computed": [7, 1],
            "answers": [[[row % 2] for _ in each["steps"]] for row, each in enumerate(documents)],
        }

    def cpu_seconds(self) -> float:
        return 0.0

    def pause(self) -> None:
        LOG.append(f"{self.name} pause")

    def resume(self) -> None:
        LOG.append(f"{self.name} resume")

    def close(self) -> None:
        LOG.append(f"{self.name} close")


def measure(**processes: FakeProcess) -> tuple[list[dict[str, Any]], dict[str, str]]:
    LOG.clear()
    engines: Any = dict(processes)
    return rounds.measure(engines, [WORKLOAD], num_rounds=2, most_tokens=15, say=lambda words: None)


def test_one_engine_is_awake_at_a_time() -> None:
    measure(quail=FakeProcess("quail"), vllm=FakeProcess("vllm"))
    one_round = [
        *("quail resume", "quail forget", "quail query", "quail query", "quail pause"),
        *("vllm resume", "vllm forget", "vllm run", "vllm pause"),
    ]
    assert one_round * 2 == LOG


def test_runs_count_what_was_asked_and_what_equals_quails_answers() -> None:
    runs, failed = measure(quail=FakeProcess("quail"), vllm=FakeProcess("vllm"))
    assert not failed
    theirs = {run["part"]: run for run in runs if run["engine"] == "vllm" and run["round"] == 1}
    assert theirs["first"]["prompt_tokens"] == 40 and theirs["first"]["documents"] == 4
    assert (theirs["first"]["equal"], theirs["first"]["compared"]) == (2, 4)
    assert theirs["later"]["documents"] == theirs["later"]["prompts"] == 2
    assert (theirs["later"]["seconds"], theirs["later"]["computed_tokens"]) == (1.0, 1)
    ours = [run for run in runs if run["engine"] == "quail"]
    assert len(ours) == 4 and all(run["speed_of_light"] == 0.5 for run in ours)


def test_a_slow_engine_is_asked_about_the_first_documents() -> None:
    runs, _ = measure(quail=FakeProcess("quail"), llama_cpp=FakeProcess("llama_cpp"))
    first = next(run for run in runs if run["engine"] == "llama_cpp" and run["part"] == "first")
    assert first["documents"] == 2, "12 and 10 tokens reach 15"
    assert first["compared"] == 2


def test_an_engine_that_fails_is_left_out_and_said_to_be() -> None:
    runs, failed = measure(quail=FakeProcess("quail"), vllm=FakeProcess("vllm", fails_in=2))
    assert failed == {"vllm": "both: vllm: out of memory"}
    assert [run["round"] for run in runs if run["engine"] == "vllm"] == [0, 0]
    assert LOG[-1] == "vllm close"
    assert len([run for run in runs if run["engine"] == "quail"]) == 4


def test_other_prompts_than_the_peers_are_no_comparison() -> None:
    class Other(FakeProcess):
        def ask(self, message, *, timeout_seconds):
            reply = super().ask(message, timeout_seconds=timeout_seconds)
            return reply | {"naive": 39} if "naive" in reply else reply

    _, failed = measure(quail=Other("quail"), vllm=FakeProcess("vllm"))
    assert failed == {"quail": "both: first: Quail's prompts have 39 tokens, those of the peers 40"}


@pytest.mark.parametrize(("reuses_kv", "tokens"), [(True, 8 + 4), (False, 20)])
def test_what_a_document_costs(reuses_kv: bool, tokens: int) -> None:
    assert EngineSpec("x", "X", reuses_kv=reuses_kv).tokens_of(WORKLOAD.documents[0]) == tokens


def test_an_engine_that_is_not_sampled_is_asked_everything() -> None:
    assert len(ENGINES["vllm"].sample(WORKLOAD.documents, 1)) == 4


@pytest.mark.parametrize(("most_tokens", "documents"), [(1, 1), (10, 1), (11, 2), (30, 2), (31, 4), (99, 4)])
def test_a_sample_is_even_unless_that_is_too_much(most_tokens: int, documents: int) -> None:
    """Documents of 20 and 10 tokens in turn."""
    assert len(ENGINES["transformers"].sample(WORKLOAD.documents, most_tokens)) == documents
