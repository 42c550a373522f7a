"""What a user may set about the engine: one frozen value, checked when it is made."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from quail.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "bfloat16", "float32", "int8")
LAYOUTS = ("auto", "chat", "completion")
SHARING = ("auto", "on", "off")
RETENTION = ("auto", "off", "keep")
KERNELS = ("auto", "native", "reference")
ATTENTION = ("auto", "gathered", "paged", "reference")

MOST_THREADS = 1024
"""Threads of the engine; far more make the machine refuse them in the middle of a run."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: int | str, *, what: str = "a memory size") -> int:
    """Reads a number of bytes.

    Args:
        value: bytes as an integer, or text with a unit: `'512MiB'`, `'2 GiB'`, `'1.5GB'`; `K`, `M`, `G`, `T`
            alone are powers of 1,024.
        what: name of the setting, for the message.

    Raises:
        ConfigError: not a size, or not positive.

    >>> parse_bytes("2GiB")
    2147483648
    >>> parse_bytes("1.5 MB")
    1500000
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = (
            re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
        )
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{what} = {value!r} is not a size in bytes",
                hint="write an integer, or text with a unit such as '512MiB' or '2GiB'",
            )
        size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{what} = {value!r} must be more than 0 bytes")
    if size >= 2**63:
        raise ConfigError(f"{what} = {str(value)[:40]!r} is more than any machine has")
    return size


def did_you_mean(word: str, allowed: Sequence[str]) -> str | None:
    """A hint with the nearest allowed word, or None if none is near.

    >>> did_you_mean("gpu8", ["cpu", "cuda"])
    "Did you mean 'cpu'?"
    """
    near = difflib.get_close_matches(word.lower(), allowed, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else None


def check_choice(what: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses a value that is not one of the allowed words.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ConfigError(f"{what} = {value!r} is not one of {words}", hint=did_you_mean(str(value), allowed))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_path(value: object) -> bool:
    """Whether a value can name a folder of this system."""
    if not isinstance(value, str | Path) or not str(value).strip():
        return False
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _environment(name: str, default: Any, read: Callable[[str], Any] = str) -> Any:
    """A field whose default is the environment variable, read when the config is made."""

    def value() -> Any:
        text = os.environ.get(name, "").strip()
        if not text:
            return default
        try:
            return read(text)
        except ValueError:
            raise ConfigError(f"environment variable {name} = {text!r} is not a whole number") from None

    return field(default_factory=value, metadata={"environment": name})


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine. Each default can be set by the environment variable named with it.

    Attributes:
        model: alias (`quail models list`), Hugging Face id, folder with safetensors, or path of a GGUF file.
            `QUAIL_MODEL`; default `smollm2-135m`.
        device: `auto` (CUDA, then CPU), `cpu`, `cuda` or `mps`. `QUAIL_DEVICE`.
        dtype: `auto` (bfloat16 where the device has fast bfloat16 products, else float32), `bfloat16`,
            `float32` (exact work) or `int8` (CPUs: products in 8-bit integers, all else in bfloat16; faster,
            less exact). `QUAIL_DTYPE`.
        kv_memory: memory for the key/value pages, in bytes or as text such as `'2GiB'`; None takes a share of
            what the machine or its container leaves, on CUDA what the device has left. `QUAIL_KV_MEMORY`.
        token_budget: most rows (tokens) one pass through the model computes; None is 2,048, on CUDA up to
            16,384 as memory allows. `QUAIL_TOKEN_BUDGET`.
        layout: `chat` (the model's own chat template around the prompt), `completion` (none) or `auto` (what
            was measured to be better for a known model). `QUAIL_LAYOUT`.
        label: line in front of every document. `QUAIL_LABEL`; default `DOCUMENT:`.
        prefix_sharing: whether documents that begin alike compute their common beginning once: `auto` (where
            it pays), `on` or `off`. `QUAIL_PREFIX_SHARING`. Answers are the same either way.
        retention: whether KV outlives the operator that wrote it: `auto` keeps what was written anyway, for
            later operators and queries, as memory allows; `keep` writes the KV of every document, also where
            a query asks one question only; `off` keeps nothing. `QUAIL_RETENTION`.
        answers: where answers are kept, so that no later run asks for them again: the path of a file (made
            where there is none; processes may share it), `off` keeps none, `memory` keeps them as long as the
            session.
            None is the file `DATABASE.answers` of a session with a database file, else `memory`.
            `QUAIL_ANSWERS`.
        kernels: what runs a pass: `native` (on a CPU compiled for this processor at first use, on CUDA those
            in Triton), `reference` (torch's operations) or `auto` (native where they can be had: a C++
            compiler and a known processor, or Triton). `QUAIL_KERNELS`. Answers are the same within the
            rounding of the dtype.
        attention: what attention runs on a CUDA device: `gathered` (torch's `varlen_attn` over KV gathered
            from pages), `paged` (a Triton kernel that reads pages), `reference` (a segment at a time), or
            `auto` (the first of them that can run in bfloat16, `reference` in float32). `QUAIL_ATTENTION`.
        threads: number of CPU threads of the engine; None leaves it to torch. `QUAIL_THREADS`.
        cache_dir: folder for fetched models and measurements; None is `$XDG_CACHE_HOME/quail` or
            `~/.cache/quail`. `QUAIL_CACHE_DIR`.

    Raises:
        ConfigError: a value that cannot be used, with its field, the value and what is allowed.
    """

    model: str = _environment("QUAIL_MODEL", "smollm2-135m")
    device: str = _environment("QUAIL_DEVICE", "auto")
    dtype: str = _environment("QUAIL_DTYPE", "auto")
    kv_memory: int | str | None = _environment("QUAIL_KV_MEMORY", None)
    token_budget: int | None = _environment("QUAIL_TOKEN_BUDGET", None, int)
    layout: str = _environment("QUAIL_LAYOUT", "auto")
    label: str = _environment("QUAIL_LABEL", "DOCUMENT:")
    prefix_sharing: str = _environment("QUAIL_PREFIX_SHARING", "auto")
    retention: str = _environment("QUAIL_RETENTION", "auto")
    answers: str | Path | None = _environment("QUAIL_ANSWERS", None)
    kernels: str = _environment("QUAIL_KERNELS", "auto")
    attention: str = _environment("QUAIL_ATTENTION", "auto")
    threads: int | None = _environment("QUAIL_THREADS", None, int)
    cache_dir: str | Path | None = _environment("QUAIL_CACHE_DIR", None)

    def __post_init__(self) -> None:
        try:
            self._check()
        except ConfigError as error:
            variable = self._variable_at_fault(error.message)
            if variable is None:
                raise
            raise ConfigError(f"{error.message} (from {variable})", hint=error.hint) from None

    def _check(self) -> None:
        for name in ("model", "label"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name == "model" and not value.strip()):
                raise ConfigError(
                    f"{name} = {value!r} must be text" + (", not empty" if name == "model" else "")
                )
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("prefix_sharing", self.prefix_sharing, SHARING)
        check_choice("retention", self.retention, RETENTION)
        check_choice("kernels", self.kernels, KERNELS)
        check_choice("attention", self.attention, ATTENTION)
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory, what="kv_memory")
        if not _is_encodable(self.label):
            raise ConfigError(f"label = {self.label!r} holds a lone surrogate, which is not text")
        for name, unit, least in (("token_budget", "tokens", 16), ("threads", "threads", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise ConfigError(f"{name} = {value!r} must be a whole number of {unit}, at least {least}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads = {self.threads} must be at most {MOST_THREADS}")
        for name in ("answers", "cache_dir"):
            value = getattr(self, name)
            if value is not None and not _is_path(value):
                raise ConfigError(f"{name} = {value!r} must be a path")

    def _variable_at_fault(self, message: str) -> str | None:
        for each in fields(self):
            variable = each.metadata.get("environment", "")
            given = os.environ.get(variable, "").strip()
            if given and message.startswith(f"{each.name} =") and given == str(getattr(self, each.name)):
                return str(variable)
        return None

    @property
    def kv_memory_bytes(self) -> int | None:
        """`kv_memory` in bytes; None where the engine is to choose."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory, what="kv_memory")

    def answers_path(self, database: str | os.PathLike[str] | None) -> Path | None:
        """The file of answers of a session; None keeps them in memory. (`off` is not asked for its path.)

        Args:
            database: the session's DuckDB file, None without one.
        """
        if self.answers is None:
            return None if database is None else Path(f"{os.fspath(database)}.answers")
        return None if self.answers == "memory" else Path(self.answers).expanduser()

    @property
    def cache_path(self) -> Path:
        """The cache folder; it need not exist yet."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        return (Path(base) if base else Path.home() / ".cache") / "quail"
