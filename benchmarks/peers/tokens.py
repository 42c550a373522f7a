"""A statement's prompts as token ids, made by Quail's own binder, stage compiler and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from quail.config import EngineConfig
from quail.execution.runner import layout_of
from quail.execution.stages import LabelReadout, Pieces, Stage, compile_stage
from quail.frontend.sql import bind_sql
from quail.models.outline import read_outline
from quail.models.registry import fetch
from quail.models.tokenizer import Tokenizer
from quail.sources.catalog import Catalog

Ids = list[int]


@dataclass(frozen=True)
class Step:
    """One question of a document.

    Attributes:
        frame: ids between the document and its tails.
        tails: what ends each prompt: question and cue, or partner and cue.
    """

    frame: Ids
    tails: list[Ids]


@dataclass(frozen=True)
class Document:
    """A document and the questions about it, one a step; it may lack the last steps."""

    ids: Ids
    steps: list[Step]

    def prompt_tokens(self, steps: Sequence[int]) -> int:
        """Tokens of the whole prompts of some steps."""
        return sum(
            len(self.ids) + len(self.steps[step].frame) + len(tail)
            for step in steps
            if step < len(self.steps)
            for tail in self.steps[step].tails
        )

    def num_prompts(self, steps: Sequence[int]) -> int:
        """Prompts of some steps."""
        return sum(len(self.steps[step].tails) for step in steps if step < len(self.steps))

    def as_message(self) -> dict[str, object]:
        """The document as the protocol writes it."""
        return {
            "ids": self.ids,
            "steps": [{"frame": step.frame, "tails": step.tails} for step in self.steps],
        }


class Compiler:
    """Makes ids as Quail's engine would.

    Args:
        config: names the model and what stands around documents.
    """

    def __init__(self, config: EngineConfig) -> None:
        outline = read_outline(config.model, config.cache_path)
        if outline is None:
            fetch(config.model, config.cache_path)
            outline = read_outline(config.model, config.cache_path)
        assert outline is not None
        self.tokenizer: Tokenizer = outline.tokenizer
        self.pieces = Pieces.of(layout_of(config, outline), outline.tokenizer)

    def stages(self, sql: str, tables: dict[str, dict[str, list[object]]]) -> list[Stage]:
        """The stages of a statement's calls, in the order in which they are written; anchors stand left."""
        catalog = Catalog()
        try:
            for name, columns in tables.items():
                catalog.register(name, pa.table(columns))
            calls = bind_sql(sql, None, catalog).calls
        finally:
            catalog.close()
        return [compile_stage(replace(call, anchor=0), self.pieces, self.tokenizer) for call in calls]

    def text(self, text: str) -> Ids:
        """Ids of a text."""
        return [int(token) for token in self.tokenizer.encode_plain([text])[0]]

    def document(self, text: str, steps: list[Step]) -> Document:
        """A document with what stands in front of it."""
        return Document([*self.pieces.prefix.tolist(), *self.text(text)], steps)

    def question(self, stage: Stage) -> Step:
        """A question about one document."""
        return Step([], [stage.tail.tolist()])

    def partners(self, stage: Stage, texts: Sequence[str]) -> Step:
        """The questions about a document and each of some partners."""
        return Step(stage.frame.tolist(), [[*self.text(text), *stage.tail.tolist()] for text in texts])

    def texts_of_tokens(self, source: Sequence[str], lengths: Sequence[int]) -> list[str]:
        """Texts cut from longer ones, one after the other, that have so many ids as documents.

        A cut whose text does not become the same number of ids again is passed over.

        Raises:
            ValueError: the source is too short; says how many texts it gives.
        """
        found: list[str] = []
        for text in source:
            ids, position = self.text(text), 0
            while len(found) < len(lengths):
                length = lengths[len(found)] - len(self.pieces.prefix)
                if position + length > len(ids):
                    break
                cut = self.tokenizer.decode(ids[position : position + length])
                position += length
                if len(self.text(cut)) == length:
                    found.append(cut)
        if len(found) < len(lengths):
            raise ValueError(f"the chapters give {len(found)} texts of these lengths, not {len(lengths)}")
        return found


def readout_ids(stage: Stage) -> list[Ids]:
    """The vocabulary rows of each answer; the greatest of all rows decides.

    Raises:
        ValueError: labels that begin with the same token, which one row does not tell apart.
    """
    if isinstance(stage.readout, LabelReadout):
        tree = stage.readout.tree
        if tree.branches:
            raise ValueError(f"the labels of {stage.call.text} need more than one row each")
        children = tree.children[0]
        return [[int(children[path[0][1]])] for path in tree.paths]
    return [
        [int(token) for token in stage.readout.vocab_ids[stage.readout.groups == answer]] for answer in (0, 1)
    ]
