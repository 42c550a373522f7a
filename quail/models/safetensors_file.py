"""safetensors files, read without trust: every extent of the header is checked against the file before use.

Layout, as the format's specification gives it: eight bytes with the length of the header, little-endian; the
header, a JSON object from names to number format, shape and byte range; the tensors, one behind the other
without a gap.
"""

from __future__ import annotations

import json
import math
import mmap
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from quail.errors import ModelError

if TYPE_CHECKING:
    import torch

LARGEST_HEADER_BYTES = 1 << 24
"""A hundred thousand tensors need half of it; objects of Python take up to 25 times the text."""

_METADATA = "__metadata__"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "F32": 4, "I64": 8, "F64": 8,
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")
"""Number formats that weights may have."""

_LARGEST_SIDE = 2**40


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file.

    Attributes:
        type_name: its number format, e.g. "BF16".
        shape: rows first.
        start: offset of its first byte in the file.
        num_bytes: its length.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, known to lie within it.

    Raises:
        ModelError: the file is damaged or was cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or num_bytes > size - 8:
                raise _broken(path, f"its header of {num_bytes} bytes does not fit into {size} bytes")
            if num_bytes > LARGEST_HEADER_BYTES:
                raise _broken(path, f"its header of {num_bytes} bytes is longer than {LARGEST_HEADER_BYTES}")
            fields = json.loads(file.read(num_bytes), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _broken(path, "its header is no object")
    fields.pop(_METADATA, None)
    return _placed(path, fields, 8 + num_bytes, size)


def map_file(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Map tensors of `read_header` into memory: nothing is read before it is used, and changes stay private.

    Each tensor is a mapping of its own, so that one which is let go gives its memory back.

    Args:
        path: the file.
        tensors: those wanted; of a type that `torch_dtype` knows.

    Raises:
        ModelError: the file cannot be read, or became shorter.
    """
    try:
        with path.open("rb") as file:
            return {name: _map_part(file.fileno(), stored) for name, stored in tensors.items()}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be mapped into memory: {error}") from error


def _map_part(descriptor: int, stored: StoredTensor) -> torch.Tensor:
    if not stored.num_bytes:
        return _tensor(b"", stored, 0)
    inside = stored.start % mmap.ALLOCATIONGRANULARITY
    data = mmap.mmap(
        descriptor, inside + stored.num_bytes, access=mmap.ACCESS_COPY, offset=stored.start - inside
    )
    return _tensor(data, stored, inside)


def _tensor(data: mmap.mmap | bytes, stored: StoredTensor, start: int) -> torch.Tensor:
    import torch

    dtype = torch_dtype(stored.type_name)
    if not stored.num_bytes:
        return torch.empty(stored.shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)[start : start + stored.num_bytes]
    if raw.storage_offset() % dtype.itemsize:  # the format does not promise alignment
        raw = raw.clone()
    return raw.view(dtype).view(stored.shape)


def torch_dtype(type_name: str) -> torch.dtype:
    """The dtype of one of `FLOATS`, or of the integers that packed weights are."""
    import torch

    return {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "I8": torch.int8,
    }[type_name]


def _placed(path: Path, fields: Mapping[str, Any], data_start: int, size: int) -> dict[str, StoredTensor]:
    tensors = {name: _stored(path, name, entry, data_start) for name, entry in fields.items()}
    position = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if stored.start != position:
            raise _broken(path, f"tensor {name!r} begins at byte {stored.start}, not at {position}")
        position += stored.num_bytes
    if position != size:
        raise _broken(path, f"its tensors end at byte {position}, but it has {size}")
    return tensors


def _stored(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    type_name, shape, range_ = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(type_name, str) or type_name not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        raise _broken(
            path, f"tensor {name!r} has the unknown number format {reprlib.repr(type_name)}; known: {known}"
        )
    if not _is_numbers(shape) or not _is_numbers(range_) or len(range_) != 2:
        raise _broken(path, f"tensor {name!r} has no usable shape and byte range")
    num_bytes = range_[1] - range_[0]
    if num_bytes != math.prod(shape) * _ITEM_BYTES[type_name]:
        raise _broken(
            path,
            f"tensor {name!r} is {type_name} {reprlib.repr(shape)}, which is not {num_bytes} bytes",
        )
    return StoredTensor(type_name, tuple(shape), data_start + range_[0], num_bytes)


def _is_numbers(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(item) is int and 0 <= item <= _LARGEST_SIDE for item in value)
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path}: not a whole safetensors file: {why}",
        hint="the file was cut off or damaged; fetch it again",
    )
