"""What may happen to a file of the cache."""

from __future__ import annotations

from pathlib import Path


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-8] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"[" * 5000)
