"""Native kernels are optional: what is missing is told, and nothing is compiled twice."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quail.errors import ConfigError
from quail.kernels import build
from quail.kernels.build import Build, Unavailable, level_of
from quail.kernels.choice import KernelChoice
from quail.kernels.reference import TorchKernels

AVX2 = "flags : fma avx2 f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


@pytest.fixture(autouse=True)
def _in_its_own_cache(monkeypatch):
    monkeypatch.delenv("QUAIL_KERNELS_DIR", raising=False)
    monkeypatch.delenv("QUAIL_KERNELS_LEVEL", raising=False)


def test_another_folder_may_keep_the_libraries(tmp_path, monkeypatch):
    try:
        beside = Build.here(tmp_path).path
    except Unavailable as missing:
        pytest.skip(str(missing))
    assert beside.parent == tmp_path / "kernels"
    monkeypatch.setenv("QUAIL_KERNELS_DIR", str(tmp_path / "shared"))
    assert Build.here(tmp_path).path == tmp_path / "shared" / beside.name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (AVX2, "AVX2"),
        (AVX512, "AVX-512"),
        (f"{AVX512} avx512_vnni amx_tile", "AVX-512 VNNI"),
        (f"{AVX2} avx512f", "AVX2"),
    ],
)
def test_the_best_level_of_a_processor(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert level_of(tmp_path / "cpuinfo").name == expected


@pytest.mark.parametrize(
    ("machine", "flags", "reason"),
    [
        ("aarch64", "Features : fp asimd", "the processor is aarch64, not x86-64"),
        ("x86_64", "flags : sse2", "no AVX2"),
        ("x86_64", None, "cannot be read"),
    ],
)
def test_an_unknown_processor_is_told(tmp_path, monkeypatch, machine, flags, reason):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(flags)
    with pytest.raises(Unavailable, match=reason):
        level_of(tmp_path / "cpuinfo")


@pytest.mark.parametrize(
    ("best", "expected"), [("avx2", "AVX2"), ("AVX-512", "AVX-512"), ("", "AVX-512 VNNI")]
)
def test_a_lesser_level_can_be_asked_for(tmp_path, monkeypatch, best, expected):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("QUAIL_KERNELS_LEVEL", best)
    (tmp_path / "cpuinfo").write_text(f"flags : {AVX512} avx512_vnni\n")
    assert level_of(tmp_path / "cpuinfo").name == expected
    (tmp_path / "cpuinfo").write_text(f"{AVX2}\n".replace("flags", "flags\t\t"))
    assert level_of(tmp_path / "cpuinfo").name == "AVX2", "not more than there is"


def test_an_unknown_level_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("QUAIL_KERNELS_LEVEL", "sse9")
    (tmp_path / "cpuinfo").write_text(AVX2)
    with pytest.raises(
        Unavailable,
        match="QUAIL_KERNELS_LEVEL is 'sse9'; there are AVX-512 VNNI, AVX-512, AVX2",
    ):
        level_of(tmp_path / "cpuinfo")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a compiler of a shell script, for a processor that is known."""

    def make(body: str) -> Path:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        monkeypatch.setattr(build, "level_of", lambda: build.LEVELS[-1])
        return path

    return make


def test_without_a_compiler_torch_does_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "level_of", lambda: build.LEVELS[-1])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    choice = KernelChoice.of("auto", "cpu", tmp_path)
    assert choice.build is None and not choice.multiplies
    assert choice.description.startswith("reference (no C++ compiler was found")
    kernels = choice.compiled("auto").kernels(torch.float32, torch.device("cpu"), 1)
    assert type(kernels) is TorchKernels and kernels.name == "reference"
    with pytest.raises(ConfigError, match="kernels = 'native', but there are none here: no C\\+\\+ compiler"):
        KernelChoice.of("native", "cpu", tmp_path)


def test_other_devices_run_on_torch(tmp_path):
    assert "the device is mps" in KernelChoice.of("auto", "mps", tmp_path).reason
    with pytest.raises(ConfigError, match="the device is mps"):
        KernelChoice.of("native", "mps", tmp_path)


def test_the_reference_can_be_demanded(tmp_path):
    choice = KernelChoice.of("reference", "cpu", tmp_path)
    assert (choice.name, choice.description) == ("reference", "reference (kernels = 'reference')")


def test_a_compiler_that_fails_is_asked_once(tmp_path, script):
    script(f"echo called >> {tmp_path}/calls; echo 'x.cpp: error: no such thing' >&2; exit 3")
    choice = KernelChoice.of("auto", "cpu", tmp_path)
    assert choice.build is not None
    for _ in range(2):
        choice = KernelChoice.of("auto", "cpu", tmp_path).compiled("auto")
        assert choice.build is None
        assert "did not compile them (exit 3: x.cpp: error: no such thing)" in choice.reason
    assert (tmp_path / "calls").read_text() == "called\n"
    with pytest.raises(ConfigError, match="no such thing"):
        KernelChoice.of("native", "cpu", tmp_path)
    assert not list((tmp_path / "kernels").glob("*.so")), "a failed build leaves no library"


def test_a_compiler_that_does_not_know_an_extra_option_goes_without(tmp_path, script, monkeypatch):
    """An old one refuses `-mavx512bf16`; what it compiles then is kept as ever."""
    script(
        f'echo called >> {tmp_path}/calls; case "$*" in *-mfeature*) echo "error: -mfeature" >&2; exit 1;; esac; '
        'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    )
    monkeypatch.setattr(build, "level_of", lambda: replace(build.LEVELS[-1], extras=("feature",)))
    choice = KernelChoice.of("auto", "cpu", tmp_path).compiled("auto")
    assert "compiled them wrongly" in choice.reason, "that it compiled at all"
    assert (tmp_path / "calls").read_text() == "called\ncalled\n"


def test_extras_are_those_of_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"{AVX512} avx512_vnni avx512_bf16\n")
    assert level_of(tmp_path / "cpuinfo").extra_options == ("-mavx512bf16",)
    (tmp_path / "cpuinfo").write_text(f"{AVX512} avx512_vnni\n")
    assert level_of(tmp_path / "cpuinfo").extra_options == ()


@pytest.mark.parametrize(
    ("vendor", "wanted", "flags", "expected"),
    [
        ("AuthenticAMD", "", "avx512_bf16", True),
        ("GenuineIntel", "", "avx512_bf16", False),
        ("AuthenticAMD", "0", "avx512_bf16", False),
        ("GenuineIntel", "1", "avx512_bf16", True),
        ("AuthenticAMD", "1", "", False),
    ],
)
def test_pairs_of_bfloat16_are_fast_on_some_processors(
    tmp_path, monkeypatch, vendor, wanted, flags, expected
):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("QUAIL_KERNELS_PAIRS", wanted)
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n{AVX512} avx512_vnni {flags}\n")
    level = level_of(tmp_path / "cpuinfo")
    assert level.has_fast_pairs is expected
    assert ("-DQUAIL_FAST_PAIRS" in level.extra_options) is expected


def test_pairs_are_wanted_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("QUAIL_KERNELS_PAIRS", "yes")
    (tmp_path / "cpuinfo").write_text(f"{AVX512} avx512_vnni\n")
    with pytest.raises(Unavailable, match="QUAIL_KERNELS_PAIRS is 'yes'; it may be 0 or 1"):
        level_of(tmp_path / "cpuinfo")


def test_a_library_that_does_not_work_is_not_kept(tmp_path, script):
    script('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    choice = KernelChoice.of("auto", "cpu", tmp_path).compiled("auto")
    assert choice.build is None and "compiled them wrongly" in choice.reason
    assert not list((tmp_path / "kernels").glob("*.so"))


@pytest.mark.alone
def test_a_compiler_that_takes_too_long_ends_with_all_it_started(tmp_path, script, monkeypatch):
    script(f"(sleep 2; echo late > {tmp_path}/late) & sleep 60")
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.3)
    choice = KernelChoice.of("auto", "cpu", tmp_path).compiled("auto")
    assert choice.build is None and "took longer than 0.3 seconds" in choice.reason
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_a_new_compiler_is_tried_again(tmp_path, script):
    path = script("exit 1")
    assert KernelChoice.of("auto", "cpu", tmp_path).compiled("auto").build is None
    path.write_text("#!/bin/sh\n# another\nexit 1\n")
    assert KernelChoice.of("auto", "cpu", tmp_path).build is not None


def test_a_cache_that_cannot_be_written_is_told(tmp_path, script):
    script("exit 1")
    (tmp_path / "kernels").write_text("a file in the way")
    choice = KernelChoice.of("auto", "cpu", tmp_path).compiled("auto")
    assert choice.build is None and "cannot be written" in choice.reason


def _compile(cache: str) -> None:
    Build.here(Path(cache)).library()


@pytest.mark.alone
def test_two_processes_compile_once(tmp_path, script, monkeypatch):
    script(
        f'echo called >> {tmp_path}/calls; sleep 0.5; while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    )
    monkeypatch.setattr(build, "_TRY", "")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_compile, args=(str(tmp_path),)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert (tmp_path / "calls").read_text() == "called\n"
    assert Build.here(tmp_path).path.read_text() == "library\n"


def test_sources_are_part_of_the_package():
    names = {path.name for path in build.SOURCES.iterdir()}
    assert {"attention.cpp", "products.cpp", "rows.cpp", "check.cpp", "simd.h"} <= names
    assert os.path.commonpath([build.SOURCES, Path(build.__file__).parent]) == str(
        Path(build.__file__).parent
    )
