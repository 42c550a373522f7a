"""The cost model: work to seconds, and rates that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from quail.config import EngineConfig
from quail.cost import device
from quail.cost.budgets import ModelShape
from quail.cost.roofline import Rates, row_bytes_per_token, seconds
from quail.cost.work import Work
from quail.kernels import attention
from quail.kernels.choice import KernelChoice
from quail.kernels.compiled import NativeKernels
from quail.kernels.reference import TorchKernels
from quail.kv.prefix_sharing import PrefixTree
from quail.planner.estimate import DocumentCounts, QuestionCount, forecast_tokens, until_row_limit
from quail.planner.prefix_sharing import decide
from tests.engine.kernel_sets import native_kernels, plain_kernels

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    context_tokens=100,
    element_bytes=4,
    weight_bytes=0,
)
RATES = Rates(matmul_flops=1e6, attention_flops=1e5, memory_bytes=1e4)


def test_seconds_of_each_kind_of_work():
    products = 2 * (
        2 * 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    )  # the last layer's, behind attention, are read alone
    found = seconds(Work(tokens=3, pairs=6, kv_written=2, kv_read=5), SHAPE, RATES)
    assert found.matmul == pytest.approx(3 * products / 1e6)
    assert found.attention == pytest.approx(6 * 4 * 4 * 2 * 2 / 1e5)
    assert found.rows == pytest.approx(3 * row_bytes_per_token(SHAPE) / 1e4)
    assert found.memory == pytest.approx(2 * 7 * 2 * 2 * 2 * 4 * 2 / 1e4)
    assert found.total == pytest.approx(found.matmul + found.attention + found.rows + found.memory)


def test_measured_rates_are_kept_and_found_without_torch(tmp_path, monkeypatch):
    kernels, rates = plain_kernels(), replace(RATES, row_bytes=2e4)
    assert device.kept_rates(tmp_path, "float32", "reference") is None
    monkeypatch.setattr(device, "measure_cpu", lambda dtype, kernels: rates)
    kept = device.rates_of(torch.device("cpu"), torch.float32, tmp_path, kernels)
    assert kept == rates == device.kept_rates(tmp_path, "float32", "reference", torch.get_num_threads())
    assert device.kept_rates(tmp_path, "float32", "reference") == rates
    assert device.kept_rates(tmp_path, "bfloat16", "reference") is None
    assert device.kept_rates(tmp_path, "float32", "reference", 999) is None
    assert device.kept_rates(tmp_path, "float32", "native AVX-512 VNNI") is None


def test_rates_of_another_build_of_the_kernels_do_not_count(tmp_path, monkeypatch):
    kernels = native_kernels(torch.float32)
    monkeypatch.setattr(device, "measure_cpu", lambda dtype, kernels: RATES)
    device.rates_of(torch.device("cpu"), torch.float32, tmp_path, kernels)
    assert device.kept_rates(tmp_path, "float32", kernels.version) == RATES
    assert device.kept_rates(tmp_path, "float32", kernels.name) is None
    choice = KernelChoice.of("auto", "cpu", EngineConfig().cache_path)
    assert choice.version == kernels.version
    assert isinstance(kernels, NativeKernels)
    monkeypatch.setattr(kernels._library, "digest", "of another build")
    assert device.known_rates(torch.device("cpu"), torch.float32, tmp_path, kernels) is None


def test_rates_are_measured_with_the_kernels_in_use():
    class Counting(TorchKernels):
        calls: ClassVar[list[str]] = []

        def product(self, *args) -> None:
            self.calls.append("product")
            super().product(*args)

        def norm(self, *args) -> None:
            self.calls.append("norm")
            super().norm(*args)

    attended = []

    def attend(*args, **kwargs):
        attended.append(args)
        return attention.attend(*args, **kwargs)

    rates = device.measure_cpu(torch.float32, Counting(attend))
    assert set(Counting.calls) == {"product", "norm"} and attended
    assert min(vars(rates).values()) > 0


def test_row_traffic_has_a_rate_of_its_own_where_it_was_measured():
    work = Work(tokens=3)
    slow = seconds(work, SHAPE, RATES)
    fast = seconds(work, SHAPE, replace(RATES, row_bytes=4 * RATES.memory_bytes))
    assert fast.rows == pytest.approx(slow.rows / 4)
    assert fast.memory == slow.memory


def counts(lengths, tree=None, num_documents=None) -> DocumentCounts:
    lengths = np.array(lengths, dtype=np.int64)
    tree = tree or PrefixTree(list(range(len(lengths))), [None] * len(lengths), [0] * len(lengths))
    return DocumentCounts(lengths, tree, num_documents or len(lengths))


def sharing(documents: DocumentCounts, mode: str = "on"):
    kept = [False] * len(documents.lengths)
    return decide(
        documents.tree, documents.lengths, kept, shape=SHAPE, rates=RATES, mode=mode, scale=documents.scale
    )


def test_two_questions_rewind():
    documents = counts([30, 50])
    questions = [QuestionCount(0, 2, 5, True), QuestionCount(1, 2, 7, True)]
    found = forecast_tokens(documents, questions, sharing(documents))
    assert (found.naive, found.computed, found.reused_rewind) == (2 * 80 + 24, 80 + 24, 80)
    assert found.is_exact
    assert found.work.kv_written == found.work.kv_read == 80
    assert found.work.tokens == found.computed
    pairs = sum(n * (n + 1) / 2 + 5 * n + 15 + 7 * n + 28 for n in (30, 50))
    assert found.work.pairs == pairs


def test_a_shared_beginning_is_computed_once():
    documents = counts([40, 48], PrefixTree([0, 1], [None, 0], [0, 32]))
    found = forecast_tokens(documents, [QuestionCount(0, 2, 5, True)], sharing(documents))
    assert (found.naive, found.computed, found.reused_prefix) == (98, 66, 32)
    assert found.work.kv_written == found.work.kv_read == 32
    assert found.work.pairs == 40 * 41 / 2 + 16 * 32 + 16 * 17 / 2 + 5 * 88 + 2 * 15
    off = forecast_tokens(documents, [QuestionCount(0, 2, 5, True)], sharing(documents, "off"))
    assert (off.computed, off.reused_prefix, off.work.kv_written) == (98, 0, 0)


def test_a_sample_stands_for_all():
    documents = counts([40, 48], PrefixTree([0, 1], [None, 0], [0, 32]), num_documents=200)
    found = forecast_tokens(documents, [QuestionCount(0, 200, 5, True)], sharing(documents))
    assert (found.naive, found.computed, found.reused_prefix) == (9_800, 6_600, 3_200)
    assert found.work.kv_written == 3_200
    assert not found.is_exact


def test_a_row_limit_reads_what_it_needs():
    documents = counts([10] * 100)
    fewer, questions = until_row_limit(documents, [QuestionCount(0, 100, 5, True)], 3, [0.5])
    assert fewer.num_documents == questions[0].num_asked == 6
    assert not questions[0].is_exact
    fewer, _ = until_row_limit(documents, [QuestionCount(0, 100, 5, True)], 60, [0.5])
    assert fewer.num_documents == 100
    nothing, _ = until_row_limit(counts([]), [QuestionCount(0, 0, 5, True)], 3, [0.5])
    assert forecast_tokens(nothing, [QuestionCount(0, 0, 5, True)], sharing(nothing)).naive == 0
