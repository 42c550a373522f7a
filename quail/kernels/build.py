"""The native kernels as a shared library: compiled once for this processor and kept in the cache folder.

The sources lie in `native/`, have a plain C interface and need a C++17 compiler, nothing else. A library's
file name is the digest of the sources, the compiler and its options, so that each is compiled once; a build
is tried out in a process of its own before it is kept. Where anything is missing the engine runs on torch
alone, and the reason is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
COMPILE_SECONDS = 300
MORE_OPTIONS = "QUAIL_KERNELS_CXXFLAGS"
"""Environment variable with further options of the compiler, such as those of sanitizers."""

BEST_LEVEL = "QUAIL_KERNELS_LEVEL"
"""Environment variable with the name of the best of `LEVELS` to compile for, where the processor has more."""

PAIRS = "QUAIL_KERNELS_PAIRS"
"""Environment variable of 0 or 1: whether pairs of bfloat16 count as fast, whatever the processor is."""

_CPUINFO = Path("/proc/cpuinfo")
_REFUSED = "did not compile them"
_TRY = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).quail_check())"


@dataclass(frozen=True)
class Level:
    """A set of instructions to compile for.

    Attributes:
        name: for people.
        flags: what /proc/cpuinfo must list.
        has_products: whether the library multiplies matrices there.
        extras: flags that are used where the processor has them and the compiler knows them.
        has_fast_pairs: whether it adds up products of pairs of bfloat16 as fast as those of 16-bit integers.
    """

    name: str
    flags: tuple[str, ...]
    has_products: bool = False
    extras: tuple[str, ...] = ()
    has_fast_pairs: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Of the compiler."""
        return _options_of(self.flags)

    @property
    def extra_options(self) -> tuple[str, ...]:
        """Of a compiler that knows them."""
        return _options_of(self.extras) + ("-DQUAIL_FAST_PAIRS",) * self.has_fast_pairs


def _options_of(flags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("-m" + flag.replace("_", "") for flag in flags)


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
LEVELS = (
    Level("AVX-512 VNNI", (*_AVX512, "avx512_vnni"), has_products=True, extras=("avx512_bf16",)),
    Level("AVX-512", _AVX512),
    Level("AVX2", _AVX2),
)


class Unavailable(Exception):
    """The native kernels cannot be had here; the text says why."""


def level_of(cpuinfo: Path = _CPUINFO) -> Level:
    """The best level of this processor, or below the one that `QUAIL_KERNELS_LEVEL` names.

    Pairs of bfloat16 are fast on AMD's processors that have them. Intel's of the time of AVX-512 BF16 take
    twice as long for them as for float32.

    Raises:
        Unavailable: not a processor that the kernels know, or no such level.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise Unavailable(f"the processor is {platform.machine()}, not x86-64")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        raise Unavailable(f"{cpuinfo} cannot be read, so the processor is not known") from None
    found = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    names = [level.name.lower() for level in LEVELS]
    best = os.environ.get(BEST_LEVEL, "").strip().lower() or names[0]
    if best not in names:
        known = ", ".join(level.name for level in LEVELS)
        raise Unavailable(f"{BEST_LEVEL} is {best!r}; there are {known}")
    pairs = os.environ.get(PAIRS, "").strip() or str(int(any("AuthenticAMD" in line for line in lines)))
    if pairs not in ("0", "1"):
        raise Unavailable(f"{PAIRS} is {pairs!r}; it may be 0 or 1")
    for level in LEVELS[names.index(best) :]:
        if found.issuperset(level.flags):
            extras = tuple(flag for flag in level.extras if flag in found)
            return replace(level, extras=extras, has_fast_pairs=pairs == "1" and "avx512_bf16" in extras)
    raise Unavailable("the processor has no AVX2")


def compiler() -> Path:
    """The C++ compiler: `$CXX`, else c++, g++ or clang++ on the path.

    Raises:
        Unavailable: there is none.
    """
    for name in (os.environ.get("CXX", "").strip(), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return Path(found).resolve()
    raise Unavailable("no C++ compiler was found (c++, g++, clang++ or $CXX)")


def has_tiles(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor multiplies bfloat16 matrices in tiles (AMX), which torch does."""
    try:
        return "amx_bf16" in cpuinfo.read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class Build:
    """A library that is to be, or is already.

    Attributes:
        level: instructions to compile for.
        compiler: that compiles it.
        path: of the library.
    """

    level: Level
    compiler: Path
    path: Path

    @classmethod
    def here(cls, cache_dir: Path) -> Build:
        """The library for this processor and compiler, in `QUAIL_KERNELS_DIR` or a folder of the cache.

        Raises:
            Unavailable: there is no such processor or compiler, or compiling failed before.
        """
        level, cxx = level_of(), compiler()
        status = cxx.stat()
        options = [*level.options, *level.extra_options, *OPTIONS, *cls.more_options()]
        parts = [str(cxx), str(status.st_size), str(status.st_mtime_ns), *options]
        digest = hashlib.sha256("\0".join(parts).encode())
        for source in sorted(SOURCES.iterdir()):
            if source.suffix in (".h", ".cpp"):
                digest.update(source.name.encode() + b"\0" + source.read_bytes())
        folder = os.environ.get("QUAIL_KERNELS_DIR", "").strip() or cache_dir / "kernels"
        build = cls(level, cxx, Path(folder) / f"{digest.hexdigest()[:32]}.so")
        with contextlib.suppress(OSError):
            raise Unavailable(build._failure.read_text())
        return build

    def library(self, progress: Callable[[str], None] | None = None) -> Path:
        """Compiles the library if it is not there; processes that want the same one wait for each other.

        Raises:
            Unavailable: it cannot be compiled, does not work, or cannot be kept.
        """
        if self.path.is_file():
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(self.path.with_suffix(".lock")):
                if not self.path.is_file():
                    if progress is not None:
                        progress("compiling kernels for this processor (once)")
                    self._compile()
        except OSError as error:
            raise Unavailable(f"{self.path.parent} cannot be written: {error.strerror or error}") from None
        return self.path

    def _compile(self) -> None:
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".building.", suffix=".so")
        os.close(handle)
        building = Path(name)
        try:
            try:
                self._run(self._command(self.level.extra_options, name), _REFUSED, preloaded="LD_PRELOAD")
            except Unavailable:
                if not self.level.extras or not self._failure.is_file():
                    raise
                self._failure.unlink()
                self._run(self._command((), name), _REFUSED, preloaded="LD_PRELOAD")
            self._run([sys.executable, "-I", "-S", "-c", _TRY, name], "compiled them wrongly")
            building.replace(self.path)
        finally:
            building.unlink(missing_ok=True)

    def _command(self, extra_options: tuple[str, ...], name: str) -> list[str]:
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        options = [*self.level.options, *extra_options, *OPTIONS, *self.more_options()]
        return [str(self.compiler), *options, *sources, "-o", name, "-ldl"]

    def _run(self, command: list[str], fault: str, preloaded: str = "") -> None:
        """Runs a step; if it fails the reason is kept, so that it is not tried at every start.

        Args:
            command: to run.
            fault: what the compiler did if it fails.
            preloaded: an environment variable that it is not to see.
        """
        # The compiler starts processes of its own, which end with it; what is preloaded here is not for it.
        environment = {name: value for name, value in os.environ.items() if name != preloaded}
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                _, errors = process.communicate(timeout=COMPILE_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Unavailable(f"{self.compiler} took longer than {COMPILE_SECONDS} seconds") from None
                raise
        if process.returncode == 0:
            return
        said = next((line.strip() for line in errors.splitlines() if "error" in line), "")
        reason = f"{self.compiler} {fault} (exit {process.returncode}{': ' + said if said else ''})"
        self._failure.write_text(reason)
        raise Unavailable(reason)

    @staticmethod
    def more_options() -> list[str]:
        """Of the compiler, from `QUAIL_KERNELS_CXXFLAGS`."""
        return shlex.split(os.environ.get(MORE_OPTIONS, ""))

    @property
    def _failure(self) -> Path:
        return self.path.with_suffix(".failed")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    import filelock

    with filelock.FileLock(path):
        yield
