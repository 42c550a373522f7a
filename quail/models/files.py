"""Files of the cache folder: digests remembered, writes that are whole or absent, one writer at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quail.errors import ModelError

_BLOCK_BYTES = 1 << 22


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, even after a crash."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file: other processes that enter with the same path wait.

    Raises:
        ModelError: the lock file cannot be made, e.g. in a folder that cannot be written.
    """
    import filelock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        lock.acquire()
    except OSError as error:
        raise ModelError(
            f"the cache folder {path.parent} cannot be written: {error.strerror or error}",
            hint="set another cache_dir",
        ) from error
    try:
        yield
    finally:
        lock.release()


class DigestIndex:
    """Remembers the digests of files by path, size and times, so that a big unchanged file is not read again.

    It also remembers which files were found to hold finite numbers only. A lost or damaged index costs time,
    nothing else.

    Args:
        path: a JSON file; its folder need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = self._stored_entries()

    def sha256(self, path: Path) -> str:
        """The file's SHA-256, read from the file only if it is new or changed.

        Raises:
            ModelError: the file cannot be read.
        """
        try:
            stamp = _stamp(path)
            known = self._entry(path, stamp)
            if known is not None:
                return str(known["sha256"])
            digest = sha256_of_file(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._record(path, {"stamp": stamp, "sha256": digest, "finite": False})
        return digest

    def learn(self, path: Path, digest: str) -> None:
        """Remember the digest of a file that was just written."""
        self._record(path, {"stamp": _stamp(path), "sha256": digest, "finite": True})

    def is_finite(self, path: Path) -> bool:
        """Whether this version of the file was found to hold finite numbers only."""
        entry = self._entry(path, _stamp(path))
        return entry is not None and entry.get("finite") is True

    def mark_finite(self, path: Path) -> None:
        """Remember that the file, whose digest is known, holds finite numbers only."""
        entry = self._entry(path, _stamp(path))
        if entry is not None:
            self._record(path, {**entry, "finite": True})

    def _entry(self, path: Path, stamp: list[int]) -> dict[str, Any] | None:
        entry = self._entries.get(str(path.resolve()))
        known = (
            isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str)
        )
        return entry if known else None

    def _stored_entries(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            entries = json.loads(self._path.read_bytes())
            return entries if isinstance(entries, dict) else {}
        return {}

    def _record(self, path: Path, entry: dict[str, Any]) -> None:
        self._entries = self._stored_entries() | self._entries  # other processes may have added theirs
        self._entries[str(path.resolve())] = entry
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._entries, indent=0).encode())


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
