"""Document texts to prefix ids, with the lengths checked before anything expensive happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quail.arrays import to_numbers
from quail.errors import QuailError
from quail.execution.stages import Int32s, Pieces

if TYPE_CHECKING:
    from quail.models.tokenizer import Tokenizer

ALWAYS_TOKENIZED_BYTES = 2**18
"""Texts up to this size are tokenized to their end even when they cannot fit, so that messages have exact
lengths."""


SEARCHED_TEXTS = 256
"""A text at fault is searched in so many at a time."""


@dataclass(frozen=True, eq=False)
class PrefixIds:
    """Prefix ids of one document.

    Attributes:
        ids: label and document; cut behind the model's context, since no prompt can hold more.
        num_tokens: tokens of the whole prefix; a lower bound where `is_exact` is False.
        is_exact: False for a text so long that it was not tokenized to its end.
        fault: why the text could not be tokenized; it has no ids then.
    """

    ids: Int32s
    num_tokens: int
    is_exact: bool
    fault: str = ""


class DocumentEncoder:
    """Tokenizes documents for one model and layout.

    Args:
        tokenizer: of the model.
        pieces: the layout's fixed ids.
        context_tokens: longest prompt of the model.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: Pieces, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._before = pieces.prefix
        self._context_tokens = context_tokens
        # A text of more bytes can hardly fit: no token holds more. (Bytes that no token holds may vanish.)
        self._longest_bytes = max(ALWAYS_TOKENIZED_BYTES, (context_tokens + 1) * tokenizer.max_token_bytes)

    def encode(self, texts: pa.Array) -> list[PrefixIds]:
        """Prefix ids of each text (no NULLs), in order."""
        return self._encode(texts, self._before)

    def encode_partners(self, texts: pa.Array) -> list[PrefixIds]:
        """Ids of each text as a partner, behind a frame: no label of its own."""
        return self._encode(texts, self._before[:0])

    def _encode(self, texts: pa.Array, before: Int32s) -> list[PrefixIds]:
        """Texts that cannot be tokenized have their fault in the others' midst."""
        try:
            return self._encode_all(texts, before)
        except BaseException as error:
            if not _is_of_a_text(error):
                raise
            if len(texts) == 1:
                fault = f"the text cannot be tokenized: {_reason(error)}"
                return [PrefixIds(before[:0], 0, is_exact=True, fault=fault)]
        size = min(SEARCHED_TEXTS, -(-len(texts) // 2))
        parts = [texts.slice(start, size) for start in range(0, len(texts), size)]
        return [found for part in parts for found in self._encode(part, before)]

    def _encode_all(self, texts: pa.Array, before: Int32s) -> list[PrefixIds]:
        sizes = to_numbers(pc.binary_length(texts)).astype(np.int64)
        is_long = sizes > self._longest_bytes
        if is_long.any():
            values = [
                _head(text, self._longest_bytes) if long else text
                for text, long in zip(texts.to_pylist(), is_long.tolist(), strict=True)
            ]
            flat, offsets = self._tokenizer.encode_plain(values)
        else:
            flat, offsets = self._tokenizer.encode_plain(texts)
        found = []
        for place in range(len(texts)):
            ids, is_exact = flat[offsets[place] : offsets[place + 1]], not is_long[place]
            if not is_exact and len(before) + len(ids) < self._context_tokens:
                ids, is_exact = self._tokenizer.encode_plain([texts[place].as_py()])[0], True
            whole = np.concatenate([before, ids])
            found.append(PrefixIds(whole[: self._context_tokens], len(whole), is_exact))
        return found


def _is_of_a_text(error: BaseException) -> bool:
    """Whether tokenizing failed because of a text; panics of the tokenizers package are no `Exception`."""
    is_panic = type(error).__name__ == "PanicException"
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))


def _reason(error: BaseException) -> str:
    lines = (error.message if isinstance(error, QuailError) else str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _head(text: str, num_bytes: int) -> str:
    """The beginning of a text, cut at a character, of at most `num_bytes` bytes of UTF-8."""
    return text.encode()[:num_bytes].decode(errors="ignore")
