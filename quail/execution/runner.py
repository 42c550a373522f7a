"""The engine: a loaded model with its arena, ready to answer runs."""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quail.answers.store import AnswerStore
from quail.config import EngineConfig
from quail.cost.budgets import MemoryPlan, ModelShape
from quail.cost.device import ASSUMED, DeviceRates
from quail.cost.roofline import Rates, seconds
from quail.cost.work import Work, rows
from quail.errors import PlanError
from quail.execution.asks import Feed, RunControl
from quail.execution.calibration import Means
from quail.execution.reads import Model
from quail.execution.recall import Memory, ModelIdentity
from quail.execution.run import Limits, Retention, Run, SharingRule
from quail.execution.stages import Pieces
from quail.kernels.choice import KernelChoice
from quail.kv.pages import PageArena
from quail.kv.prefix_sharing import PrefixTree
from quail.kv.retention import RetentionPool, cap_pages
from quail.models.device import device_of, dtype_of, dtype_word, grant_of
from quail.plan.logical import AICall
from quail.plan.prompts import PromptLayout
from quail.planner.prefix_sharing import SharingDecision, decide
from quail.processes import check_threads_after_fork, without_collection

if TYPE_CHECKING:
    from quail.models.config import DecoderConfig
    from quail.models.loader import LoadedModel
    from quail.models.outline import ModelOutline
    from quail.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Clock:
    """What work takes on a device.

    Attributes:
        shape: of the model.
        rates: of the device; None while they are not known.
    """

    shape: ModelShape
    rates: Callable[[], Rates | None]

    def speed_of_light(self, work: Work, run_seconds: float) -> float | None:
        """Least seconds of some work as a share of those that a run took, at most 1; None if unknown."""
        rates = self.rates()
        if rates is None or run_seconds <= 0:
            return None
        return min(1.0, seconds(work, self.shape, rates).total / run_seconds)

    def shares(self, works: Mapping[int, Work]) -> dict[int, float]:
        """Share of each of some works in the time of all of them."""
        rates = self.rates() or ASSUMED
        times = {name: seconds(work, self.shape, rates).total for name, work in works.items()}
        total = sum(times.values())
        return {name: time / total if total else 0.0 for name, time in times.items()}


@dataclass(frozen=True)
class Room:
    """What an engine has for its passes.

    Attributes:
        token_budget: most rows a pass.
        num_pages: of its arena.
    """

    token_budget: int
    num_pages: int


class Engine:
    """Answers questions with one model on one device.

    Args:
        model: runs passes on its arena.
        tokenizer: the model's.
        layout: what stands around documents and questions.
        limits: budget and context of a run.
        about: what `describe` tells.
        sharing: decides whether documents share prefixes; None never does.
        retention: KV kept between operators and queries; None keeps none.
        memory: answers of earlier runs; None keeps none.
        clock: what work takes on this device; None tells nothing of it.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        layout: PromptLayout,
        limits: Limits,
        about: dict[str, Any],
        sharing: SharingRule | None = None,
        retention: Retention | None = None,
        memory: Memory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.sharing, self.retention, self.memory, self.clock = sharing, retention, memory, clock
        self._means: Means = {}
        self.model, self.tokenizer, self.layout, self.limits = model, tokenizer, layout, limits
        self._about = about
        self.pieces = Pieces.of(layout, tokenizer)

    @classmethod
    @without_collection()
    def boot(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        store: AnswerStore | None = None,
        load: Callable[..., LoadedModel] | None = None,
    ) -> Engine:
        """Loads the model and takes memory for its KV.

        Args:
            config: what to load and how much to take.
            progress: told what is being done, a phrase at a time.
            store: of answers; None keeps none.
            load: in place of `load_model`.

        Raises:
            ConfigError: a device, dtype or kernels that this machine does not have, or a fault in the user's
                rates of GPUs.
            ModelError: the model cannot be found, loaded or trusted.
            PlanError: too little memory, with the numbers.
        """
        started = time.perf_counter()
        import torch

        from quail.kernels.interface import state_dtype
        from quail.kv.arena import KVArena
        from quail.models.decoder import Decoder, PagedDecoder
        from quail.models.loader import load_model
        from quail.models.packed import PackedMatrices
        from quail.models.self_check import trusted_dtype

        num_threads = config.threads or _threads_of_torch()
        check_threads_after_fork(num_threads)
        torch.set_num_threads(num_threads)
        device = device_of(config.device)
        choice = KernelChoice.of(config.kernels, device.type, config.cache_path, config.attention)
        choice = choice.compiled(config.kernels, progress)
        kernels_for = functools.partial(choice.kernels, device=device, threads=num_threads)
        dtype, dtype_warning = trusted_dtype(dtype_of(config.dtype, device, choice), device, kernels_for)
        rates = DeviceRates(device, dtype, config.cache_path)
        grant = grant_of(device)  # before the weights take their part, however much of them is mapped
        load = load or load_model
        stored = state_dtype(dtype)
        loaded = load(config.model, dtype=stored, cache_dir=config.cache_path, progress=progress)
        layout = layout_of(config, loaded.outline)
        kernels = kernels_for(dtype)
        weights = loaded.weights
        if device.type != "cpu":
            grant.check_weights(sum(tensor.nbytes for tensor in weights.values()))
        for name in weights:  # one by one: the host's copy of each goes as the device has it
            weights[name] = weights[name].to(device)
        packed = PackedMatrices(config.cache_path, loaded.revision, dtype, kernels.layout)
        decoder = Decoder(loaded.config, weights, kernels, packed)
        shape = shape_of(loaded.config, element_bytes=stored.itemsize, weight_bytes=decoder.num_weight_bytes)
        budget = config.token_budget or grant.token_budget(shape, config.kv_memory_bytes)
        kernels.limit_gathered(shape.gathered_tokens(budget))
        memory = grant.plan(shape, token_budget=budget, kv_bytes=config.kv_memory_bytes)
        arena = KVArena(
            memory.num_pages,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=stored,
            device=device,
        )
        about = {
            "model": loaded.name,
            "revision": loaded.revision,
            "device": device.type,
            "dtype": dtype_word(dtype),
            "kernels": kernels.name,
            "layout": layout.name,
            "token_budget": budget,
            "threads": torch.get_num_threads(),
            "memory": _memory_report(memory),
            "warnings": [] if dtype_warning is None else [dtype_warning],
            "boot_seconds": time.perf_counter() - started,
        }
        limits = Limits(budget, loaded.config.context_tokens, passes_in_flight(device.type))
        identity = ModelIdentity(loaded.name, loaded.revision, dtype_word(dtype), layout.name)
        return cls(
            PagedDecoder(decoder, arena),
            loaded.tokenizer,
            layout,
            limits,
            about,
            sharing_rule(config.prefix_sharing, shape, lambda: rates.found(kernels)),
            retention_of(config.retention, arena.pages, shape, budget),
            None if store is None else Memory(store, identity),
            Clock(shape, lambda: rates.known(kernels)),
        )

    def run(self, calls: tuple[AICall, ...], feed: Feed, control: RunControl) -> dict[str, Any]:
        """Answers until the feed is done.

        Returns:
            `tokens` (the ledger), `calls` (for each its part of the ledger, and of the seconds in the model
            by its work), `passes`, `seconds` (tokenize, forward, run), `speed_of_light`, `documents`,
            `requests`, `truncated`, `errors`, `memory` (bytes and pages), and what `describe` says.

        Raises:
            PlanError: a question that cannot be asked of this model.
            RowError: a row that cannot be answered.
            QueryCancelled: the run was stopped.
        """
        started = time.perf_counter()
        pages = self.model.pages
        pages.peak_used_pages = pages.num_pages - pages.num_free_pages
        run = Run(
            self.model,
            self.tokenizer,
            self.pieces,
            self.limits,
            calls,
            feed,
            control,
            self.sharing,
            self.retention,
            self._means,
            self.memory,
            self._about.get("dtype", "float32"),
        )
        run.run()
        run_seconds = time.perf_counter() - started
        stats, intake, about = run.stats, run.intake, self.describe()
        return about | {
            "tokens": run.scheduler.ledger.as_dict(),
            "calls": self._calls(run, len(calls)),
            "speed_of_light": self._speed_of_light(run, run_seconds - stats.audit.get("seconds", 0.0)),
            "passes": run.scheduler.num_passes,
            "documents": intake.num_documents,
            "requests": intake.num_requests,
            "answers": asdict(run.recall.counts),
            "truncated": intake.num_truncated,
            "calibration_tokens": stats.num_calibration_tokens,
            "errors": run.failures.log.first(),
            "num_errors": run.failures.log.num_errors,
            "error_table": run.failures.log.table(),
            "audit": stats.audit,
            "warnings": [*about.get("warnings", ()), *stats.warnings],
            "prefix_sharing": {
                "planned_shared_tokens": sum(d.shared_tokens for d in stats.sharing if d.shares),
                "decisions": [asdict(decision) for decision in stats.sharing],
            },
            "seconds": {
                "tokenize": intake.tokenize_seconds,
                "forward": stats.forward_seconds,
                "run": run_seconds,
            },
            "memory": about["memory"]
            | {
                "peak_kv_pages": pages.peak_used_pages,
                "retained_kv_pages": pages.num_retained_pages,
                "peak_resident_bytes": _peak_resident_bytes(),
            },
        }

    def _calls(self, run: Run, num_calls: int) -> list[dict[str, Any]]:
        works, ledgers = run.scheduler.works, run.scheduler.ledgers
        shares = self.clock.shares(works) if self.clock is not None else {}
        forward = run.stats.forward_seconds
        return [
            {"tokens": ledgers[call].as_dict(), "seconds": forward * shares.get(call, 0.0)}
            for call in range(num_calls)
        ]

    def _speed_of_light(self, run: Run, run_seconds: float) -> float | None:
        """Roofline seconds of the run's work, without what was computed again, over those it took."""
        work = sum(run.scheduler.works.values(), Work()) + run.scheduler.repeated * -1
        return None if self.clock is None or not work.tokens else self.clock.speed_of_light(work, run_seconds)

    @property
    def room(self) -> Room:
        """What it has for its passes."""
        return Room(self.limits.token_budget, self.model.pages.num_pages)

    @property
    def is_sound(self) -> bool:
        """Whether every page is accounted for, as it must be between runs."""
        try:
            self.model.pages.check_integrity()
        except AssertionError:
            return False
        return self.model.pages.num_live_pages == 0

    def describe(self) -> dict[str, Any]:
        """Model, device, dtype, layout, budget and memory, as the report shows them."""
        return dict(self._about)

    def close(self) -> None:
        """Lets go of the model and its memory."""
        del self.model


def passes_in_flight(device_type: str) -> int:
    """Passes that are started before the first of them is waited for.

    On CUDA the host packs a pass while the one before runs. On a CPU both would want the same cores: a
    packing thread was slower there (measured on two).
    """
    return 2 if device_type == "cuda" else 1


def shape_of(config: DecoderConfig, *, element_bytes: int, weight_bytes: int) -> ModelShape:
    """The sizes of a model that decide about memory and time."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        context_tokens=config.context_tokens,
        element_bytes=element_bytes,
        weight_bytes=weight_bytes,
    )


@functools.cache
def _threads_of_torch() -> int:
    """The threads that torch takes by itself, asked before an engine sets them for the whole process."""
    import torch

    return torch.get_num_threads()


def layout_of(config: EngineConfig, model: ModelOutline) -> PromptLayout:
    """The prompt layout of a configuration.

    Args:
        config: names the layout, or leaves it to the model.
        model: has a layout that suits it, and perhaps a chat template.

    Raises:
        PlanError: a chat layout of a model without a chat template.
    """
    name = model.layout if config.layout == "auto" else config.layout
    label = f"{config.label}\n" if config.label else ""
    if name == "completion":
        return PromptLayout("completion", label=label)
    chat = model.chat
    if chat is None:
        raise PlanError(
            "layout = 'chat', but the model has no chat template",
            hint="layout = 'completion' needs none",
        )
    return PromptLayout("chat", opener=chat.opener, label=label, closer=chat.closer)


def sharing_rule(mode: str, shape: ModelShape, rates: Callable[[], Rates]) -> SharingRule:
    """The rule for this model and device; the device's rates are measured when they are first needed."""

    def rule(tree: PrefixTree, lengths: Sequence[int], kept: Sequence[bool]) -> SharingDecision:
        return decide(
            tree,
            lengths,
            kept,
            shape=shape,
            rates=rates() if tree.num_shared_tokens else ASSUMED,
            mode=mode,
        )

    return rule


def retention_of(mode: str, pages: PageArena, shape: ModelShape, token_budget: int) -> Retention | None:
    """What is kept between operators and queries, for this model and arena."""
    if mode == "off":
        return None

    def recompute_seconds(num_tokens: int) -> float:
        return seconds(rows(num_tokens), shape, ASSUMED).total

    cap = cap_pages(pages.num_pages, token_budget, pages.page_tokens)
    return Retention(RetentionPool(pages, cap, recompute_seconds), writes_all=mode == "keep")


def _memory_report(memory: MemoryPlan) -> dict[str, int]:
    return {
        "limit_bytes": memory.limit_bytes,
        "weight_bytes": memory.weight_bytes,
        "working_bytes": memory.working_bytes,
        "kv_bytes": memory.arena_bytes,
        "kv_pages": memory.num_pages,
        "page_bytes": memory.page_bytes,
    }


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
