"""The protocol between the benchmark and an engine's process: one JSON object a line. Standard library only.

    -> {"do": "boot", "folder": …, "gguf": …, "dtype": …, "threads": n, "kv_gib": n, "prompt": [ids],
        "answers": [ids]}
    <- {"ok": true, "engine": name and version, "settings": {…}}          the prompt was answered
    -> {"do": "run", "documents": [{"ids": [ids], "steps": [{"frame": [ids], "tails": [[ids], …]}, …]}, …],
        "readouts": [[[ids of the first answer], [ids of the second], …], … one a step]}
    <- {"ok": true, "seconds": [… one a step], "computed": [tokens, one a step],
        "answers": [… a document: [… a step: [index of the answer, one a tail]]]}
    -> {"do": "forget"}      give up all KV
    <- {"ok": true}
    -> {"do": "close"}
    <- {"ok": true}

A prompt is document, frame, tail. A step begins when the one before has its answers. A document without a
step is not asked in it. Quail's own process is sent `query` (SQL and tables) where others are sent `run`.
Whatever fails is answered with {"ok": false, "error": …}. Everything that an engine prints goes to standard
error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class Adapter(Protocol):
    """An engine behind the protocol; each method takes and gives the fields of its message."""

    def boot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads the model and answers one prompt."""

    def forget(self) -> None:
        """Gives up all KV."""


@dataclass(frozen=True)
class Request:
    """One prompt of a step.

    Attributes:
        document: index of its document.
        tail: index of its tail.
        ids: the whole prompt.
    """

    document: int
    tail: int
    ids: list[int]


def requests_of(documents: list[dict[str, Any]], step: int) -> list[Request]:
    """The whole prompts of a step, document by document."""
    return [
        Request(index, tail, [*document["ids"], *document["steps"][step]["frame"], *ids])
        for index, document in enumerate(documents)
        if step < len(document["steps"])
        for tail, ids in enumerate(document["steps"][step]["tails"])
    ]


def empty_answers(documents: list[dict[str, Any]]) -> list[list[list[int]]]:
    """A place for each answer."""
    return [[[-1] * len(step["tails"]) for step in document["steps"]] for document in documents]


def run_by_steps(
    message: dict[str, Any], answer: Callable[[list[Request], list[list[int]]], tuple[list[int], int]]
) -> dict[str, Any]:
    """Serves `run` for an engine that takes whole prompts, a step at a time.

    Args:
        message: of the run.
        answer: takes the prompts of a step and its answers' ids; gives the index of each answer and how many
            tokens were computed.
    """
    documents, readouts = message["documents"], message["readouts"]
    answers, seconds, computed = empty_answers(documents), [], []
    for step, readout in enumerate(readouts):
        requests = requests_of(documents, step)
        started = time.perf_counter()
        found, tokens = answer(requests, readout)
        seconds.append(time.perf_counter() - started)
        computed.append(tokens)
        for request, index in zip(requests, found, strict=True):
            answers[request.document][step][request.tail] = index
    return {"seconds": seconds, "computed": computed, "answers": answers}


def messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The messages of a stream until `close` or its end."""
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        yield message
        if message["do"] == "close":
            return


def reply_to(adapter: Any, message: dict[str, Any]) -> dict[str, Any]:
    """What an adapter says to a message; a failure is an answer too."""
    try:
        if message["do"] == "close":
            return {"ok": True}
        if message["do"] == "forget":
            adapter.forget()
            return {"ok": True}
        if message["do"] not in ("boot", "run", "query"):
            raise ValueError(f"no such message: {message['do']}")
        return {"ok": True, **getattr(adapter, message["do"])(message)}
    except Exception as error:  # whatever an engine raises is the benchmark's to report
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def serve(adapter: Adapter) -> None:
    """Answers messages on the standard streams until told to close."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for message in messages(sys.stdin):
            replies.write(json.dumps(reply_to(adapter, message)) + "\n")
            replies.flush()
