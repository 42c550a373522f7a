"""The protocol between the benchmark and an engine's process, both ends of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.engines import ADAPTERS
from benchmarks.peers.process import PeerFailed, PeerProcess

STUB = f"""
import sys
sys.path.insert(0, {str(ADAPTERS)!r})
from serving import run_by_steps, serve

class Stub:
    def boot(self, message):
        print("words that an engine prints are no reply")
        return {{"engine": "stub 1", "settings": {{}}}}
    def forget(self):
        raise RuntimeError("it remembers\\neverything")
    def run(self, message):
        return run_by_steps(message, lambda requests, readout: (
            [sum(request.ids) % len(readout) for request in requests],
            sum(len(request.ids) for request in requests)))
    def query(self, message):
        print("the last words", file=sys.stderr)
        sys.exit(3)

serve(Stub())
"""
DOCUMENTS = [
    {
        "ids": [1, 2],
        "steps": [{"frame": [], "tails": [[5]]}, {"frame": [7], "tails": [[1], [2], [2, 2]]}],
    },
    {"ids": [4], "steps": [{"frame": [], "tails": [[6]]}]},
]


@pytest.fixture
def stub(tmp_path: Path):
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    process = PeerProcess("stub", [sys.executable, str(script)], tmp_path / "logs" / "stub.log")
    yield process
    process.close()


def state_of(process: PeerProcess) -> str:
    ((_, fields),) = process._members()
    return fields[0]


def test_messages_are_answered_and_printed_words_are_not_replies(stub: PeerProcess) -> None:
    assert stub.ask({"do": "boot"}, timeout_seconds=30) == {"engine": "stub 1", "settings": {}}
    reply = stub.ask(
        {"do": "run", "documents": DOCUMENTS, "readouts": [[[8], [9]], [[8], [9], [10]]]}, timeout_seconds=30
    )
    # Prompts: 1 2 5 and 4 6; then 1 2 7 1, 1 2 7 2, 1 2 7 2 2.
    assert reply["answers"] == [[[0], [2, 0, 2]], [[0]]]
    assert reply["computed"] == [5, 13]
    assert len(reply["seconds"]) == 2


def test_a_failure_is_an_answer_and_the_process_goes_on(stub: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="stub: RuntimeError: it remembers"):
        stub.ask({"do": "forget"}, timeout_seconds=30)
    with pytest.raises(PeerFailed, match="no such message: dance"):
        stub.ask({"do": "dance"}, timeout_seconds=30)
    assert stub.ask({"do": "boot"}, timeout_seconds=30)["engine"] == "stub 1"


def test_a_process_that_ends_is_told_of_with_its_last_words(stub: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="stub ended with status 3: the last words"):
        stub.ask({"do": "query"}, timeout_seconds=30)
    with pytest.raises(PeerFailed, match="stub ended with status 3"):
        stub.ask({"do": "boot"}, timeout_seconds=30)


@pytest.mark.alone
def test_a_paused_process_stands_still_until_resumed(stub: PeerProcess) -> None:
    stub.ask({"do": "boot"}, timeout_seconds=30)
    assert stub.peak_resident_bytes() > 1 << 20
    stub.pause()
    deadline = time.monotonic() + 5
    while state_of(stub) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(stub) == "T"
    with pytest.raises(PeerFailed, match="stub: no reply in 0 s"):
        stub.ask({"do": "boot"}, timeout_seconds=0.2)
    stub.resume()
    assert stub.ask({"do": "boot"}, timeout_seconds=30)["engine"] == "stub 1"


def test_a_long_message_comes_through(stub: PeerProcess) -> None:
    documents = [{"ids": [1] * 300_000, "steps": [{"frame": [], "tails": [[1]]}]}]
    assert len(json.dumps(documents)) > 1 << 19
    reply = stub.ask({"do": "run", "documents": documents, "readouts": [[[1], [2]]]}, timeout_seconds=60)
    assert reply["computed"] == [300_001]
