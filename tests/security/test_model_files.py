"""Model files are data: no pickle is read, no code of a model runs, no folder reaches beyond itself."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from quail.errors import ModelError
from quail.models.loader import load_model
from quail.models.registry import info, resolve_local
from tests.models.tiny import make_tiny


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.link, (__file__, str(self.mark))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama", shard_bytes=100_000)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(path: Path, tmp_path: Path) -> None:
    load_model(str(path), dtype=torch.float32, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("ending", [".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".BIN"])
def test_pickles_are_refused_by_name(ending: str, folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    alone = tmp_path / f"pytorch_model{ending}"
    alone.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelError, match="pickle, which can run code") as caught:
        load(alone, tmp_path)
    assert "safe_serialization=True" in str(caught.value)
    for look in (info, resolve_local):
        with pytest.raises(ModelError, match="pickle"):
            look(str(alone), tmp_path)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shutil.copy(alone, folder / alone.name)
    with pytest.raises(ModelError, match=f"{alone.name} is a pickle"):
        load(folder, tmp_path)
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_ignored(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    load(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_another_name_is_no_model(folder: Path, tmp_path: Path) -> None:
    content = pickle.dumps(Bomb(tmp_path / "ran"))
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        load(tmp_path / "model.gguf", tmp_path)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(content)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_one_file_of_a_folder_is_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="one file of a model") as caught:
        load(next(folder.glob("*.safetensors")), tmp_path)
    assert "name its folder" in str(caught.value)


def test_code_of_a_model_never_runs(folder: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        fields["auto_map"] = {
            "AutoModelForCausalLM": "modeling_evil.Evil",
            "AutoTokenizer": ["tokenization_evil.T", None],
        }
        fields["trust_remote_code"] = True
        (folder / name).write_text(json.dumps(fields))
    load(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "a/../b.safetensors", "..", "", "x\0.safetensors"]
)
def test_an_index_that_names_paths_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no safetensors file of this folder|is missing"):
        load(folder, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json", "weights"],
)
def test_links_out_of_the_folder_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    path = next(folder.glob("*.safetensors")) if name == "weights" else folder / name
    outside = Path(shutil.move(path, tmp_path / "outside"))
    path.symlink_to(outside)
    with pytest.raises(ModelError, match="links to .*outside, outside the model's folder"):
        load(folder, tmp_path)
    path.unlink()
    shutil.move(outside, folder / "real.bin")
    path.symlink_to("real.bin")
    load(folder, tmp_path)


def test_files_that_are_too_large_are_not_read(folder: Path, tmp_path: Path) -> None:
    for name, size in (
        ("config.json", 2**24 + 1),
        ("tokenizer.json", 2**26 + 1),
        ("chat_template.jinja", 2**24 + 1),
    ):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(size)
        with pytest.raises(ModelError, match="bytes are too many"):
            load(folder, tmp_path)
        path.unlink() if before is None else path.write_bytes(before)
