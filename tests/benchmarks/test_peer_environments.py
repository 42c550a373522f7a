"""Environments of peers: made once, made anew when versions change, a failure told in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.peers import environments
from benchmarks.peers.engines import ADAPTERS, ENGINES
from benchmarks.peers.environments import CannotInstall, build_options, last_line, processor_flags, ready


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Commands in place of venv and pip; a venv makes its python."""
    made: list[list[str]] = []

    def call(command, log, name, environment=None):
        made.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "thing.txt").write_text("thing==1\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    monkeypatch.setattr(environments, "_call", call)
    return made


def make(tmp_path: Path) -> Path:
    return ready("thing", tmp_path / "cache", say=lambda words: None)


def test_an_environment_is_made_once_and_anew_for_other_versions(calls, tmp_path: Path) -> None:
    python = make(tmp_path)
    assert python == tmp_path / "cache" / "peers" / "thing" / "bin" / "python"
    assert len(calls) == 2 and "--no-deps" in calls[1]
    make(tmp_path)
    assert len(calls) == 2
    (tmp_path / "requirements" / "thing.txt").write_text("thing==2\n")
    make(tmp_path)
    assert len(calls) == 4


def test_one_that_failed_is_tried_again(calls, tmp_path: Path, monkeypatch) -> None:
    def fail(command, log, name, environment=None):
        raise CannotInstall("no")

    works = environments._call
    monkeypatch.setattr(environments, "_call", fail)
    with pytest.raises(CannotInstall):
        make(tmp_path)
    monkeypatch.setattr(environments, "_call", works)
    make(tmp_path)
    assert len(calls) == 2


def test_a_failure_says_why_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    command = ["sh", "-c", "echo 'ERROR: no such package'; echo later; exit 1"]
    with pytest.raises(CannotInstall, match=r"^x cannot be installed: ERROR: no such package \(all of it in"):
        environments._call(command, log, "x")
    assert last_line(tmp_path / "none.log") == "no word of why"


def test_the_build_takes_what_the_processor_has(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : x\nflags : fpu avx2 avx512f amx_bf16\n")
    made = build_options(processor_flags(cpuinfo))
    assert made == "-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=ON"
    assert build_options(processor_flags(tmp_path / "none")) == "-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON"


def test_every_version_is_pinned() -> None:
    for path in sorted(environments.REQUIREMENTS.glob("*.txt")):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines and all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", line) for line in lines), path.name


def test_every_engine_has_its_adapter_and_requirements() -> None:
    for spec in ENGINES.values():
        assert spec.script.is_file() and spec.script.parent == ADAPTERS
        assert (environments.REQUIREMENTS / f"{spec.name}.txt").is_file() == spec.has_environment
