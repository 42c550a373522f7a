"""Values that cannot be used are named at once, in Quail's own errors."""

from __future__ import annotations

from typing import Any

import pytest

import quail


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_memory": "9" * 5000},
        {"kv_memory": 10**30},
        {"threads": 100_000},
        {"threads": 2**40},
        {"cache_dir": ""},
        {"cache_dir": "\0"},
        {"cache_dir": "\ud800"},
        {"label": "a\ud800b"},
    ],
)
def test_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(quail.ConfigError, match=next(iter(settings))):
        quail.EngineConfig(**settings)


@pytest.mark.parametrize(
    "parameters",
    [["\ud800"], ["a\ud800"], [object()], [10**40], 5, "x", b"x"],
    ids=lambda value: repr(value)[:20],
)
def test_parameters(parameters: Any) -> None:
    with quail.Session() as session, pytest.raises(quail.BindError, match="parameter"):
        session.sql("SELECT ? AS x", parameters)


@pytest.mark.parametrize("parameter", [None, "a\0b", "", 2**100, {"a": [1]}])
def test_parameters_that_are_values(parameter: Any) -> None:
    with quail.Session() as session:
        assert session.sql("SELECT ? AS x", [parameter]).run().fetchall() == [(parameter,)]


def test_messages_can_be_printed_whatever_they_quote() -> None:
    with quail.Session() as session, pytest.raises(quail.BindError) as caught:
        session.sql("SELECT '\ud800'")
    assert r"\ud800" in str(caught.value).encode("utf-8").decode()


@pytest.mark.parametrize("labels", ["'a', 'a'", "'a', 'b', 'A'", "'one label', 'one label'"])
def test_labels_that_are_the_same(labels: str) -> None:
    with quail.Session() as session:
        session.register("docs", [{"text": "x"}])
        with pytest.raises(quail.BindError, match="are the same"):
            session.sql(f"SELECT AI.CLASSIFY(text, [{labels}]) FROM docs")


def test_an_option_given_twice() -> None:
    with quail.Session() as session:
        session.register("docs", [{"text": "x"}])
        with pytest.raises(quail.BindError, match="option threshold stands twice"):
            session.sql("SELECT AI.IF('a' || text, threshold := 0.5, THRESHOLD := 0.6) FROM docs")
