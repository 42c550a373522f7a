"""The anchor of a join whose answers are stored: with the sides swapped it would be another question."""

from __future__ import annotations

from collections.abc import Iterable

from quail.answers.digests import digest_of
from quail.answers.store import AnswerStore
from quail.config import EngineConfig
from quail.plan.logical import AICall


class KeptAnchors:
    """Finds and notes anchors in a store.

    Args:
        store: of answers.
        config: of the engine; another model or layout may choose another side.
    """

    def __init__(self, store: AnswerStore, config: EngineConfig) -> None:
        self._store = store
        self._engine = f"{config.model}/{config.dtype}/{config.layout}/{config.label}".encode()

    def of(self, call: AICall) -> int | None:
        """The side of a call over two relations that was its anchor before, None of a new one."""
        return self._store.anchor(self._digest(call))

    def keep(self, calls: Iterable[AICall]) -> None:
        """Notes the anchors with which calls are about to be answered."""
        for call in calls:
            if call.prompt.num_arguments == 2:
                self._store.keep_anchor(self._digest(call), call.anchor)

    def _digest(self, call: AICall) -> bytes:
        options = call.options
        asked = (
            call.prompt.parts,
            call.categories,
            options.answers,
            options.task_description,
            options.examples,
        )
        return digest_of([self._engine, repr(asked).encode()])
