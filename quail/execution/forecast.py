"""What the engine would do for some questions: counted with the model's tokenizer, without its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.config import EngineConfig
from quail.cost.budgets import ModelShape
from quail.cost.device import ASSUMED, gpu_rates, kept_rates
from quail.cost.gpus import SourcedRates
from quail.cost.grants import Grant, host_grant
from quail.cost.roofline import seconds
from quail.cost.work import Work
from quail.execution.asks import Feed, RunControl
from quail.execution.documents import DocumentEncoder
from quail.execution.reads import Model
from quail.execution.run import Limits, Run
from quail.execution.runner import Room, layout_of, passes_in_flight, retention_of, shape_of, sharing_rule
from quail.execution.stages import Pieces, compile_stage
from quail.kernels.choice import KernelChoice
from quail.kv.prefix_sharing import PrefixTree
from quail.models.device import device_of, dtype_name, grant_of
from quail.models.outline import ModelOutline, read_outline
from quail.models.weights import num_weights
from quail.plan.logical import AICall
from quail.planner.estimate import (
    DocumentCounts,
    QuestionCount,
    TokenForecast,
    forecast_tokens,
    until_row_limit,
)
from quail.planner.prefix_sharing import FOLLOW_UP, ROW_LIMIT, SharingDecision, decide

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2}


@dataclass(frozen=True)
class GroupForecast:
    """Questions over the same documents, and what they will take.

    Attributes:
        documents: what was counted.
        questions: in the order in which they are asked.
        decision: whether the documents share beginnings.
        tokens: the ledger.
        seconds: by the roofline.
    """

    documents: DocumentCounts
    questions: tuple[QuestionCount, ...]
    decision: SharingDecision
    tokens: TokenForecast
    seconds: float


class Forecaster:
    """Counts tokens and predicts what a model would compute on this machine.

    Args:
        config: settings of the engine.
        outline: the model.
        room: of the engine that was booted; None reckons with what one would have if it were booted now.

    Attributes:
        are_rates_known: whether seconds rest on this device's rates, not on assumed ones.
        is_room_known: whether passes and pages are those of the engine. What a GPU will have free when its
            memory is taken is not known before.
    """

    def __init__(self, config: EngineConfig, outline: ModelOutline, room: Room | None = None) -> None:
        self.model = outline.name
        self._config, self._outline = config, outline
        layout = layout_of(config, outline)
        self.layout = layout.name
        self._pieces = Pieces.of(layout, outline.tokenizer)
        self._context_tokens = outline.config.context_tokens
        self._encoder = DocumentEncoder(outline.tokenizer, self._pieces, self._context_tokens)
        self.device, self.dtype, found = _device_and_rates(config)
        self._rates, self.are_rates_known = found.rates, found.is_known
        element_bytes = _ELEMENT_BYTES[self.dtype]
        weight_bytes = 0 if self.device == "cpu" else element_bytes * num_weights(outline.config)
        self._shape: ModelShape = shape_of(
            outline.config, element_bytes=element_bytes, weight_bytes=weight_bytes
        )
        self._room = room
        self.is_room_known = room is not None or self.device != "cuda"
        if room is not None:
            self._budget = room.token_budget
        else:
            grant = self._grant()
            self._budget = config.token_budget or grant.token_budget(self._shape, config.kv_memory_bytes)

    @classmethod
    def of(cls, config: EngineConfig, room: Room | None = None) -> Forecaster | None:
        """A forecaster for a configuration; None where the model's files would have to be fetched first.

        Raises:
            ModelError: the model's files are not understood.
            PlanError: the layout does not suit the model.
        """
        outline = read_outline(config.model, config.cache_path)
        return None if outline is None else cls(config, outline, room)

    def documents(self, texts: pa.Array, num_documents: int, calls: Sequence[AICall]) -> DocumentCounts:
        """Counts the tokens of documents, all of them or a sample.

        Args:
            texts: what is counted; no NULLs.
            num_documents: how many there are.
            calls: the questions asked of them.
        """
        prefixes = self._encoder.encode(texts)
        longest = max(self._suffix_tokens(call) for call in calls)
        return DocumentCounts(
            lengths=np.array([len(prefix.ids) for prefix in prefixes], dtype=np.int64),
            tree=PrefixTree.build([prefix.ids for prefix in prefixes]),
            num_documents=num_documents,
            num_too_long=sum(prefix.num_tokens + longest > self._context_tokens for prefix in prefixes),
        )

    def question(self, call: AICall, num_asked: int, *, is_exact: bool) -> QuestionCount:
        """A question that is asked of `num_asked` documents."""
        return QuestionCount(call.index, num_asked, self._suffix_tokens(call), is_exact)

    def group(
        self,
        documents: DocumentCounts,
        questions: Sequence[QuestionCount],
        *,
        row_limit: int | None = None,
        selectivities: Sequence[float] = (),
        is_follow_up: bool = False,
    ) -> GroupForecast:
        """What some questions over the same documents will take.

        Args:
            documents: all that may be read.
            questions: in the order in which they are asked.
            row_limit: rows after which the run ends; None reads all.
            selectivities: of the questions, used with a row limit.
            is_follow_up: whether the documents become due one by one, as answers to other questions come.
        """
        read, asked = documents, tuple(questions)
        if row_limit is not None:
            read, asked = until_row_limit(documents, questions, row_limit, selectivities)
        decision = decide(
            documents.tree,
            documents.lengths,
            np.full(len(documents.lengths), len(questions) > 1),
            shape=self._shape,
            rates=self._rates,
            mode=self._config.prefix_sharing,
            obstacle=ROW_LIMIT if row_limit is not None else FOLLOW_UP if is_follow_up else None,
            scale=documents.scale,
        )
        tokens = forecast_tokens(read, asked, decision)
        return GroupForecast(documents, asked, decision, tokens, self.seconds(tokens.work))

    @property
    def num_pages(self) -> int:
        """Pages that the arena has, or would have if it were made now.

        Raises:
            PlanError: too little memory for one.
        """
        if self._room is not None:
            return self._room.num_pages
        kv_bytes = self._config.kv_memory_bytes
        return self._grant().plan(self._shape, token_budget=self._budget, kv_bytes=kv_bytes).num_pages

    def _grant(self) -> Grant:
        """What the engine may take if it were booted now."""
        return host_grant() if self.device == "cpu" else grant_of(device_of(self._config.device))

    def dry_run(self, model: Model, calls: Sequence[AICall], feed: Feed, control: RunControl) -> Run:
        """A run as the engine would make it, on a model in place of this one.

        Args:
            model: its pages are those of the arena.
            calls: of the plan.
            feed: the relational side.
            control: of the run.
        """
        return Run(
            model,
            self._outline.tokenizer,
            self._pieces,
            Limits(self._budget, self._context_tokens, passes_in_flight(self.device)),
            calls,
            feed,
            control,
            sharing_rule(self._config.prefix_sharing, self._shape, lambda: self._rates),
            retention_of(self._config.retention, model.pages, self._shape, self._budget),
        )

    @property
    def label_tokens(self) -> int:
        """Tokens in front of each document."""
        return len(self._pieces.prefix)

    def text_tokens(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Tokens of each text (no NULLs), without a label; at most those of the model's context."""
        return np.array([len(found.ids) for found in self._encoder.encode_partners(texts)], dtype=np.int64)

    def fixed_tokens(self, call: AICall) -> tuple[int, int]:
        """Tokens between an anchor and its partner, and behind the last document."""
        stage = compile_stage(call, self._pieces, self._outline.tokenizer)
        return len(stage.frame), stage.num_fixed_tokens - len(stage.frame)

    def cost(self, work: Work) -> float:
        """Seconds of some work."""
        return self.seconds(work)

    def seconds(self, work: Work) -> float:
        """Seconds of some work by the roofline."""
        return seconds(work, self._shape, self._rates).total

    def _suffix_tokens(self, call: AICall) -> int:
        return compile_stage(call, self._pieces, self._outline.tokenizer).num_fixed_tokens


def _device_and_rates(config: EngineConfig) -> tuple[str, str, SourcedRates]:
    """Device, dtype and rates of a configuration; torch is asked only where there may be more than a CPU."""
    may_be_more = config.device == "auto" and Path("/dev/nvidia0").exists()
    on_cpu = config.device in ("auto", "cpu") and not may_be_more
    device_type = "cpu" if on_cpu else device_of(config.device).type
    choice = KernelChoice.of(config.kernels, device_type, config.cache_path, config.attention)
    dtype = dtype_name(config.dtype, device_type, choice)
    if device_type == "cpu":
        threads = config.threads or _threads_by_environment()
        kept = kept_rates(config.cache_path, dtype, choice.version, threads)
        return "cpu", dtype, SourcedRates(kept or ASSUMED, "measured before", is_known=kept is not None)
    return device_type, dtype, gpu_rates(device_of(config.device), dtype, config.cache_path)


def _threads_by_environment() -> int | None:
    """The threads that torch will take because the environment says so, None where it decides by itself."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else None
