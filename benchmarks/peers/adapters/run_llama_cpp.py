"""llama.cpp: document by document, as its own KV reuse wants it.

A document's KV stays for its next question, and for what the next document begins with. The partners of a
join branch off as sequences of their own and run as one batch. Short documents with a single question run
several to a batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from serving import empty_answers, serve

BATCH = 2048
"""Tokens handed over at a time at most."""
MICRO_BATCH = 512
"""Tokens computed at a time."""
SEQUENCES = 64
"""Sequences alive at a time; the first is the document, the others its partners."""
CONTEXT = 8192
SHORT = 128
"""Tokens of a prompt below which several run in one batch."""


@dataclass
class Entry:
    """Tokens to compute for one sequence, behind `position` tokens; the last one is read if `reads`."""

    sequence: int
    position: int
    ids: list[int]
    reads: bool = True


@dataclass
class Totals:
    """Seconds and tokens of each step."""

    seconds: list[float]
    computed: list[int]
    started: float = field(default_factory=time.perf_counter)

    def book(self, step: int, tokens: int) -> None:
        """Ends a piece of work of a step; the next begins."""
        now = time.perf_counter()
        self.seconds[step] += now - self.started
        self.computed[step] += tokens
        self.started = now


class LlamaCpp:
    """The model through the C interface; sequence 0 holds the document at work."""

    def boot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Maps the GGUF file and answers one prompt."""
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            message["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT
        options.n_batch, options.n_ubatch, options.n_seq_max = BATCH, MICRO_BATCH, SEQUENCES
        options.n_threads = options.n_threads_batch = message["threads"]
        options.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, options)
        if not self.context:
            raise RuntimeError("no context could be made")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.current: list[int] = []
        self.advance(message["prompt"])
        self.forget()
        return {
            "engine": f"llama.cpp, llama-cpp-python {llama_cpp.__version__}",
            "settings": {
                "weights": "the GGUF file itself, Q4_1",
                "kv": "float16",
                "n_batch": BATCH,
                "n_ubatch": MICRO_BATCH,
                "n_seq_max": SEQUENCES,
                "system": llama_cpp.llama_print_system_info().decode(),
            },
        }

    def forget(self) -> None:
        """Empties the context."""
        self.api.llama_memory_clear(self.memory, True)
        self.current = []

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers a workload; each step's seconds are summed over the documents."""
        documents, self.readouts = message["documents"], message["readouts"]
        self.answers = empty_answers(documents)
        self.totals = Totals([0.0] * len(self.readouts), [0] * len(self.readouts))
        short: list[int] = []
        for index, document in enumerate(documents):
            if is_short(document):
                short.append(index)
            else:
                self.run_document(index, document)
        self.run_short(documents, short)
        return {
            "seconds": self.totals.seconds,
            "computed": self.totals.computed,
            "answers": self.answers,
        }

    def run_document(self, index: int, document: dict[str, Any]) -> None:
        """A document's steps, one after the other."""
        for number, step in enumerate(document["steps"]):
            head = [*document["ids"], *step["frame"]]
            tails = step["tails"]
            if len(tails) == 1:
                tokens = self.advance([*head, *tails[0]])
                self.answers[index][number][0] = self.best(tokens[1], number)
                self.totals.book(number, tokens[0])
            elif tails:
                computed = self.advance(head)[0]
                self.totals.book(number, computed + self.branch(index, number, len(head), tails))

    def advance(self, ids: list[int]) -> tuple[int, int]:
        """Makes sequence 0 hold these ids; gives the tokens computed and the place of the last row."""
        shared = 0
        for ours, theirs in zip(self.current, ids[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        self.api.llama_memory_seq_rm(self.memory, 0, shared, -1)
        place = 0
        for start in range(shared, len(ids), BATCH):
            place = self.decode([Entry(0, start, ids[start : start + BATCH])])[0]
        self.current = ids
        return len(ids) - shared, place

    def branch(self, index: int, step: int, position: int, tails: list[list[int]]) -> int:
        """Answers tails behind what sequence 0 holds, as sequences of their own; gives their tokens."""
        waiting = list(enumerate(tails))
        while waiting:
            some = [waiting.pop(0)]
            while waiting and len(some) < SEQUENCES - 1 and fits([each for _, each in some], waiting[0][1]):
                some.append(waiting.pop(0))
            for sequence in range(1, len(some) + 1):
                self.api.llama_memory_seq_cp(self.memory, 0, sequence, 0, -1)
            entries = [Entry(sequence, position, ids) for sequence, (_, ids) in enumerate(some, 1)]
            places = self.decode(entries)
            for (tail, _), place in zip(some, places, strict=True):
                self.answers[index][step][tail] = self.best(place, step)
            for sequence in range(1, len(some) + 1):
                self.api.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        return sum(map(len, tails))

    def run_short(self, documents: list[dict[str, Any]], indices: list[int]) -> None:
        """Short prompts with a single question, several to a batch."""
        if indices:
            self.forget()
        prompts = [(index, prompt_of(documents[index])) for index in indices]
        while prompts:
            some = [prompts.pop(0)]
            while prompts and len(some) < SEQUENCES and fits([each for _, each in some], prompts[0][1]):
                some.append(prompts.pop(0))
            places = self.decode([Entry(sequence, 0, ids) for sequence, (_, ids) in enumerate(some)])
            for (index, _), place in zip(some, places, strict=True):
                self.answers[index][0][0] = self.best(place, 0)
            self.totals.book(0, sum(len(ids) for _, ids in some))
            self.forget()

    def decode(self, entries: list[Entry]) -> list[int]:
        """Computes entries as one batch; gives the place of each entry's last row."""
        batch, row, places = self.batch, 0, []
        for entry in entries:
            for offset, token in enumerate(entry.ids):
                batch.token[row] = token
                batch.pos[row] = entry.position + offset
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = entry.sequence
                batch.logits[row] = offset == len(entry.ids) - 1
                row += 1
            places.append(row - 1)
        batch.n_tokens = row
        failed = self.api.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode says {failed} to {row} tokens")
        return places

    def best(self, place: int, step: int) -> int:
        """The index of the greatest answer at a row."""
        logits = self.api.llama_get_logits_ith(self.context, place)
        scores = [max(logits[token] for token in ids) for ids in self.readouts[step]]
        return scores.index(max(scores))


def is_short(document: dict[str, Any]) -> bool:
    """Whether a document is best run beside others."""
    steps = document["steps"]
    return len(steps) == 1 and len(steps[0]["tails"]) == 1 and len(prompt_of(document)) <= SHORT


def prompt_of(document: dict[str, Any]) -> list[int]:
    """The only prompt of a document."""
    (step,) = document["steps"]
    return [*document["ids"], *step["frame"], *step["tails"][0]]


def fits(some: list[list[int]], more: list[int]) -> bool:
    """Whether another sequence goes into the batch, as large as is computed at a time."""
    return sum(map(len, some)) + len(more) <= MICRO_BATCH


if __name__ == "__main__":
    serve(LlamaCpp())
