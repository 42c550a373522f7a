"""Engine after engine, round after round, while the others stand still."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.engines import ENGINES, QUAIL
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.tokens import Document
from benchmarks.peers.workloads import Part, Place, Workload

RUN_TIMEOUT_SECONDS = 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One engine on one part of a workload in one round.

    Attributes:
        engine: its name.
        part: name of the part.
        round: from 0.
        seconds: of the part, for the documents asked about.
        documents: asked about.
        prompts: answered.
        prompt_tokens: of all prompts in full.
        computed_tokens: that the engine computed, padding included.
        cores: processor time over time by the clock, of the message that the part came in.
        equal: answers equal to Quail's of the round.
        compared: answers that were compared.
        speed_of_light: fraction, where the engine tells.
    """

    engine: str
    part: str
    round: int
    seconds: float
    documents: int
    prompts: int
    prompt_tokens: int
    computed_tokens: int
    cores: float
    equal: int = 0
    compared: int = 0
    speed_of_light: float | None = None


@dataclass
class Answered:
    """Runs of one message or one workload, with the answers at their places."""

    runs: list[Run] = field(default_factory=list)
    answers: dict[str, dict[Place, int]] = field(default_factory=dict)


def measure(
    engines: dict[str, PeerProcess],
    workloads: Sequence[Workload],
    *,
    num_rounds: int,
    most_tokens: int,
    say: Say,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Runs every workload on every engine in turn, `num_rounds` times.

    Args:
        engines: paused processes by name; one that fails is closed and left out from then on.
        workloads: what to ask.
        num_rounds: rounds.
        most_tokens: of a sampled engine and workload, about.
        say: told what is being done.

    Returns:
        The runs as plain values, and for engines that failed what they said.
    """
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for number in range(num_rounds):
        for workload in workloads:
            found: dict[str, Answered] = {}
            for name in list(engines):
                say(f"round {number + 1} of {num_rounds}: {workload.name}, {ENGINES[name].title}")
                try:
                    found[name] = run_one(name, engines[name], workload, number, most_tokens)
                except PeerFailed as error:
                    failed[name] = f"{workload.name}: {error}"
                    say(f"{failed[name]}; going on without")
                    engines.pop(name).close()
            runs += [asdict(run) for run in compared(found)]
    return runs, failed


def run_one(name: str, process: PeerProcess, workload: Workload, number: int, most_tokens: int) -> Answered:
    """One engine on one workload, from no KV on; it alone is awake."""
    process.resume()
    try:
        process.ask({"do": "forget"}, timeout_seconds=60)
        if ENGINES[name].runs_statements:
            return run_statements(name, process, workload, number)
        documents = ENGINES[name].sample(workload.documents, most_tokens)
        return run_documents(name, process, workload, documents, number)
    finally:
        process.pause()


def run_statements(name: str, process: PeerProcess, workload: Workload, number: int) -> Answered:
    """The statements of a workload, one after the other.

    Raises:
        PeerFailed: a statement failed, or asked other prompts than those that the peers are given.
    """
    done = Answered()
    for part in workload.parts:
        message = {"do": "query", "sql": part.sql, "tables": workload.tables}
        reply, cores = timed(process, message)
        asked = sizes(workload.documents, part)
        if reply["naive"] != asked["prompt_tokens"]:
            raise PeerFailed(
                f"{part.name}: Quail's prompts have {reply['naive']:,} tokens, those of the peers "
                f"{asked['prompt_tokens']:,}"
            )
        done.runs.append(
            Run(
                name,
                part.name,
                number,
                seconds=reply["seconds"][0],
                computed_tokens=reply["computed"][0],
                cores=cores,
                speed_of_light=reply["speed_of_light"],
                **asked,
            )
        )
        done.answers[part.name] = part.answers(reply["rows"])
    return done


def run_documents(
    name: str, process: PeerProcess, workload: Workload, documents: Sequence[Document], number: int
) -> Answered:
    """The documents of a workload in one message; its parts are told apart by their steps."""
    message = {
        "do": "run",
        "documents": [document.as_message() for document in documents],
        "readouts": workload.readouts,
    }
    reply, cores = timed(process, message)
    done = Answered()
    for part in workload.parts:
        done.runs.append(
            Run(
                name,
                part.name,
                number,
                seconds=sum(reply["seconds"][step] for step in part.steps),
                computed_tokens=sum(reply["computed"][step] for step in part.steps),
                cores=cores,
                **sizes(documents, part),
            )
        )
        done.answers[part.name] = {
            (row, step, tail): answer
            for row, steps in enumerate(reply["answers"])
            for step, tails in enumerate(steps)
            if step in part.steps
            for tail, answer in enumerate(tails)
        }
    return done


def timed(process: PeerProcess, message: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The reply to a message, and how many cores it kept busy."""
    before, started = process.cpu_seconds(), time.perf_counter()
    reply = process.ask(message, timeout_seconds=RUN_TIMEOUT_SECONDS)
    return reply, (process.cpu_seconds() - before) / (time.perf_counter() - started)


def sizes(documents: Sequence[Document], part: Part) -> dict[str, int]:
    """How much some documents ask in a part; one that has none of its steps does not count."""
    asked = [document for document in documents if document.num_prompts(part.steps)]
    return {
        "documents": len(asked),
        "prompts": sum(document.num_prompts(part.steps) for document in asked),
        "prompt_tokens": sum(document.prompt_tokens(part.steps) for document in asked),
    }


def compared(found: Mapping[str, Answered]) -> list[Run]:
    """The runs of a workload's round, with the answers that equal Quail's counted."""
    ours = found[QUAIL].answers if QUAIL in found else {}
    runs = []
    for name, answered in found.items():
        for run in answered.runs:
            theirs, reference = answered.answers[run.part], ours.get(run.part, {})
            places = theirs.keys() & reference.keys() if name != QUAIL else set()
            equal = sum(theirs[place] == reference[place] for place in places)
            runs.append(Run(**(asdict(run) | {"equal": equal, "compared": len(places)})))
    return runs
