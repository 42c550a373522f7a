from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from quail.config import EngineConfig, parse_bytes
from quail.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in fields(EngineConfig):
        monkeypatch.delenv(each.metadata["environment"], raising=False)


def test_defaults() -> None:
    config = EngineConfig()
    assert (config.model, config.device, config.dtype, config.layout) == (
        "smollm2-135m",
        "auto",
        "auto",
        "auto",
    )
    assert config.kv_memory_bytes is None
    assert config.cache_path.name == "quail"


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().model = "other"  # type: ignore[misc]


def test_every_field_is_documented_with_its_variable() -> None:
    for each in fields(EngineConfig):
        assert f"{each.name}:" in EngineConfig.__doc__
        assert each.metadata["environment"] in EngineConfig.__doc__
        assert each.metadata["environment"] == f"QUAIL_{each.name.upper()}"


def test_environment_gives_defaults_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAIL_DEVICE", "cpu")
    monkeypatch.setenv("QUAIL_TOKEN_BUDGET", "512")
    monkeypatch.setenv("QUAIL_KV_MEMORY", "1GiB")
    monkeypatch.setenv("QUAIL_CACHE_DIR", "/somewhere")
    config = EngineConfig()
    assert (config.device, config.token_budget, config.kv_memory_bytes) == ("cpu", 512, 2**30)
    assert config.cache_path == Path("/somewhere")
    assert EngineConfig(token_budget=64).token_budget == 64


def test_empty_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAIL_DEVICE", "")
    assert EngineConfig().device == "auto"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("QUAIL_DEVICE", "gpu", r"device = 'gpu' is not one of .*'cuda'.* \(from QUAIL_DEVICE\)"),
        ("QUAIL_THREADS", "many", "environment variable QUAIL_THREADS = 'many' is not a whole number"),
        ("QUAIL_KV_MEMORY", "lots", r"kv_memory = 'lots' is not a size in bytes \(from QUAIL_KV_MEMORY\)"),
    ],
)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        EngineConfig()


def test_an_argument_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAIL_DEVICE", "cpu")
    with pytest.raises(ConfigError, match="device = 'gpu'") as caught:
        EngineConfig(device="gpu")
    assert "QUAIL_DEVICE" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "cdua", "Did you mean 'cuda'?"),
        ("dtype", "float16", "'bfloat16'"),
        ("layout", "Chat", "Did you mean 'chat'?"),
        ("model", " ", "not empty"),
        ("model", None, "must be text"),
        ("kv_memory", "2 Gibs", "2GiB"),
        ("kv_memory", 0, "more than 0"),
        ("kv_memory", True, "not a size"),
        ("token_budget", 8, "at least 16"),
        ("token_budget", 64.5, "whole number of tokens"),
        ("threads", 0, "at least 1"),
        ("threads", True, "whole number of threads"),
        ("cache_dir", 3, "must be a path"),
    ],
)
def test_refuses_what_cannot_be_used(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("2KiB", 2048), ("1.5 MB", 1_500_000), ("3g", 3 * 2**30), (" 7 b ", 7), (12, 12)],
)
def test_parse_bytes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 XB", "inf", "0"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
