"""Filters over texts of 300 tokens: time in matrix products, cost of a second question, boot,
transformers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.lines import Line, spread
from benchmarks.profile import PRODUCTS as LAYER_PRODUCTS
from benchmarks.profile import clocked
from quail.config import EngineConfig
from quail.execution.asks import RunControl
from quail.execution.runner import Engine
from quail.execution.stages import compile_stage
from quail.kernels.compiled import PackedKernels
from tests.engine.feeds import ChainFeed, question

CHAPTERS = Path(__file__).parent.parent / "examples" / "data" / "chapters.parquet"
CALLS = (question(0, "\n\nIs this about the sea?"), question(1, "\n\nDoes anybody speak in this text?"))
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise")


class KeepingFeed(ChainFeed):
    """One question whose documents are kept as if another would follow."""

    def _asks(self, rows: Any, index: int) -> Any:
        asks = super()._asks(rows, index)
        asks.may_follow[:] = True
        return asks


def texts_of_tokens(engine: Engine, num_documents: int, num_tokens: int = 300) -> list[str]:
    """Texts cut from the chapters that have `num_tokens` ids in front of the question each."""
    chapters = pq.read_table(CHAPTERS)["text"].to_pylist()
    label = len(engine.pieces.prefix)
    found: list[str] = []
    for chapter in chapters:
        ids, _ = engine.tokenizer.encode_plain([chapter])
        for start in range(0, len(ids) - num_tokens, num_tokens):
            text = engine.tokenizer.decode(ids[start : start + num_tokens - label].tolist())
            again, _ = engine.tokenizer.encode_plain([text])
            if len(again) + label == num_tokens:
                found.append(text)
            if len(found) == num_documents:
                return found
    raise AssertionError(f"only {len(found)} texts")


def run_seconds(engine: Engine, feed: ChainFeed) -> float:
    """Seconds of one run over a feed."""
    calls = CALLS[: feed.num_questions]
    started = time.perf_counter()
    engine.run(calls, feed, RunControl())
    return time.perf_counter() - started


def product_share(engine: Engine, texts: list[str]) -> float:
    """Share of matrix products in the time of the passes of a first question."""
    decoder: Any = engine.model.decoder  # type: ignore[attr-defined]
    if not isinstance(decoder.kernels, PackedKernels):
        return profiled_share(engine, texts)
    # Activation and residual add are fused into such products and count with them.
    with clocked(engine) as clocks:
        report = engine.run(CALLS[:1], ChainFeed(texts, 1), RunControl())
    return float(sum(clocks.seconds[name] for name in LAYER_PRODUCTS) / report["seconds"]["forward"])


def profiled_share(engine: Engine, texts: list[str]) -> float:
    """The same by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        report = engine.run(CALLS[:1], ChainFeed(texts, 1), RunControl())
    products = sum(e.self_cpu_time_total for e in measured.key_averages() if e.key in PRODUCTS)
    return float(products / 1e6 / report["seconds"]["forward"])


def transformers_seconds(oracle: Any, prompts: list[np.ndarray]) -> float:
    """Seconds for whole prompts, one at a time."""
    started = time.perf_counter()
    with torch.inference_mode():
        for ids in prompts:
            oracle(torch.from_numpy(ids.astype(np.int64)).unsqueeze(0), logits_to_keep=1)
    return time.perf_counter() - started


def transformers_model(dtype: torch.dtype) -> Any:
    """The default model's weights in transformers."""
    import transformers

    from quail.models.loader import load_model

    loaded = load_model("smollm2-135m", dtype=dtype, cache_dir=EngineConfig().cache_path)
    shape = loaded.config
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.load_state_dict(loaded.weights, strict=False)
    model.tie_weights()
    return model


BOOT = """
import sys, time
import quail
with quail.Session() as session:
    session.register("t", {"id": [1], "text": ["A fine film."]})
    query = session.sql("SELECT id FROM t WHERE AI.IF(PROMPT('Is it good? {0}', text))")
    query.run(progress=False).fetchall()
    answered = time.time()
print(answered - float(sys.argv[1]), "transformers" in sys.modules)
"""


def boot_seconds() -> float:
    """Seconds from nothing to the first answer in a fresh process: its start is in it, its end is not."""
    command = [sys.executable, "-c", BOOT, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, has_transformers = done.stdout.split()
    assert has_transformers == "False", "transformers was imported on a warm boot"
    return float(seconds)


def measure(*, num_documents: int, num_rounds: int) -> list[Line]:
    """All lines; the parts of a ratio are measured in turn, round by round."""
    engine = Engine.boot(EngineConfig(retention="off"))
    texts = texts_of_tokens(engine, num_documents)
    stages = [compile_stage(call, engine.pieces, engine.tokenizer) for call in CALLS]
    sample = texts[: max(4, num_documents // 10)]
    prompts = []
    for text in sample:
        ids, _ = engine.tokenizer.encode_plain([text])
        prompts += [np.concatenate([engine.pieces.prefix, ids, stage.tail]) for stage in stages]
    decoder: Any = engine.model.decoder  # type: ignore[attr-defined]
    oracle = transformers_model(decoder.dtype)
    run_seconds(engine, ChainFeed(texts[:8], 2))
    transformers_seconds(oracle, prompts[:2])
    shares, seconds, peers, boots = [], [], [], []
    for _ in range(num_rounds):
        boots.append(boot_seconds())
        shares.append(product_share(engine, texts))
        kept, both = run_seconds(engine, KeepingFeed(texts, 1)), run_seconds(engine, ChainFeed(texts, 2))
        alone = run_seconds(engine, ChainFeed(texts, 1))
        seconds.append((kept, both, alone))
        peers.append(transformers_seconds(oracle, prompts) / len(sample) * num_documents)
    second = statistics.median((both - kept) / alone for kept, both, alone in seconds)
    speedup = statistics.median(peer / both for peer, (_, both, _) in zip(peers, seconds, strict=True))
    alone = statistics.median(s[2] for s in seconds)
    rate = num_documents * (300 + len(stages[0].tail)) / alone
    share, boot = statistics.median(shares), statistics.median(boots)
    return [
        Line("matrix products / pass time", share, ">= 0.45", share >= 0.45, spread(shares)),
        Line("second question / first", second, "<= 1/6", second <= 1 / 6, f"first: {rate:.0f} tokens/s"),
        Line("boot to first answer, seconds", boot, "<= 3", boot <= 3, spread(boots)),
        Line("transformers / quail, two filters", speedup, ">= 1.8", speedup >= 1.8, spread(peers)),
    ]
