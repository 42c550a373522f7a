"""Converted weights in the cache: mapped when whole, built again when not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from quail.errors import ModelError
from quail.models import converted
from quail.models.files import DigestIndex, sha256_of_file
from quail.models.loader import LoadedModel, load_model
from tests.models.damages import cut, empty, flip_a_byte, garbage
from tests.models.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]


def load(path: Path, cache: Path, dtype: torch.dtype = torch.float32) -> tuple[LoadedModel, bool]:
    """The model, and whether it was converted now."""
    said: list[str] = []
    model = load_model(str(path), dtype=dtype, cache_dir=cache, progress=said.append)
    return model, any("converting" in line for line in said)


@pytest.fixture
def gguf_file(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    kind = gguf.GGMLQuantizationType.Q8_0
    return write_gguf(tiny("llama"), tmp_path / "model.gguf", types={"ffn_up.weight": kind})


def folder_of(cache: Path) -> Path:
    (folder,) = (path for path in (cache / "converted").iterdir() if path.is_dir())
    return folder


def assert_same(found: LoadedModel, expected: LoadedModel) -> None:
    assert found.config == expected.config
    assert found.revision == expected.revision
    assert found.chat == expected.chat
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(found.weights[name], tensor)
    text = "Hello <|im_end|> 27"
    assert (
        found.tokenizer.encode_plain([text])[0].tolist()
        == expected.tokenizer.encode_plain([text])[0].tolist()
    )
    assert found.tokenizer.encode_control(text) == expected.tokenizer.encode_control(text)
    assert found.tokenizer.bos_ids == expected.tokenizer.bos_ids


def test_the_second_load_maps_what_the_first_converted(gguf_file: Path, tmp_path: Path) -> None:
    first, converted_first = load(gguf_file, tmp_path)
    second, converted_second = load(gguf_file, tmp_path)
    assert (converted_first, converted_second) == (True, False)
    assert_same(second, first)
    names = sorted(path.name for path in folder_of(tmp_path).iterdir())
    assert names == ["model.json", "tokenizer.json", "weights.safetensors"]
    assert first.revision == sha256_of_file(gguf_file)
    assert folder_of(tmp_path).name == f"{first.revision}-float32"


def test_each_dtype_and_each_content_has_its_own(gguf_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(gguf_file, cache)
    assert load(gguf_file, cache, torch.bfloat16)[1]
    shutil.copy(gguf_file, tmp_path / "same.gguf")
    assert not load(tmp_path / "same.gguf", cache)[1]
    assert not load(gguf_file, cache, torch.bfloat16)[1]
    assert len([path for path in (cache / "converted").iterdir() if path.is_dir()]) == 2


def test_a_folder_in_the_wanted_dtype_is_mapped_without_conversion(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    assert not load(tiny("llama"), tmp_path)[1]
    assert not (tmp_path / "converted").exists()
    assert load(tiny("llama"), tmp_path, torch.bfloat16)[1]
    assert not load(tiny("llama"), tmp_path, torch.bfloat16)[1]


def edit_config(path: Path) -> None:
    fields = json.loads(path.read_text())
    fields["config"]["num_heads"] = 3
    path.write_text(json.dumps(fields))


def old_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    *(
        (name, damage)
        for name in ("weights.safetensors", "tokenizer.json", "model.json")
        for damage in (cut, empty)
    ),
    *((name, Path.unlink) for name in ("weights.safetensors", "tokenizer.json", "model.json")),
    ("weights.safetensors", flip_a_byte),
    ("tokenizer.json", flip_a_byte),
    ("weights.safetensors", garbage),
    ("model.json", garbage),
    ("model.json", edit_config),
    ("model.json", old_format),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_conversion_is_built_again(
    name: str, damage: Callable[[Path], None], gguf_file: Path, tmp_path: Path
) -> None:
    first, _ = load(gguf_file, tmp_path)
    expected = {key: tensor.clone() for key, tensor in first.weights.items()}
    damage(folder_of(tmp_path) / name)
    again, was_converted = load(gguf_file, tmp_path)
    assert was_converted
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in expected.items())
    assert not load(gguf_file, tmp_path)[1]
    assert not list((tmp_path / "converted").glob(".*"))


def test_a_damaged_digest_index_costs_time_only(gguf_file: Path, tmp_path: Path) -> None:
    load(gguf_file, tmp_path)
    for content in (b"", b"{", b"[]", b'{"x": 1}', json.dumps({str(gguf_file): {"stamp": 1}}).encode()):
        (tmp_path / "digests.json").write_bytes(content)
        assert not load(gguf_file, tmp_path)[1]


def test_big_files_are_digested_once(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(gguf_file, tmp_path)
    monkeypatch.setattr(
        "quail.models.files.sha256_of_file", lambda path: pytest.fail(f"{path} was read again")
    )
    assert not load(gguf_file, tmp_path)[1]


def test_a_changed_source_of_the_same_size_is_noticed(gguf_file: Path, tmp_path: Path) -> None:
    first, _ = load(gguf_file, tmp_path)
    status = gguf_file.stat()
    flip_a_byte(gguf_file)
    os.utime(gguf_file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as some tools restore it
    second, was_converted = load(gguf_file, tmp_path)
    assert was_converted
    assert second.revision != first.revision


def test_an_interrupted_conversion_leaves_nothing(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quail.models.gguf.read_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(gguf_file, tmp_path)
    assert [path.suffix for path in (tmp_path / "converted").iterdir()] in ([], [".lock"])
    assert load(gguf_file, tmp_path)[1]


def test_what_a_killed_conversion_left_behind_is_removed(gguf_file: Path, tmp_path: Path) -> None:
    model, _ = load(gguf_file, tmp_path)
    folder = folder_of(tmp_path)
    shutil.copytree(folder, folder.with_name(f".{folder.name}.new"))
    folder.rename(folder.with_name(f".{folder.name}.old"))
    again, was_converted = load(gguf_file, tmp_path)
    assert was_converted
    assert_same(again, model)
    assert not list((tmp_path / "converted").glob(".*"))


def test_without_room_the_model_still_loads(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = load(gguf_file, tmp_path / "a")

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converted, "write_safetensors", full)
    said: list[str] = []
    found = load_model(str(gguf_file), dtype=torch.float32, cache_dir=tmp_path / "b", progress=said.append)
    assert_same(found, expected)
    assert any("cannot be kept (No space left on device)" in line for line in said)


def test_a_cache_folder_that_cannot_be_made_is_named(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cache folder .* cannot be written"):
        load(gguf_file, tmp_path / "file" / "cache")


WARM = """
import sys, torch
from pathlib import Path
from quail.models.loader import load_model
model = load_model(sys.argv[1], dtype=torch.float32, cache_dir=Path(sys.argv[2]))
model.tokenizer.encode_plain(["text"])
heavy = {"transformers", "gguf", "huggingface_hub", "datasets"} & set(sys.modules)
print(sorted(heavy), model.revision)
"""


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_warm_boot_imports_neither_transformers_nor_gguf(gguf_file: Path, tmp_path: Path) -> None:
    model, _ = load(gguf_file, tmp_path)
    output, errors = run_python(WARM, gguf_file, tmp_path).communicate(timeout=120)
    assert output.split() == ["[]", model.revision], errors


def test_processes_that_convert_at_once_agree(gguf_file: Path, tmp_path: Path) -> None:
    running = [run_python(WARM, gguf_file, tmp_path / "cache") for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert not load(gguf_file, tmp_path / "cache")[1]


def test_weights_are_mapped_not_read(gguf_file: Path, tmp_path: Path) -> None:
    load(gguf_file, tmp_path)
    model, _ = load(gguf_file, tmp_path)
    path = folder_of(tmp_path) / "weights.safetensors"
    if sys.platform == "linux":
        assert str(path) in Path("/proc/self/maps").read_text()
    assert model.weights["model.embed_tokens.weight"].data_ptr() % 64 == 0


class TestDigestIndex:
    def test_entries_of_other_processes_are_kept(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).write_text(name)
        one, two = DigestIndex(tmp_path / "i.json"), DigestIndex(tmp_path / "i.json")
        one.sha256(tmp_path / "a")
        two.sha256(tmp_path / "b")
        assert len(json.loads((tmp_path / "i.json").read_text())) == 2

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="nowhere: cannot be read"):
            DigestIndex(tmp_path / "i.json").sha256(tmp_path / "nowhere")

    def test_an_index_that_cannot_be_written_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a")
        (tmp_path / "file").write_text("")
        index = DigestIndex(tmp_path / "file" / "i.json")
        assert index.sha256(tmp_path / "a") == sha256_of_file(tmp_path / "a")
        assert not index.is_finite(tmp_path / "a")
        index.mark_finite(tmp_path / "a")
        assert index.is_finite(tmp_path / "a")
