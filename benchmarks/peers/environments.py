"""One Python environment a peer, under the cache folder: made when first needed, then reused.

The versions stand in `requirements/`; an environment whose requirements changed is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
CPU_FLAGS = {
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX512": "avx512f",
    "GGML_AVX512_VBMI": "avx512_vbmi2",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
"""llama.cpp's build options and the processor's flag that each needs; AMX is left out: it crashed."""


class CannotInstall(Exception):
    """A peer that cannot be had on this machine; the message says why, in one line."""


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The processor's flags as Linux tells them; empty elsewhere."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def build_options(flags: set[str]) -> str:
    """`CMAKE_ARGS` of llama.cpp for a processor: what it has, named one by one; nothing for pictures.

    >>> build_options({"avx2", "fma"})
    '-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON'
    """
    chosen = [f"-D{option}=ON" for option, flag in CPU_FLAGS.items() if flag in flags]
    native = "-DGGML_NATIVE=OFF" if chosen else "-DGGML_NATIVE=ON"
    return " ".join(["-DLLAVA_BUILD=OFF", native, *chosen])


def environment_of(name: str, cache: Path) -> Path:
    """The folder of a peer's environment."""
    return cache / "peers" / name


def ready(name: str, cache: Path, *, say: Callable[[str], None], build_jobs: int | None = None) -> Path:
    """The Python of a peer's environment, which is made if there is none of these requirements.

    Args:
        name: of the file in `requirements/`.
        cache: Quail's cache folder.
        say: told what is being done.
        build_jobs: compilers at a time; None leaves it to the build.

    Raises:
        CannotInstall: pip or the build failed.
    """
    folder, requirements = environment_of(name, cache), REQUIREMENTS / f"{name}.txt"
    stamp, python = folder / ".stamp", folder / "bin" / "python"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"{name}: making {folder}; its packages are fetched once, a build takes minutes")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{name}-install.log"
    _call([sys.executable, "-m", "venv", str(folder)], log, name)
    environment = {"CMAKE_ARGS": build_options(processor_flags())}
    if build_jobs is not None:
        environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(build_jobs)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    _call([*pip, "--requirement", str(requirements)], log, name, environment)
    stamp.write_text(wanted)
    return python


def _call(command: list[str], log: Path, name: str, environment: dict[str, str] | None = None) -> None:
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
    if done.returncode:
        raise CannotInstall(f"{name} cannot be installed: {last_line(log)} (all of it in {log})")


def last_line(log: Path) -> str:
    """The last line of a log that says anything, an error if there is one."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no word of why"])[-1][:300]
