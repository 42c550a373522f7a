"""The header of a GGUF file (versions 2 and 3), read without trust: every count and extent is checked against
the file.

Layout, as the format's specification gives it: magic, version, tensor count, key count; keys with typed
values; tensor names with dimensions, type and offset; padding to the alignment; tensor data. All numbers are
little-endian.
"""

from __future__ import annotations

import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quail.errors import ModelError

# type number -> (name, elements of a block, bytes of a block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_SMALLEST_KEY_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MOST_KEYS, _MOST_TENSORS = 2**16, 2**17
"""Far more than any model has; the objects made of each are larger than its bytes in the file."""


@dataclass(frozen=True, eq=False)
class NumberArray:
    """An array of numbers in the metadata, kept as small as it is in the file."""

    values: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"an array of {len(self)} {self.values.dtype} numbers"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in its file.

    Attributes:
        shape: rows first, as torch has it (GGUF counts the other way round).
        type_number: key into `TENSOR_TYPES`.
        start: offset of the first byte in the file.
        num_bytes: length of the data.
    """

    shape: tuple[int, ...]
    type_number: int
    start: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """Name of the number format, e.g. "Q4_K"."""
        return TENSOR_TYPES[self.type_number][0]


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata (arrays of texts are tuples, those of numbers `NumberArray`) and where its tensors
    lie.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file; all tensor data is known to lie within the file afterwards.

    Raises:
        ModelError: no GGUF file, an unknown version or tensor type, or a file that was cut off or damaged.
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise ModelError(f"{path}: a file of {size} bytes is no GGUF file, or was cut off")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Parser:
    """Walks over the header once; `position` never leaves the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def parse(self) -> GGUFFile:
        if self._take(4, "the magic") != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        version = self._unsigned(4, "the version")
        if version not in (2, 3):
            reason = "big-endian files are not read" if version & 0xFFFF == 0 else "versions 2 and 3 are read"
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; {reason}")
        num_tensors = self._count(_SMALLEST_TENSOR_BYTES, "the tensor count")
        num_keys = self._count(_SMALLEST_KEY_BYTES, "the key count")
        if num_keys > _MOST_KEYS or num_tensors > _MOST_TENSORS:
            raise ModelError(
                f"{self.path}: {num_keys} keys and {num_tensors} tensors; at most {_MOST_KEYS} and "
                f"{_MOST_TENSORS} are read",
                hint="the file is damaged; fetch it again",
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                raise ModelError(f"{self.path}: the key {key!r} occurs twice")
            metadata[key] = self._value(self._unsigned(4, key), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GGUFFile(self.path, metadata, self._place(infos, metadata))

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise ModelError(
                f"{self.path}: general.alignment is {reprlib.repr(alignment)}; a power of two is needed"
            )
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in infos:
            if name in tensors:
                raise ModelError(f"{self.path}: the tensor {name!r} occurs twice")
            type_name, block_elements, block_bytes = TENSOR_TYPES[type_number]
            if shape[-1] % block_elements:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has rows of {shape[-1]}, which is no multiple of the "
                    f"{block_elements} elements of a {type_name} block"
                )
            num_bytes = block_bytes * _product(shape) // block_elements
            if offset % alignment or data_start + offset + num_bytes > self.size:
                raise ModelError(
                    f"{self.path}: tensor {name!r} would end at byte {data_start + offset + num_bytes}, "
                    f"but the file has {self.size}",
                    hint="the file was cut off or damaged; fetch it again",
                )
            tensors[name] = GGUFTensor(shape, type_number, data_start + offset, num_bytes)
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        num_dims = self._unsigned(4, name)
        if not 1 <= num_dims <= 4:
            raise ModelError(f"{self.path}: tensor {name!r} has {num_dims} dimensions; 1 to 4 are possible")
        shape = tuple(self._unsigned(8, name) for _ in range(num_dims))[::-1]
        if not all(shape):
            raise ModelError(f"{self.path}: tensor {name!r} has the empty shape {shape}")
        type_number = self._unsigned(4, name)
        if type_number not in TENSOR_TYPES:
            known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unsupported type number {type_number}",
                hint=f"supported tensor types: {known}",
            )
        return name, shape, type_number, self._unsigned(8, name)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: the key {key!r} has the unknown value type {kind}")
        number_type = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(number_type.itemsize, key), number_type)[0].item()

    def _array(self, key: str) -> Any:
        kind = self._unsigned(4, key)
        if kind == _STRING:
            return tuple(self._string(key) for _ in range(self._count(8, key)))
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: the key {key!r} is an array of the unknown type {kind}")
        number_type = np.dtype(_SCALARS[kind])
        num_bytes = self._count(number_type.itemsize, key) * number_type.itemsize
        return NumberArray(np.frombuffer(self._take(num_bytes, key), number_type))

    def _count(self, smallest_bytes: int, what: str) -> int:
        """A count of things of at least `smallest_bytes` each, which must fit into the rest of the file."""
        count = self._unsigned(8, what)
        if count * smallest_bytes > self.size - self.position:
            raise self._cut_off(what, count * smallest_bytes)
        return count

    def _string(self, what: str) -> str:
        raw = self._take(self._unsigned(8, what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what!r} holds text that is not UTF-8") from error

    def _unsigned(self, num_bytes: int, what: str) -> int:
        layout = "<I" if num_bytes == 4 else "<Q"
        if self.position + num_bytes > self.size:
            raise self._cut_off(what, num_bytes)
        value: int = struct.unpack_from(layout, self.data, self.position)[0]
        self.position += num_bytes
        return value

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.size - self.position:
            raise self._cut_off(what, num_bytes)
        taken = self.data[self.position : self.position + num_bytes]
        self.position += num_bytes
        return taken

    def _cut_off(self, what: str, num_bytes: int) -> ModelError:
        return ModelError(
            f"{self.path}: {what!r} needs {num_bytes} bytes at byte {self.position}, "
            f"but the file has {self.size}",
            hint="the file was cut off or damaged; fetch it again",
        )


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
