"""Files that were cut off, damaged or made to harm: refused quickly, with names, and without much memory."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quail.errors import ModelError
from quail.models.config import config_from_hf
from quail.models.gguf import config_from_gguf
from quail.models.gguf_file import NumberArray, read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.loader import load_model
from quail.models.safetensors_file import read_header
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
@example(changes={"llama.rope.scaling.factor": 5.4e-42})
@example(changes={"llama.rope.scaling.factor": 1e300})
@example(changes={"llama.rope.freq_base": 2e-306})
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


@pytest.mark.parametrize(
    "field", ["original_max_position_embeddings", "max_position_embeddings", "num_hidden_layers"]
)
def test_numbers_that_no_float_holds_are_refused(field: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = {**LLAMA, "rope_scaling": scaling, field: 10**400}
    if field.startswith("original"):
        fields["rope_scaling"] = {**scaling, field: 10**400}
    with pytest.raises(ModelError, match=f"{field} is 1000"):
        config_from_hf(fields, "x")


def test_a_panic_of_the_tokenizers_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "m"))
    path = folder / "tokenizer.json"
    names_no_token = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": names_no_token}))
    with pytest.raises(ModelError):
        load(folder, tmp_path)


def number_array(kind: int, count: int, item: bytes) -> bytes:
    return header(tensors=0, keys=1, rest=text("k") + struct.pack("<IIQ", 9, kind, count) + item * count)


def short_keys(count: int) -> bytes:
    keys = b"".join(text(f"{i:x}") + struct.pack("<IB", 0, 1) for i in range(count))
    return header(tensors=0, keys=count, rest=keys)


def short_tensors(count: int) -> bytes:
    infos = b"".join(text(f"{i:x}") + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i in range(count))
    return header(tensors=count, keys=0, rest=infos) + b"\0" * (32 * count + 64)


@pytest.mark.parametrize(
    "content",
    [
        *(number_array(kind, 300_000, b"\1") for kind in (0, 1, 7)),
        number_array(2, 150_000, b"\1\2"),
        number_array(6, 80_000, b"\1\2\3\4"),
        number_array(10, 40_000, b"\1\2\3\4\5\6\7\0"),
        number_array(8, 40_000, text("")),
        number_array(8, 30_000, text("ab")),
        header(tensors=0, keys=1, rest=text("k") + struct.pack("<I", 8) + text("\U0001f600" * 100_000)),
        short_keys(20_000),
        short_tensors(8_000),
    ],
)
def test_a_header_takes_at_most_ten_times_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(content) + (1 << 18)
    finally:
        tracemalloc.stop()


def test_more_keys_or_tensors_than_any_model_has(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (short_keys(70_000), header(tensors=140_000, keys=0, rest=b"\0" * 6_000_000)):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"at most 65536 and 131072 are read"):
            read_gguf_header(path)


def test_pieces_that_join_in_too_many_ways_are_refused() -> None:
    tokens = tuple("a" * length for length in range(1, 400))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": NumberArray(np.zeros(len(tokens))),
    }
    with pytest.raises(ModelError, match="pairs of its 399 tokens"):
        tokenizer_from_gguf(metadata, "x")
    with pytest.raises(ModelError, match="a token of 5000 characters"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.tokens": ("a" * 5000,)}, "x")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header_text", "named"),
    [
        ('{"a": 1}', "unknown number format"),
        ("[]", "no object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (json.dumps({"a": {**F32, "dtype": "F33"}}), "unknown number format 'F33'"),
        (json.dumps({"a": {**F32, "dtype": ["F32"]}}), "unknown number format"),
        (json.dumps({"a": {**F32, "shape": [3]}}), "which is not 8 bytes"),
        (json.dumps({"a": {**F32, "shape": [-2]}}), "no usable shape"),
        (json.dumps({"a": {**F32, "shape": [2.0]}}), "no usable shape"),
        (json.dumps({"a": {**F32, "shape": [True, 2]}}), "no usable shape"),
        (json.dumps({"a": {**F32, "shape": [2**62, 2**62]}}), "no usable shape"),
        (json.dumps({"a": {**F32, "shape": [2**39, 2**39, 2**39]}}), "which is not 8 bytes"),
        (json.dumps({"a": {**F32, "data_offsets": [8, 0]}}), "which is not -8 bytes"),
        (json.dumps({"a": {**F32, "data_offsets": [0]}}), "no usable shape"),
        (json.dumps({"a": {**F32, "data_offsets": [8, 16]}}), "begins at byte"),
        (json.dumps({"a": F32, "b": F32}), "begins at byte"),
        (json.dumps({}), "end at byte"),
        ('{"a": 1, "a": 2}', "a name stands twice"),
    ],
)
def test_hostile_safetensors_headers(header_text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header_text).to_bytes(8, "little") + header_text.encode() + b"\0" * 8)
    with pytest.raises(ModelError, match=f"not a whole safetensors file: .*{re.escape(named)}"):
        read_header(path)


def test_a_header_longer_than_the_file_or_than_any(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for size in (2**64 - 1, 2**63, 100):
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(ModelError, match="does not fit"):
            read_header(path)
    with path.open("wb") as file:
        file.write((2**25).to_bytes(8, "little"))
        file.truncate(2**26)
    with pytest.raises(ModelError, match="longer than"):
        read_header(path)
