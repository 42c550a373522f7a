from __future__ import annotations

import re

import pytest

import quail
from quail.demo import QUESTIONS, example_path, run_demo
from quail.execution.runner import Engine
from tests.shell.stub import StubEngine


def test_the_demo_prints_plan_rows_score_and_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stub(StubEngine):
        def close(self) -> None:
            pass

    stub = Stub(lambda call, arguments: len(arguments[0]) % 2 == 0)
    monkeypatch.setattr(Engine, "boot", lambda config, progress=None, store=None: stub)
    run_demo(quail.EngineConfig(), num_reviews=40)
    out = capsys.readouterr().out
    for question in QUESTIONS:
        assert question.title in out
        assert question.statement in out
    assert out.count("rows right") == len(QUESTIONS)
    assert out.count("tokens: ") == len(QUESTIONS)
    assert out.count("ask call 0") == len(QUESTIONS)


def test_example_files_are_found_and_missing_ones_named() -> None:
    assert example_path("reviews.parquet").is_file()
    with pytest.raises(quail.QuailError, match="no example file 'nothing.parquet'"):
        example_path("nothing.parquet")


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_answers_of_the_default_model_are_worth_reading(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(quail.EngineConfig(dtype="float32"))
    shares = [int(share) for share in re.findall(r"rows right \((\d+)%\)", capsys.readouterr().out)]
    assert len(shares) == len(QUESTIONS)
    assert shares[0] >= 85
    assert min(shares) >= 80
