"""The work of a run as its passes count it, and the least time in which it could have been done."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import quail
from quail.config import EngineConfig
from quail.cost import device
from quail.cost.budgets import ModelShape
from quail.cost.gpus import CARDS, assumed_rates
from quail.cost.roofline import Rates, seconds
from quail.cost.work import Work
from quail.execution import runner
from quail.execution.runner import Clock
from quail.models.decoder import PagedDecoder
from quail.models.outline import read_outline
from quail.result import Report
from tests.engine.driver import Driver, ids_of, smallest_arena
from tests.engine.kernel_sets import plain_kernels
from tests.models.tiny import make_tiny

RATES = Rates(matmul_flops=1e12, attention_flops=1e12, memory_bytes=1e12)
SHAPE = ModelShape(2, 8, 4, 2, 2, 16, 100, 4, 0)


def work_of_passes(driver: Driver) -> Work:
    """Every (row, key) pair counted one by one, from the arrays that the model gets."""
    found = Work()
    for planned in driver.passes_run:
        chunk, segments = planned.chunk, planned.chunk.segments
        pairs = read = 0
        for place in range(len(segments)):
            num_rows = int(segments.q_stop[place] - segments.q_start[place])
            paged = int(segments.paged_tokens[place])
            seen = paged + sum(stop - start for start, stop in segments.context_of(place))
            pairs += sum(seen + row + 1 for row in range(num_rows))
            again = place > 0 and (
                (segments.table_row[place], paged)
                == (segments.table_row[place - 1], int(segments.paged_tokens[place - 1]))
            )
            read += 0 if again else paged
        found += Work(len(chunk), pairs, len(chunk.write_rows), read)
    return found


@pytest.mark.parametrize("budget", [16, 50, 400])
@pytest.mark.parametrize("is_tight", [False, True])
def test_passes_count_their_work(budget, is_tight):
    rng = np.random.default_rng(budget)
    documents = [ids_of(rng, int(n)) for n in rng.integers(5, 90, 20)]
    suffixes = [ids_of(rng, int(n)) for n in (4, 9, 3)]
    pages = smallest_arena(documents, suffixes, budget) if is_tight else 400
    driver = Driver(documents, suffixes, num_pages=pages, budget=budget)
    driver.run()
    scheduler = driver.scheduler
    assert sum(scheduler.works.values(), Work()) == work_of_passes(driver)
    assert set(scheduler.works) == set(scheduler.ledgers) == {0, 1, 2}
    assert sum(each.tokens for each in scheduler.works.values()) == driver.model.rows_run
    assert scheduler.repeated.tokens == scheduler.ledger.recomputed
    needed = sum(scheduler.works.values(), Work()) + scheduler.repeated * -1
    assert needed.tokens == sum(map(len, documents)) + 20 * sum(map(len, suffixes))
    causal = sum(n * (n + 1) / 2 for n in map(len, documents))
    behind = sum(s * n + s * (s + 1) / 2 for n in map(len, documents) for s in map(len, suffixes))
    assert needed.pairs == causal + behind
    for stage, suffix in enumerate(suffixes):
        naive = sum(len(document) + len(suffix) for document in documents)
        assert scheduler.ledgers[stage].naive == naive
        scheduler.ledgers[stage].check()


def test_the_share_of_the_speed_of_light():
    clock = Clock(SHAPE, lambda: RATES)
    least = seconds(Work(tokens=1e9, pairs=1e9), SHAPE, RATES).total
    assert clock.speed_of_light(Work(tokens=1e9, pairs=1e9), least * 4) == pytest.approx(0.25)
    assert clock.speed_of_light(Work(tokens=1e9, pairs=1e9), least / 2) == 1.0
    assert clock.speed_of_light(Work(tokens=1e9), 0.0) is None
    assert Clock(SHAPE, lambda: None).speed_of_light(Work(tokens=1.0), 1.0) is None
    assert clock.shares({0: Work(tokens=3.0), 2: Work(tokens=1.0)}) == {
        0: pytest.approx(0.75),
        2: pytest.approx(0.25),
    }
    assert clock.shares({}) == {}


@pytest.fixture
def config(tmp_path) -> EngineConfig:
    folder = make_tiny(tmp_path / "tiny", "llama", hidden=16, layers=1, heads=2)
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        layout="completion",
        cache_dir=tmp_path,
        kv_memory="4MiB",
        kernels="reference",
    )


SQL = "SELECT id FROM r WHERE AI.IF(PROMPT('Is it {0}?', body))"
BODIES = ["rain " * 30, "ship " * 40, "pier"]


def test_a_run_reports_it_once_rates_are_known(config, monkeypatch):
    with quail.Session(config) as session:
        session.register("r", {"id": [1, 2, 3], "body": BODIES})
        unknown = session.sql(SQL).run(progress=False).report
        assert unknown.speed_of_light is None
        assert "speed of light" not in str(unknown)
        assert not (config.cache_path / "rates").exists(), "a run measures nothing for it"
        monkeypatch.setattr(device, "known_rates", lambda *args: RATES)
        report = session.sql(SQL.replace("Is", "Was")).run(progress=False).report
    outline = read_outline(config.model, config.cache_path)
    shape = runner.shape_of(outline.config, element_bytes=4, weight_bytes=0)
    prompts = [report.tokens["naive"]]
    assert prompts == [report.tokens["computed"]]
    lengths = [len(outline.tokenizer.encode_plain([text])[0]) for text in BODIES]
    own = (report.tokens["computed"] - sum(lengths)) // 3
    pairs = sum((length + own) * (length + own + 1) / 2 for length in lengths)
    least = seconds(Work(tokens=report.tokens["computed"], pairs=pairs), shape, RATES).total
    assert report.speed_of_light == pytest.approx(least / report.seconds["run"], rel=1e-6)
    assert 0 < report.speed_of_light < 1
    assert "of the speed of light" in str(report)


@pytest.mark.parametrize("number", [1, 2])
def test_a_pass_that_did_not_fit_computed_nothing(config, monkeypatch, number):
    """What it was to compute is computed once, by the smaller passes behind it."""
    forward, count = PagedDecoder.forward, itertools.count(1)

    def short_of_memory(self, chunk):
        if next(count) == number:
            raise MemoryError
        return forward(self, chunk)

    monkeypatch.setattr(device, "known_rates", lambda *args: RATES)
    monkeypatch.setattr(PagedDecoder, "forward", short_of_memory)
    with quail.Session(replace(config, token_budget=200)) as session:
        session.register(
            "r", {"id": range(9), "body": [f"{body}{number}" for number in range(3) for body in BODIES]}
        )
        sql = SQL.replace("WHERE", "WHERE AI.SCORE(PROMPT('{0} How much?', body)) >= 0 AND")
        report = session.sql(sql.replace("Is it {0}", "{0} Is it")).run(progress=False).report
    assert any("did not fit into memory" in warning for warning in report.warnings)
    assert report.tokens["wasted"] > 0
    if number == 1:
        assert report.tokens["recomputed"] == 0
    assert 0 < report.speed_of_light <= 1


def test_stages_have_their_part_of_the_ledger_and_of_the_time(config):
    with quail.Session(config) as session:
        session.register("r", {"id": [1, 2, 3], "body": BODIES})
        sql = SQL.replace("WHERE", "WHERE AI.SCORE(PROMPT('How much? {0}', body)) >= 0 AND")
        report = session.sql(sql).run(progress=False).report
    assert [stage["tokens"]["naive"] > 0 for stage in report.stages] == [True, True]
    for kind, count in report.tokens.items():
        assert sum(stage["tokens"][kind] for stage in report.stages) == count
    assert sum(stage["seconds"] for stage in report.stages) == pytest.approx(report.seconds["forward"])


def test_rates_that_are_known_without_measuring(tmp_path, monkeypatch):
    cpu, cuda, kernels = torch.device("cpu"), torch.device("cuda"), plain_kernels()
    assert device.known_rates(cpu, torch.float32, tmp_path, kernels) is None
    monkeypatch.setattr(device, "measure_cpu", lambda dtype, kernels: RATES)
    device.rates_of(cpu, torch.float32, tmp_path, kernels)
    assert device.known_rates(cpu, torch.float32, tmp_path, kernels) == RATES
    assert device.known_rates(cpu, torch.bfloat16, tmp_path, kernels) is None
    names = {"NVIDIA H200": "H200", "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "Some Card 9": None}
    for name, key in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        for dtype in (torch.bfloat16, torch.float32):
            word = str(dtype).removeprefix("torch.")
            known = device.known_rates(cuda, dtype, tmp_path, kernels)
            assert known == (CARDS[key].rates(word) if key else None)
            assert device.rates_of(cuda, dtype, tmp_path, kernels) == (known or assumed_rates(word))
    assert device.known_rates(torch.device("mps"), torch.float32, tmp_path, kernels) is None


def test_several_runs_have_one_speed():
    def of(speed: float | None, run: float) -> Report:
        return Report(seconds={"run": run}, speed_of_light=speed, model="tiny")

    assert Report.total([of(0.5, 1.0), of(0.1, 3.0)]).speed_of_light == pytest.approx(0.2)
    assert Report.total([of(0.5, 1.0), of(None, 3.0)]).speed_of_light is None
    assert Report.total([Report(seconds={"total": 1.0})]).speed_of_light is None
