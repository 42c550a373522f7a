"""Files that were cut off, damaged or made to harm: refused quickly, with names, and without much memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quail.errors import ModelError
from quail.models.config import config_from_hf
from quail.models.gguf import config_from_gguf
from quail.models.gguf_file import read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.loader import load_model
from quail.models.tokenizer import Tokenizer
from tests.models.gguf_files import header, text, write_gguf
from tests.models.test_config import LLAMA

MORE_FIELDS = [
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "num_key_value_heads",
    "rms_norm_eps",
]


def load(path: Path, cache: Path) -> None:
    load_model(str(path), dtype=torch.float32, cache_dir=cache)


@pytest.fixture(scope="module")
def gguf_file(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_a_gguf_file_cut_off_anywhere_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    raw = gguf_file.read_bytes()
    path = tmp_path / "cut.gguf"
    read_gguf_header(gguf_file)
    header_sizes = list(range(0, 200)) + list(range(200, len(raw), 7919))
    for size in [*header_sizes, len(raw) - 33, len(raw) - 4, len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(ModelError, match=r"cut off|not a GGUF|no GGUF"):
            read_gguf_header(path)
    with pytest.raises(ModelError, match="cut off"):
        load(path, tmp_path)
    assert not list((tmp_path / "converted").glob("*-float32"))


def test_a_safetensors_file_cut_off_anywhere_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    for size in [0, 1, 7, 8, 100, *range(1000, len(raw), len(raw) // 12), len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
            load(folder, tmp_path)


U64_MAX = 2**64 - 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\x03\x04" + b"\0" * 100,
        header(tensors=0, keys=0, version=1),
        header(tensors=0, keys=0, version=0x03000000),
        header(tensors=U64_MAX, keys=0, rest=b"\0" * 100),
        header(tensors=0, keys=U64_MAX, rest=b"\0" * 100),
        header(tensors=0, keys=2**40, rest=b"\0" * 100),
        header(tensors=0, keys=1, rest=struct.pack("<Q", U64_MAX) + b"x" * 50),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<IIQ", 9, 4, U64_MAX) + b"x" * 50),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**60) + b"x" * 50),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 3) + b"x" * 50),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<IQ", 8, 2**63) + b"x" * 50),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<II", 77, 0) + b"x" * 50),
        header(tensors=0, keys=1, rest=text(b"\xff\xfe") + struct.pack("<IQ", 10, 0) + b"x" * 50),
        header(tensors=0, keys=2, rest=(text("k") + struct.pack("<IQ", 10, 0)) * 2 + b"x" * 50),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<I", 2**32 - 1) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQIQ", 1, 2**62, 0, 0) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQIQ", 1, 8, 0, U64_MAX - 31) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQIQ", 1, 8, 0, 3) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQIQ", 1, 0, 0, 0) + b"\0" * 99),
        header(tensors=1, keys=0, rest=text("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + b"\0" * 99),
        header(
            tensors=0,
            keys=1,
            rest=text("general.alignment") + struct.pack("<II", 4, 0) + b"\0" * 50,
        ),
        header(
            tensors=0,
            keys=1,
            rest=text("general.alignment") + struct.pack("<II", 4, 2**31) + b"\0" * 50,
        ),
    ],
)
def test_hostile_headers_are_refused_without_allocating(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"hostile\.gguf"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_gguf_files_raise_model_errors_only(
    data: st.DataObject, gguf_file: Path, tmp_path: Path
) -> None:
    raw = bytearray(gguf_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1200))
        size = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.one_of(st.just(b"\xff" * size), st.just(b"\0" * size), st.binary(min_size=size)))
        raw[at : at + size] = value[:size]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        config_from_gguf(read_gguf_header(path))
    except ModelError as error:
        assert "damaged.gguf" in str(error)  # noqa: PT017


KEYS = st.sampled_from(
    [
        *(f"llama.{key}" for key in ("block_count", "context_length", "embedding_length", "vocab_size")),
        *(
            f"llama.attention.{key}"
            for key in ("head_count", "head_count_kv", "key_length", "sliding_window")
        ),
        *(f"llama.{key}" for key in ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor")),
        *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "scores")),
        *(f"tokenizer.ggml.{key}" for key in ("add_bos_token", "bos_token_id", "add_space_prefix")),
        *("general.architecture", "split.count", "tokenizer.chat_template"),
    ]
)
SCALARS = st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.booleans())
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3).map(tuple), st.sampled_from(["llama", "gpt2", "smollm"])
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_any_metadata_is_understood_or_refused(changes: dict[str, object], gguf_file: Path) -> None:
    file = read_gguf_header(gguf_file)
    changed = replace(file, metadata={**file.metadata, **changes})
    with contextlib.suppress(ModelError):
        config_from_gguf(changed)
    with contextlib.suppress(ModelError):
        Tokenizer(tokenizer_from_gguf(changed.metadata, "x"))


HF_VALUES = st.one_of(
    st.none(),
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "low_freq_factor"]), SCALARS),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_config_is_understood_or_refused(data: st.DataObject) -> None:
    fields = dict(
        data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys([*LLAMA, *MORE_FIELDS], HF_VALUES)))
    )
    with contextlib.suppress(ModelError):
        config_from_hf({**LLAMA, **fields}, "x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model_type": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_files_are_refused(
    name: str, content: bytes, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError):
        load(folder, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [7]}},
        {"added_tokens": [{"id": 0}]},
        {"added_tokens": [7]},
        {"added_tokens": [{"id": -1, "content": "<x>", "special": True}]},
        {"added_tokens": [{"id": 2**62, "content": "<x>", "special": True}]},
        {"pre_tokenizer": {"type": "Nonsense"}},
        {"normalizer": 7},
    ],
)
def test_damaged_tokenizers_are_refused(
    change: dict[str, object], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError):
        load(folder, tmp_path)
