"""The same prompts for all engines: what the statements ask is what the token ids say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import curves
from benchmarks.peers.engines import ADAPTERS, ROOT
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.rounds import compared, run_documents, run_statements
from benchmarks.peers.tokens import Compiler, Document, Step, readout_ids
from benchmarks.peers.weights import hf_config
from benchmarks.peers.workloads import LENGTHS, WORKLOADS, Sizes
from quail.config import EngineConfig
from quail.models.config import config_from_hf
from tests.models.tiny import make_tiny

MODEL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 2**14}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=2, **MODEL)


@pytest.fixture(scope="module")
def compiler(folder, tmp_path_factory) -> Compiler:
    return Compiler(
        EngineConfig(model=str(folder), layout="completion", cache_dir=tmp_path_factory.mktemp("cache"))
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_well_made(name: str, compiler: Compiler) -> None:
    workload = WORKLOADS[name](compiler, Sizes(8))
    steps = sorted(step for part in workload.parts for step in part.steps)
    assert steps == list(range(len(workload.readouts)))
    assert len(workload.documents) == len(workload.tables["docs"]["text"])
    for document in workload.documents:
        assert 1 <= len(document.steps) <= len(steps)
    for readout in workload.readouts:
        tokens = [token for ids in readout for token in ids]
        assert len(readout) >= 2 and len(tokens) == len(set(tokens)), "an id belongs to one answer"


def test_documents_have_the_lengths_that_the_titles_say(compiler: Compiler) -> None:
    chain = WORKLOADS["chain"](compiler, Sizes(6))
    assert {len(document.ids) for document in chain.documents} == {300}
    assert [len(document.steps) for document in chain.documents] == [3, 1, 3, 1, 3, 1]
    mixed = WORKLOADS["mixed"](compiler, Sizes(32))
    lengths = [len(document.ids) for document in mixed.documents]
    assert sorted(lengths) == np.geomspace(*LENGTHS, 8).astype(int).tolist()
    assert lengths != sorted(lengths)


def test_texts_run_out_with_a_word(compiler: Compiler) -> None:
    with pytest.raises(ValueError, match="give 1 texts of these lengths, not 2"):
        compiler.texts_of_tokens(["x" * 1000], [500, 10_000])


def test_labels_that_one_row_cannot_tell_apart_are_refused(compiler: Compiler) -> None:
    sql = "SELECT AI.CLASSIFY(text, ['New York', 'New Jersey']) FROM docs"
    (stage,) = compiler.stages(sql, {"docs": {"text": ["a"]}})
    with pytest.raises(ValueError, match="more than one row"):
        readout_ids(stage)


def test_tokens_of_a_document_are_counted() -> None:
    document = Document([1, 2, 3], [Step([], [[4]]), Step([5, 6], [[7], [8, 9]])])
    assert document.prompt_tokens([0]) == 4
    assert document.prompt_tokens([0, 1]) == 4 + 6 + 7
    assert document.num_prompts([1]) == 2
    assert document.num_prompts([2]) == 0


@pytest.mark.slow
def test_two_real_engines_are_asked_the_same_and_say_the_same(
    folder: Path, compiler: Compiler, tmp_path: Path
) -> None:
    """Quail and transformers behind the protocol, on a tiny model."""
    found = {}
    boot = {
        "do": "boot",
        "folder": str(folder),
        "dtype": "float32",
        "threads": 1,
        "kv_gib": 1,
        "prompt": [5, 6, 7],
        "answers": [1, 2],
    }
    environment = {
        "PYTHONPATH": str(ROOT),
        "QUAIL_MODEL": str(folder),
        "QUAIL_LAYOUT": "completion",
        "QUAIL_CACHE_DIR": str(tmp_path),
        "QUAIL_PREFIX_SHARING": "on",
    }
    workloads = [WORKLOADS[name](compiler, Sizes(4)) for name in ("chain", "filter_join", "classify")]
    for name in ("quail", "transformers"):
        command = [sys.executable, str(ADAPTERS / f"run_{name}.py")]
        process = PeerProcess(name, command, tmp_path / f"{name}.log", environment)
        try:
            assert name in process.ask(boot, timeout_seconds=120)["engine"].lower()
            for workload in workloads:
                process.ask({"do": "forget"}, timeout_seconds=60)
                if name == "quail":
                    found[workload.name] = {name: run_statements(name, process, workload, 0)}
                else:
                    done = run_documents(name, process, workload, workload.documents, 0)
                    found[workload.name][name] = done
        finally:
            process.close()
    for answered in found.values():
        for run in compared(answered):
            if run.engine == "transformers":
                assert run.compared > 0
                assert run.equal == run.compared, f"{run.part}: {run.equal} of {run.compared}"
    chain = {run.part: run for run in found["chain"]["quail"].runs}
    assert chain["chain"].computed_tokens < chain["chain"].prompt_tokens
    assert chain["second"].computed_tokens < 0.5 * chain["second"].prompt_tokens


def test_the_written_configuration_is_read_as_the_same_model(folder: Path) -> None:
    import json

    config = config_from_hf(json.loads((folder / "config.json").read_text()), "tiny")
    assert config_from_hf(hf_config(config, "float32"), "written") == config


@pytest.mark.parametrize("name", ["predicates", "partners"])
def test_a_curve_is_measured(name: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    settings = {"MODEL": folder, "LAYOUT": "completion", "CACHE_DIR": tmp_path, "KV_MEMORY": "64MiB"}
    for setting, value in settings.items():
        monkeypatch.setenv(f"QUAIL_{setting}", str(value))
    points = curves.measure([name], 1)
    assert [point.size for point in points] == sorted({point.size for point in points})
    growth = [point.computed / point.naive for point in points]
    assert growth == sorted(growth, reverse=True) and growth[-1] < 0.5, "more questions, more reuse"
