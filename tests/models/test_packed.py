"""Packed weights in the cache: mapped when whole and of the same kernels, packed again when not."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch

from quail.kernels.interface import Matrix
from quail.models import packed
from quail.models.loader import load_model
from quail.models.packed import MOST_FOLDERS, PackedMatrices
from tests.models.damages import cut, empty, flip_a_byte, garbage

NAMES = ("0.qkv", "0.down", "1.qkv", "1.down")


def made(name: str) -> Matrix:
    generator = torch.Generator().manual_seed(NAMES.index(name))
    data = torch.randint(-8191, 8191, (32, 10), dtype=torch.int32, generator=generator)
    return Matrix(data, 30, torch.rand(32, generator=generator))


def boot(cache: Path, layout: str = "int16-a", revision: str = "abc") -> tuple[dict[str, Matrix], list[str]]:
    """The matrices as a boot finds them, and which of them were packed now."""
    store = PackedMatrices(cache, revision, torch.bfloat16, layout)
    packed_now: list[str] = []

    def pack(name: str) -> Matrix:
        packed_now.append(name)
        return made(name)

    found = {name: store.matrix(name, lambda name=name: pack(name)) for name in NAMES}
    store.keep()
    return found, packed_now


def assert_right(found: dict[str, Matrix]) -> None:
    for name, matrix in found.items():
        expected = made(name)
        assert matrix.columns == expected.columns
        assert torch.equal(matrix.data, expected.data)
        assert matrix.scales is not None and torch.equal(matrix.scales, expected.scales)


def folder_of(cache: Path, layout: str = "int16-a") -> Path:
    return cache / "packed" / f"abc-bfloat16-{layout}"


def test_the_second_boot_maps_what_the_first_packed(tmp_path: Path) -> None:
    first, packed_first = boot(tmp_path)
    second, packed_second = boot(tmp_path)
    assert (packed_first, packed_second) == (list(NAMES), [])
    assert_right(first)
    assert_right(second)
    if sys.platform == "linux":
        assert str(folder_of(tmp_path) / "matrices.safetensors") in Path("/proc/self/maps").read_text()


def test_a_matrix_without_scales_is_kept_as_it_is(tmp_path: Path) -> None:
    for _ in range(2):
        store = PackedMatrices(tmp_path, "abc", torch.float32, "int8-x")
        matrix = store.matrix("0.out", lambda: Matrix(torch.arange(6, dtype=torch.int8).view(2, 3), 2))
        store.keep()
    assert matrix.scales is None and matrix.data.tolist() == [[0, 1, 2], [3, 4, 5]]


def other_columns(path: Path) -> None:
    path.write_text(path.read_text().replace(": 30", ": 3000"))


def old_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


FILES = ("matrices.safetensors", "about.json")
DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    *((name, damage) for name in FILES for damage in (cut, empty, garbage, flip_a_byte, Path.unlink)),
    ("about.json", other_columns),
    ("about.json", old_format),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_matrices_are_packed_again(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    boot(tmp_path)
    damage(folder_of(tmp_path) / name)
    again, packed_now = boot(tmp_path)
    assert packed_now == list(NAMES)
    assert_right(again)
    assert boot(tmp_path)[1] == []
    assert not list((tmp_path / "packed").glob(".*"))


def test_damage_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    boot(tmp_path)
    path = folder_of(tmp_path) / "matrices.safetensors"
    status = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert boot(tmp_path)[1] == list(NAMES)


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "packed").iterdir() if path.is_dir())


def test_other_kernels_never_read_them(tmp_path: Path) -> None:
    boot(tmp_path)
    assert boot(tmp_path, layout="int16-b")[1] == list(NAMES)
    assert kept(tmp_path) == ["abc-bfloat16-int16-a", "abc-bfloat16-int16-b"]
    for layout in ("int16-a", "int16-b"):  # two installations take turns
        assert boot(tmp_path, layout=layout)[1] == []


def test_those_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    for number in range(MOST_FOLDERS):
        boot(tmp_path, revision=f"model{number}")
        time.sleep(0.02)
    boot(tmp_path, revision="model0")
    time.sleep(0.02)
    boot(tmp_path, revision="new")
    wanted = ["model0", *(f"model{number}" for number in range(2, MOST_FOLDERS)), "new"]
    assert kept(tmp_path) == [f"{name}-bfloat16-int16-a" for name in wanted]
    assert boot(tmp_path, revision="model0")[1] == [], "used again, so kept"


def test_matrices_that_a_boot_lacks_are_added(tmp_path: Path) -> None:
    store = PackedMatrices(tmp_path, "abc", torch.bfloat16, "int16-a")
    store.matrix("0.qkv", lambda: made("0.qkv"))
    store.keep()
    found, packed_now = boot(tmp_path)
    assert packed_now == ["0.down", "1.qkv", "1.down"]
    assert_right(found)
    found, packed_now = boot(tmp_path)
    assert packed_now == []
    assert_right(found)


def test_kernels_without_a_layout_keep_nothing(tmp_path: Path) -> None:
    assert boot(tmp_path, layout="")[1] == boot(tmp_path, layout="")[1] == list(NAMES)
    assert not (tmp_path / "packed").exists()


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file in the way")
    for _ in range(2):
        found, packed_now = boot(tmp_path)
        assert packed_now == list(NAMES)
        assert_right(found)


def test_a_cache_that_can_only_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, refused)
    monkeypatch.setattr("tempfile.mkstemp", refused)
    found, packed_now = boot(tmp_path)
    assert packed_now == []
    assert_right(found)


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    assert_right(boot(tmp_path)[0])
    assert not folder_of(tmp_path).exists()


def test_no_room_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed, "write_safetensors", full)
    assert_right(boot(tmp_path)[0])
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] in ([], [".lock"])


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packed, "write_atomically", interrupted)
        with pytest.raises(KeyboardInterrupt):
            boot(tmp_path)
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] in ([], [".lock"])
    assert boot(tmp_path)[1] == list(NAMES)
    assert boot(tmp_path)[1] == []


def test_what_a_killed_process_left_behind_is_removed(tmp_path: Path) -> None:
    boot(tmp_path)
    folder = folder_of(tmp_path)
    for name in (".abc-bfloat16.new", ".abc-bfloat16.old"):
        shutil.copytree(folder, folder.with_name(name))
    shutil.rmtree(folder)
    assert boot(tmp_path)[1] == list(NAMES)
    assert boot(tmp_path)[1] == []
    assert not list((tmp_path / "packed").glob(".*"))


def test_a_process_does_not_wait_for_one_that_writes(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    with filelock.FileLock(tmp_path / "packed" / "abc-bfloat16.lock"):
        found, packed_now = boot(tmp_path)
        assert packed_now == list(NAMES)
        assert_right(found)
        assert not folder_of(tmp_path).exists()
    boot(tmp_path)
    assert boot(tmp_path)[1] == []


def test_an_engine_boots_from_them_with_the_same_answers(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = pytest.importorskip("quail.kernels.compiled")
    import quail
    from quail.kernels.choice import KernelChoice

    settings = {"model": str(tiny("llama")), "dtype": "bfloat16", "kv_memory": "16MiB", "answers": "off"}
    config = quail.EngineConfig(cache_dir=tmp_path, **settings)
    if not KernelChoice.of(config.kernels, "cpu", config.cache_path).multiplies:
        pytest.skip("no kernels that pack weights here")

    def scores() -> list[tuple[float, ...]]:
        with quail.Session(config) as session:
            session.register("t", {"id": [1, 2], "text": ["A fine film.", "A dull one."]})
            query = session.sql("SELECT id, AI.SCORE(PROMPT('Is it good? {0}', text)) FROM t ORDER BY id")
            return query.run(progress=False).fetchall()

    expected = scores()
    (folder,) = (path for path in (tmp_path / "packed").iterdir() if path.is_dir())
    revision = load_model(settings["model"], dtype=torch.bfloat16, cache_dir=tmp_path).revision
    assert re.match(rf"{revision}-bfloat16-(bfloat16|int16)-\w+$", folder.name)
    about = json.loads((folder / "about.json").read_text())
    assert {name.partition(".")[2] for name in about["columns"]} == {"qkv", "out", "gate_up", "down"}

    original, calls = compiled.PackedKernels._packed, []

    def counted(self: object, parts: list[torch.Tensor], *rest: object, **named: object) -> Matrix:
        calls.append(parts)
        return original(self, parts, *rest, **named)

    monkeypatch.setattr(compiled.PackedKernels, "_packed", counted)
    assert scores() == expected
    assert len(calls) <= 4, "only the self-check packs"
    flip_a_byte(folder / "matrices.safetensors")
    calls.clear()
    assert scores() == expected
    assert len(calls) > 4
