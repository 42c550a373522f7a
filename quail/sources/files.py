"""Files as sources: which files a path or glob names, and the only door through which DuckDB may read them.

A session switches DuckDB's external access off for good, and DuckDB then refuses to widen the list of allowed
files. So registered files are served through a read-only file system of our own under the prefix `quail://`:
it knows exactly the registered files, DuckDB's own readers do the rest, and no statement can write to them.
"""

from __future__ import annotations

import glob
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from quail.errors import SourceError

PREFIX = "quail://"

_READERS = {
    ".parquet": "read_parquet",
    ".pq": "read_parquet",
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".jsonl": "read_json",
    ".ndjson": "read_json",
    ".json": "read_json",
}
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Files:
    """The files of one source.

    Attributes:
        paths: absolute paths, sorted; at least one.
        reader: the DuckDB table function that reads them.
    """

    paths: tuple[str, ...]
    reader: str

    @property
    def kind(self) -> str:
        """`parquet`, `csv` or `json`."""
        return self.reader.removeprefix("read_")


def find_files(name: str, source: str | os.PathLike[str]) -> Files:
    """The files that a path or glob names now.

    Args:
        name: the table, for messages.
        source: a path, or a glob with `*`, `?`, `[…]` or `**`.

    Raises:
        SourceError: nothing there, a folder, a remote address, or a format that cannot be read.
    """
    text = os.fspath(source)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise SourceError(
            f"table {name!r}: {text!r} is a remote address, which a session does not read",
            hint="download it first and register the file",
        )
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path):
        raise SourceError(
            f"table {name!r}: {text!r} is a folder",
            hint=f"name its files with a glob: {text.rstrip('/')}/*.parquet",
        )
    if os.path.exists(path):
        paths = [path]
    elif glob.has_magic(path):
        paths = sorted(each for each in glob.glob(path, recursive=True) if os.path.isfile(each))
        if not paths:
            raise SourceError(f"table {name!r}: no file matches {text!r}", hint=_where(path))
    else:
        raise SourceError(f"table {name!r}: there is no file {text!r}", hint=_where(path))
    readers = {_reader(name, each) for each in paths}
    if len(readers) > 1:
        kinds = ", ".join(sorted(reader.removeprefix("read_") for reader in readers))
        raise SourceError(f"table {name!r}: {text!r} matches files of several formats: {kinds}")
    return Files(tuple(paths), readers.pop())


def _where(path: str) -> str | None:
    """Says what there is near a path that does not exist."""
    folder = Path(path).parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder != Path(path).parent:
        return f"the nearest folder that exists is {folder}"
    kin = sorted(each.name for each in folder.iterdir() if _suffix(each.name) in _READERS)
    return f"{folder} holds " + (
        ", ".join(kin[:8]) + (", …" if len(kin) > 8 else "") if kin else "no data files"
    )


def _suffix(path: str) -> str:
    stem, suffix = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if suffix in _COMPRESSIONS else suffix


def _reader(name: str, path: str) -> str:
    reader = _READERS.get(_suffix(path))
    if reader is not None:
        return reader
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"PAR1":
                return "read_parquet"
    except OSError as error:
        raise SourceError(f"table {name!r}: cannot read {path!r}: {error.strerror}") from None
    raise SourceError(
        f"table {name!r}: {path!r} has no known format",
        hint=f"known are {', '.join(_READERS)}, the last five also with {' or '.join(_COMPRESSIONS)}",
    )


class RegisteredFiles(AbstractFileSystem):  # type: ignore[misc]
    """A read-only file system of exactly the registered files.

    An address is `quail://<number of the registration>/<number of the file>-<its name>`, so a table that is
    registered again never changes what an older query reads.
    """

    protocol = "quail"
    cachable = False

    def __init__(self) -> None:
        super().__init__(skip_instance_cache=True)
        self._paths: dict[str, str] = {}
        self._num_registrations = 0

    def add(self, paths: Sequence[str]) -> list[str]:
        """Makes files readable; returns their addresses in order."""
        number = self._num_registrations
        self._num_registrations += 1
        keys = [f"{number}/{i:06d}-{_plain(path)}" for i, path in enumerate(paths)]
        self._paths.update(zip(keys, paths, strict=True))
        return [PREFIX + key for key in keys]

    def real_names(self, message: str) -> str:
        """A message with the real paths in the addresses' places."""
        return re.sub(
            r"quail://[^\s'\"]+", lambda match: self._paths.get(match[0][len(PREFIX) :], match[0]), message
        )

    def _path(self, path: str) -> str:
        key = str(path).removeprefix(PREFIX)
        if key not in self._paths:
            raise FileNotFoundError(f"no registered file {path!r}")
        return self._paths[key]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _SharedFile:
        if mode not in ("r", "rb"):
            raise PermissionError("registered files are read-only")
        return _SharedFile(self._path(path))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, type and size in bytes."""
        return {"name": path, "size": os.stat(self._path(path)).st_size, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        """Whether the address is that of a registered file."""
        return str(path).removeprefix(PREFIX) in self._paths

    def isdir(self, path: str) -> bool:
        """Never: there are only files."""
        return False

    def glob(self, path: str, **_: Any) -> list[str]:
        """The address itself, if it is one."""
        return [path] if self.exists(path) else []

    def modified(self, path: str) -> datetime:
        """When the file was last changed."""
        return datetime.fromtimestamp(os.stat(self._path(path)).st_mtime, tz=UTC)


class _SharedFile:
    """A file that several threads read at once, each by a seek and the read that follows it.

    DuckDB shares one handle between its threads. A seek therefore counts only for the next read of its own
    thread; a read without one goes on where the last read of any thread ended.
    """

    _descriptor = -1

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._next = 0
        self._seek = threading.local()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Where this thread's next read begins."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size()}
        self._seek.offset = max(0, start[whence] + offset)
        return int(self._seek.offset)

    def tell(self) -> int:
        """Where this thread's next read begins."""
        offset = getattr(self._seek, "offset", None)
        return self._next if offset is None else int(offset)

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        start = self.tell()
        left = self._size() - start
        left = left if size < 0 else min(size, left)
        pieces = []
        offset = start
        while left > 0 and (piece := os.pread(self._descriptor, left, offset)):
            pieces.append(piece)
            offset += len(piece)
            left -= len(piece)
        self._seek.offset = None
        self._next = offset
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Gives the file back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # DuckDB drops some files without closing them

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._descriptor < 0

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size


def _plain(path: str) -> str:
    """The file's name without characters that mean something in an address."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(path))[-80:]
