"""Weights as a processor's kernels lay them out, kept so that later boots map them instead of packing anew.

A folder `<cache>/packed/<digest of the source>-<dtype>-<layout>/` holds `matrices.safetensors` and
`about.json`, which has the other's digest. The layout names the build of the kernels, so that what one build
wrote no other reads. A folder is written under another name and renamed when whole; when read, sizes and
digests are checked, and one that fails is written again. Nothing here can fail a boot: without the folder
weights are packed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import torch

from quail.errors import ModelError
from quail.kernels.interface import Matrix
from quail.models.files import DigestIndex, sync_folder, write_atomically
from quail.models.safetensors_file import map_file, read_header
from quail.models.weights import write_safetensors

_FORMAT = 1
_MATRICES, _ABOUT = "matrices.safetensors", "about.json"
MOST_OF_DISK = 0.1
"""Share of the free disk that the matrices of a model may take."""
MOST_FOLDERS = 4
"""Folders that are kept, those last booted from: of several models, dtypes and builds of the kernels."""


class PackedMatrices:
    """The matrices of a model: those that are kept, or made now and kept for the next boot.

    Args:
        cache_dir: the cache folder; None keeps nothing.
        revision: digest of all that the model was loaded from.
        dtype: of its products.
        layout: of the kernels that will run it; empty where theirs are the weights themselves.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        revision: str = "",
        dtype: torch.dtype | None = None,
        layout: str = "",
    ) -> None:
        self._folder: Path | None = None
        self._made: dict[str, Matrix] = {}
        self._kept: dict[str, Matrix] = {}
        if cache_dir is not None and layout:
            source = f"{revision}-{str(dtype).removeprefix('torch.')}"
            self._folder = cache_dir / "packed" / f"{source}-{layout}"
            self._source = source
            self._digests = DigestIndex(cache_dir / "digests.json")
            self._kept = _read(self._folder, self._digests) or {}

    def matrix(self, name: str, make: Callable[[], Matrix]) -> Matrix:
        """A matrix by its name in the model, made if it is not kept."""
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        self._made[name] = made = make()
        return made

    def keep(self) -> None:
        """Writes the matrices if any was made, and removes the folders that were not used for longest.

        Where that is not possible (no room, a folder that cannot be written or locked, another process at it)
        nothing is kept.
        """
        made, self._made = self._made, {}
        if self._folder is None or not made:
            return
        matrices = self._kept | made
        with contextlib.suppress(OSError, ModelError, filelock.Timeout, NotImplementedError):
            parent = self._folder.parent
            parent.mkdir(parents=True, exist_ok=True)
            num_bytes = sum(matrix.num_bytes for matrix in matrices.values())
            if num_bytes > MOST_OF_DISK * shutil.disk_usage(parent).free:
                return
            with filelock.FileLock(self._folder.with_name(f"{self._source}.lock"), timeout=0):
                self._write(self._folder, matrices)

    def _write(self, folder: Path, matrices: dict[str, Matrix]) -> None:
        building, old = folder.with_name(f".{self._source}.new"), folder.with_name(f".{self._source}.old")
        tensors = {f"{name}.data": matrix.data for name, matrix in matrices.items()}
        tensors |= {
            f"{name}.scales": matrix.scales for name, matrix in matrices.items() if matrix.scales is not None
        }
        try:
            for leftover in (building, old):
                shutil.rmtree(leftover, ignore_errors=True)
            building.mkdir()
            digest = write_safetensors(
                building / _MATRICES,
                {name: tuple(tensor.shape) for name, tensor in tensors.items()},
                {name: tensor.dtype for name, tensor in tensors.items()},
                tensors.__getitem__,
            )
            columns = {name: matrix.columns for name, matrix in matrices.items()}
            fields = {"format": _FORMAT, "sha256": digest, "columns": columns}
            about = fields | {"own_sha256": _digest_of(fields)}
            write_atomically(building / _ABOUT, json.dumps(about, indent=1).encode())
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, old)
            os.rename(building, folder)
            sync_folder(folder.parent)
            self._digests.learn(folder / _MATRICES, digest)
            for other in _by_last_use(folder.parent)[MOST_FOLDERS:]:
                shutil.rmtree(other, ignore_errors=True)
        finally:
            for leftover in (building, old):
                shutil.rmtree(leftover, ignore_errors=True)


def _read(folder: Path, digests: DigestIndex) -> dict[str, Matrix] | None:
    """The matrices of a folder, mapped into memory; None if it is not there, or not whole and right."""
    try:
        fields = json.loads((folder / _ABOUT).read_bytes())
        own_digest = fields.pop("own_sha256")
        if own_digest != _digest_of(fields) or fields["format"] != _FORMAT:
            return None
        path = folder / _MATRICES
        if digests.sha256(path) != fields["sha256"]:
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / _ABOUT)
        stored = read_header(path)
        columns: dict[str, int] = fields["columns"]
        tensors = map_file(path, stored)
        return {
            name: Matrix(tensors[f"{name}.data"], number, tensors.get(f"{name}.scales"))
            for name, number in columns.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ModelError):
        return None


def _by_last_use(parent: Path) -> list[Path]:
    """Whole folders of matrices, the last booted from first."""
    times = {}
    for about in parent.glob(f"[!.]*/{_ABOUT}"):
        with contextlib.suppress(OSError):  # another process may remove it
            times[about.parent] = about.stat().st_mtime_ns
    return sorted(times, key=lambda folder: times[folder], reverse=True)


def _digest_of(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
