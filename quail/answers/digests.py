"""What an answer belongs to, as digests: the content of question and texts, never a row or its place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

DIGEST_BYTES = 16


def digest_of(parts: Iterable[bytes]) -> bytes:
    """16 bytes of BLAKE2b over parts, each behind its length, so that no two lists of parts run together."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def text_digest(text: str) -> bytes:
    """16 bytes of BLAKE2b over the UTF-8 of a text."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
