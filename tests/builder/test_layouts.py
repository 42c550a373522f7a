"""`quail layouts`: measures ways of asking on labelled rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quail
from quail import ConfigError, EngineConfig, PlanError, cli, layouts
from quail.execution.runner import Engine
from quail.layouts import Rows, area_under_roc, measure_layouts
from quail.plan.logical import AICall
from tests.shell.stub import StubEngine


class Model(StubEngine):
    """Knows praise by the word `good`, the better the longer its cue; in a chat it knows nothing."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(self.share)
        self.config = config
        self.calls: list[AICall] = []

    def share(self, call: AICall, texts: tuple[str, ...]) -> Any:
        self.calls.append(call)
        first = 0.5 if self.config.layout == "chat" else 0.9 if "good" in texts[0] else 0.2
        rest = (1 - first) / (len(call.categories) - 1)
        return [(c.label, rest if i else first) for i, c in enumerate(call.categories)]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def booted(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models that are loaded."""
    found: list[Model] = []

    def boot(config: EngineConfig, progress: Any = None, store: Any = None) -> Model:
        found.append(Model(config))
        return found[-1]

    monkeypatch.setattr(Engine, "boot", boot)
    return found


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.parquet"
    texts = ["so good", "very good", "bad", "poor", None, "not good"]
    praise = [True, True, False, False, True, None]
    source = ["a", "b", "c", "c", "a", "a"]
    pq.write_table(pa.table({"id": list("123456"), "text": texts, "praise": praise, "source": source}), path)
    return str(path)


def test_all_combinations_the_best_first(data: str, booted: list[Model]) -> None:
    found = measure_layouts(
        EngineConfig(), Rows(data, "praise"), cues=["Sentiment:", "{0} is"], answers=["good,bad", "yes,no"]
    )
    assert [(each.layout, each.cue, each.answers) for each in found[:4]] == [
        ("completion", "{0}\n\nSentiment:", "good,bad"),
        ("completion", "{0}\n\nSentiment:", "yes,no"),
        ("completion", "{0} is", "good,bad"),
        ("completion", "{0} is", "yes,no"),
    ]
    assert [(each.accuracy, each.area, each.rows) for each in found] == [(1, 1, 4)] * 4 + [(0.5, 0.5, 4)] * 4
    assert [model.config.layout for model in booted] == ["completion", "chat"]
    assert sorted(texts for _, texts in booted[0].asked)[:4] == [("bad",)] * 4


def test_several_labels(data: str) -> None:
    (found,) = measure_layouts(
        EngineConfig(), Rows(data, "source"), layouts=["completion"], cues=["It is"], answers=["x=c,y=a,z=b"]
    )
    assert (found.answers, found.rows) == ("x,y,z", 5)
    assert found.accuracy < 0.5


def test_words_by_default(data: str) -> None:
    found = measure_layouts(EngineConfig(), Rows(data, "praise"), layouts=["completion"])
    assert {each.answers for each in found} == {"TRUE,FALSE", "true,false", "yes,no"}
    assert {each.cue for each in found} == {
        "{0}\n\nPraise:", "{0}\n\nIs this praise?", "{0}\n\nThis text is",
    }  # fmt: skip
    found = measure_layouts(EngineConfig(), Rows(data, "source", num_rows=99), layouts=["completion"])
    assert {each.answers for each in found} == {"a,b,c"}


def test_the_choice_of_rows_follows_the_seed(data: str) -> None:
    def texts(seed: int) -> list[str]:
        with quail.Session() as session:
            session.register("labelled", data)
            return layouts._chosen(session, Rows(data, "praise", num_rows=3, seed=seed))[0]

    assert texts(1) == texts(1)
    assert len({tuple(texts(seed)) for seed in range(9)}) > 1
    assert None not in texts(1)


def test_a_model_without_a_chat_template(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def boot(config: EngineConfig, progress: Any = None, store: Any = None) -> Model:
        if config.layout == "chat":
            raise PlanError("layout = 'chat', but the model has no chat template")
        return Model(config)

    monkeypatch.setattr(Engine, "boot", boot)
    found = measure_layouts(EngineConfig(), Rows(data, "praise"))
    assert {each.layout for each in found} == {"completion"}
    with pytest.raises(PlanError, match="no chat template"):
        measure_layouts(EngineConfig(), Rows(data, "praise"), layouts=["chat"])


@pytest.mark.parametrize(
    ("rows", "answers", "message"),
    [
        ({"label": "prase"}, None, "no column 'prase'\n.*Did you mean 'praise'"),
        ({"label": "praise", "text": "bdy"}, None, "no column 'bdy'"),
        ({"label": "text"}, None, "which column of .* is the document: id, source"),
        ({"label": "praise"}, "yes", "not two or more words"),
        ({"label": "praise"}, "yes,yes", "not two or more words"),
        ({"label": "source"}, "x=q,y=a", "no row has the label 'q'"),
    ],
)
def test_mistakes(data: str, rows: dict[str, str], answers: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        measure_layouts(EngineConfig(), Rows(data, **rows), answers=[answers] if answers else ())


def test_area_under_roc() -> None:
    rng = np.random.default_rng(3)
    scores, truth = rng.integers(0, 6, 60) / 5, rng.random(60) < 0.4
    pairs = [(p, n) for p in scores[truth] for n in scores[~truth]]
    by_hand = sum((p > n) + (p == n) / 2 for p, n in pairs) / len(pairs)
    assert area_under_roc(scores, truth) == pytest.approx(by_hand)
    assert np.isnan(area_under_roc(scores, np.ones(60, dtype=bool)))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["quail", "layouts", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_the_command(data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data, "--label", "praise", "--cue", r"{0}\n\nMood:", "--answers", "good,bad")
    assert not run(monkeypatch, *arguments)
    shown = capsys.readouterr().out
    assert r"{0}\n\nMood:" in shown
    assert "1.000" in shown
    assert not run(monkeypatch, *arguments, "--format", "json", "--layout", "completion")
    (record,) = json.loads(capsys.readouterr().out)
    assert record == {
        "layout": "completion", "cue": "{0}\n\nMood:", "answers": "good,bad", "accuracy": 1.0, "area": 1.0, "rows": 4,
    }  # fmt: skip
    assert run(monkeypatch, *arguments, "--layout", "prose") == 1
    assert "layout = 'prose'" in capsys.readouterr().err
