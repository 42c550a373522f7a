"""Engines on tiny random models, and their oracle: one prompt a pass, no cache, plain attention, float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from quail.execution.asks import RunControl
from quail.execution.chunk import BlockTable, Chunk, Segments
from quail.execution.run import Limits, Retention, Run
from quail.execution.stages import Pieces, compile_stage
from quail.kv.arena import KVArena
from quail.kv.retention import RetentionPool
from quail.models.decoder import Decoder, PagedDecoder
from quail.models.loader import LoadedModel, load_model
from quail.plan.prompts import PromptLayout
from tests.engine.kernel_sets import kernels_here, plain_kernels


class RecordingRun(Run):
    """A run that keeps the answer logits of every (document handle, stage)."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.logits: dict[tuple[int, int], np.ndarray] = {}

    def name_of(self, request) -> tuple[int, int]:
        return (request.key, request.stage)

    def _hand_over(self, answered, answers) -> None:
        for request, answer in zip(answered, answers, strict=True):
            pair = self.name_of(request)
            assert pair not in self.logits
            self.logits[pair] = answer
        self.model.pages.check_integrity()
        super()._hand_over(answered, answers)
        self.model.pages.check_integrity()


class TinyEngine:
    """A loaded model that can be run with any arena and budget."""

    def __init__(
        self, folder: Path | str, cache: Path, dtype=torch.float32, layout: str = "completion"
    ) -> None:
        self.folder = folder
        self.loaded: LoadedModel = load_model(str(folder), dtype=dtype, cache_dir=cache)
        weights = {name: tensor.clone() for name, tensor in self.loaded.weights.items()}
        self.decoder = Decoder(self.loaded.config, dict(weights), kernels_here(dtype))
        self.oracle = Decoder(
            self.loaded.config,
            {name: t.float() for name, t in weights.items()},
            kernels=plain_kernels(),
        )
        chat = self.loaded.chat
        self.layout = (
            PromptLayout("chat", opener=chat.opener, closer=chat.closer)
            if layout == "chat"
            else PromptLayout("completion")
        )
        self.tokenizer = self.loaded.tokenizer
        self.pieces = Pieces.of(self.layout, self.tokenizer)
        self.context_tokens = self.loaded.config.context_tokens

    def arena(self, num_pages: int, decoder: Decoder | None = None) -> KVArena:
        config, decoder = self.loaded.config, decoder or self.decoder
        return KVArena(
            num_pages,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def new_run(
        self,
        calls,
        feed,
        *,
        budget=512,
        pages=500,
        control=None,
        sharing=None,
        retain=False,
        pool=None,
        depth=1,
        wrapped=lambda model: model,
    ) -> RecordingRun:
        model = wrapped(PagedDecoder(self.decoder, self.arena(pages)))
        pool = RetentionPool(model.pages, pages) if pool is None else pool
        return RecordingRun(
            model,
            self.tokenizer,
            self.pieces,
            Limits(budget, self.context_tokens, depth),
            calls,
            feed,
            control or RunControl(),
            sharing,
            Retention(pool) if retain else None,
        )

    def run(self, calls, feed, *, pool_pages=None, **settings) -> RecordingRun:
        run = self.new_run(calls, feed, **settings)
        pool = run.scheduler.pool
        if pool_pages is not None:
            pool.cap_pages = pool_pages
        pages = run.model.pages
        try:
            run.run()
        finally:
            pages.check_integrity()
            pool.clear()
            assert pages.num_free_pages == pages.num_pages, "pages are missing after the run"
        return run

    def prefix(self, text: str) -> np.ndarray:
        ids, _ = self.tokenizer.encode_plain([text])
        return np.concatenate([self.pieces.prefix, ids])

    def prompt(self, call, text: str, partner: str | None = None) -> np.ndarray:
        stage = compile_stage(call, self.pieces, self.tokenizer)
        behind, _ = self.tokenizer.encode_plain([partner or ""])
        return np.concatenate([self.prefix(text), stage.frame, behind, stage.tail])

    def oracle_answer(self, call, text: str, partner: str | None = None) -> np.ndarray:
        """Answer logits of one prompt run whole and alone."""
        stage = compile_stage(call, self.pieces, self.tokenizer)
        ids = self.prompt(call, text, partner)
        chunk = Chunk(
            ids=ids.astype(np.int32),
            positions=np.arange(len(ids)),
            segments=Segments(np.array([0]), np.array([len(ids)]), np.array([-1]), np.array([0])),
            block_table=BlockTable.of([]),
            write_rows=np.zeros(0, dtype=np.int64),
            write_slots=np.zeros(0, dtype=np.int64),
            read_rows=np.array([len(ids) - 1]),
        )
        states = self.oracle.forward(chunk, self.arena(0, self.oracle))
        logits = self.oracle.head(states, stage.readout.vocab_ids).numpy()
        return stage.readout.answers([logits])[0]


def assert_equal_answers(
    run: RecordingRun, expected: dict[tuple[int, int], np.ndarray], scale: float = 2e-5
) -> None:
    """Logits within `scale` of the largest; the same answer wherever the oracle's margin exceeds 1e-4."""
    assert set(run.logits) == set(expected)
    largest = max(float(np.abs(e).max()) for e in expected.values())
    for pair, oracle in expected.items():
        found = run.logits[pair]
        assert np.abs(found - oracle).max() <= scale * largest, f"{pair}: {found} against {oracle}"
        if abs(oracle[0] - oracle[1]) > 1e-4:
            assert (found[0] > found[1]) == (oracle[0] > oracle[1]), f"{pair} flips"
