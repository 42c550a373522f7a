"""The profile of a run adds up, tells every operator, and leaves the engine as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quail
from benchmarks import profile
from benchmarks.filters import product_share
from quail.config import EngineConfig
from quail.execution.runner import Engine
from tests.models.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def settings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MODEL": folder, "LAYOUT": "completion", "CACHE_DIR": tmp_path, "KV_MEMORY": "64MiB"}
    for setting, value in values.items():
        monkeypatch.setenv(f"QUAIL_{setting}", str(value))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_every_operator_is_told_and_the_seconds_add_up(
    kernels: str, settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUAIL_KERNELS", kernels)
    first, further, join = profile.measure(4, 40, 3, 1)
    for each in (first, further, join):
        assert sum(each.operators.values()) == pytest.approx(each.seconds)
        assert all(seconds > 0 for seconds in each.operators.values()), each.operators
        layers = each.calls["down"] // each.passes
        assert {each.calls[name] for name in profile.PRODUCTS} == {layers * each.passes}
        assert each.calls["norm"] == 2 * each.calls["attention"] == 2 * each.calls["rotate"]
    assert further.computed < first.computed / 2, "the further question finds the documents' KV"
    written = profile.tables_of([first, further, join])
    assert all(meaning in written for meaning in profile.MEANINGS.values())


def test_products_count_their_operations(settings: None) -> None:
    config = EngineConfig(answers="off")
    engine = Engine.boot(config)
    shape = engine.model.decoder.config  # type: ignore[attr-defined]
    with quail.Session(config, engine=engine) as session:
        session.register("docs", {"id": [0, 1], "text": ["A fine film.", "A dull one."]})
        found = profile.profiled(engine, session, "first", profile.FIRST)
    rows, hidden, inner = found.computed, shape.hidden_size, shape.intermediate_size
    rows_of_layers = rows * (shape.num_layers - 1) + 2  # of the last one only those that are read
    assert found.operations["down"] == 2 * rows_of_layers * hidden * inner
    assert found.operations["gate_up"] == 2 * found.operations["down"]
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    assert found.operations["qkv"] == 2 * rows * hidden * heads * shape.num_layers


def test_the_clocks_are_taken_off_whatever_happens(settings: None) -> None:
    config = EngineConfig(answers="off")
    engine = Engine.boot(config)
    model, kernels = engine.model, engine.model.decoder.kernels  # type: ignore[attr-defined]
    with quail.Session(config, engine=engine) as session:
        session.register("docs", {"id": [0], "text": ["A fine film."]})
        plain = session.sql(profile.FIRST).run(progress=False).fetchall()
        with profile.clocked(engine) as clocks:
            assert session.sql(profile.FIRST).run(progress=False).fetchall() == plain
        assert clocks.seconds["attention"] > 0
        with pytest.raises(RuntimeError, match="stop"), profile.clocked(engine):
            raise RuntimeError("stop")
    assert engine.model is model and model.decoder.kernels is kernels  # type: ignore[attr-defined]


class WaitingKernels:
    """Kernels that do everything at the end of `fused`, a norm in a third of the time of a rotation."""

    fused_seconds = (1.0, 3.0)

    @contextmanager
    def fused(self) -> Iterator[None]:
        yield
        time.sleep(0.04)

    def norm(self) -> None: ...

    def rotate(self) -> None: ...


def test_the_time_of_fused_steps_is_shared_out() -> None:
    clocks = profile.Clocks()
    kernels = profile.TimedKernels(WaitingKernels(), {}, clocks)  # type: ignore[arg-type]
    for _ in range(2):
        with kernels.fused():
            kernels.norm()
            kernels.rotate()
    assert clocks.seconds["norm"] == pytest.approx(0.02, abs=0.01)
    assert clocks.seconds["rotate"] == pytest.approx(0.06, abs=0.02)
    assert clocks.calls["norm"] == clocks.calls["rotate"] == 2


def test_the_share_of_products_counts_those_that_wait(settings: None) -> None:
    engine = Engine.boot(EngineConfig(answers="off"))
    share = product_share(engine, ["A fine film. " * 20] * 3)
    assert 0.05 < share < 1
