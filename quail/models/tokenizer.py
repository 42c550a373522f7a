"""Text to token ids, on the `tokenizers` package alone.

Two tokenizers stand behind one: the model's own, in which control tokens such as `<|im_end|>` are recognized
(for text of the model's chat template), and a plain one that does not know them (for everything that users
bring), so that a document which spells a control token is read as the characters that it is. Neither puts a
space in front of a text, because a text is one piece of a prompt.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from quail.errors import ModelError, QuailError, RowError
from quail.models.tokenizer_json import TokenizerFacts, analyse_tokenizer, without_space_in_front

_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class TokenizerSource:
    """All that a model's files say about its tokenizer.

    Attributes:
        json: a `tokenizer.json`.
        add_bos: whether prompts begin with the BOS token; None leaves it to the post-processor in `json`.
        bos_token: text of the BOS token.
        eos_token: text of the EOS token.
        chat_template: the model's Jinja chat template.
    """

    json: str
    add_bos: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None


class Tokenizer:
    """Encodes plain text and template text of one model.

    Attributes:
        vocab_size: one more than the highest id.
        control_ids: ids that plain text never becomes.
        bos_ids: what the model's own tokenizer puts in front of every prompt; empty if nothing.
        max_token_bytes: a text of n bytes, not counting `unknown_bytes`, has at least n / max_token_bytes
            tokens; 2**31 - 1 if there is no bound. See `fewest_tokens`.
        unknown_bytes: bytes that the vocabulary has no token for. Texts lose them, as in the model's own
            tokenizer (SmolLM2 lacks six ASCII control characters and bytes of unassigned code points).

    Raises:
        ModelError: the tokenizer is damaged or of a kind that is not supported.
    """

    def __init__(self, source: TokenizerSource, where: str = "the tokenizer") -> None:
        self._source = source
        self._where = where
        facts = analyse_tokenizer(source.json, source.chat_template or "", where)
        self.vocab_size: int = facts.vocab_size
        self.control_ids: frozenset[int] = frozenset(facts.control.values())
        self.max_token_bytes: int = facts.max_token_bytes
        self.unknown_bytes: bytes = facts.unknown_bytes
        self._is_control = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_control[list(self.control_ids)] = True
        self._plain = _from_json(facts.plain_json, where)
        self.bos_ids: tuple[int, ...] = self._bos_ids(facts)

    @functools.cached_property
    def _full(self) -> tokenizers.Tokenizer:
        tokenizer = _from_json(without_space_in_front(self._source.json), self._where)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def encode_plain(self, texts: Sequence[str] | Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Encode texts of users: no control token, no BOS, no EOS.

        Args:
            texts: strings, or a pyarrow array of strings without NULL.

        Returns:
            The ids of all texts one after the other, and n + 1 offsets into them.

        Raises:
            RowError: an element is no string, or not valid Unicode; names its index.
        """
        items: Sequence[Any] = texts.to_pylist() if hasattr(texts, "to_pylist") else texts
        offsets = np.zeros(len(items) + 1, dtype=np.int64)
        parts: list[npt.NDArray[np.int32]] = []
        for start, batch in _batches(items):
            encodings = self._encoded(batch, start)
            lengths = [len(ids) for ids in encodings]
            parts.append(np.fromiter(chain.from_iterable(encodings), np.int32, sum(lengths)))
            offsets[start + 1 : start + 1 + len(batch)] = lengths
        np.cumsum(offsets, out=offsets)
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        if len(flat) and self._is_control[flat].any():
            position = int(np.flatnonzero(self._is_control[flat])[0])
            index = int(np.searchsorted(offsets, position, side="right")) - 1
            raise ModelError(
                f"{self._where}: text {index} becomes the control token {int(flat[position])}",
                hint="this tokenizer cannot spell every text; use another model",
            )
        return flat, offsets

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens without tokenizing it, to refuse far too long texts at once."""
        raw = text.encode("utf-8", "replace")
        num_known = len(raw) - sum(raw.count(byte) for byte in self.unknown_bytes)
        return -(-num_known // self.max_token_bytes)

    def _encoded(self, batch: Sequence[Any], start: int) -> list[list[int]]:
        for index, text in enumerate(batch, start):
            if type(text) is not str and not isinstance(text, str):
                raise RowError(f"text {index} is {type(text).__name__}, not a string")
        with _faults_named(self._where, "cannot encode"):
            try:
                encodings = self._plain.encode_batch_fast(list(batch), add_special_tokens=False)
            except TypeError:
                for index, text in enumerate(batch, start):
                    _check_unicode(text, index)
                raise
        return [encoding.ids for encoding in encodings]

    def encode_control(self, text: str) -> list[int]:
        """Encode text of the model's own template: control tokens are recognized; no BOS or EOS is added."""
        with _faults_named(self._where, "cannot encode"):
            return self._full.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        with _faults_named(self._where, "cannot decode"):
            return self._full.decode([int(i) for i in ids], skip_special_tokens=False)

    def _bos_ids(self, facts: TokenizerFacts) -> tuple[int, ...]:
        if self._source.add_bos is False or (self._source.add_bos is None and not facts.has_post_processor):
            return ()
        if self._source.add_bos:
            token = self._source.bos_token or ""
            if token not in facts.control:
                raise ModelError(
                    f"{self._where}: prompts begin with the BOS token {token!r}, which is unknown"
                )
            return (facts.control[token],)
        with _faults_named(self._where, "its post-processor fails"):
            plain = self._full.encode("a", add_special_tokens=False).ids
            whole = self._full.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        raise ModelError(f"{self._where}: its post-processor does not leave a text's own tokens as they are")


def _from_json(text: str, where: str) -> tokenizers.Tokenizer:
    with _faults_named(where, "no usable tokenizer.json"):
        return tokenizers.Tokenizer.from_str(text)


@contextlib.contextmanager
def _faults_named(where: str, what: str) -> Iterator[None]:
    """Turns what the package raises, bare exceptions and panics that are none, into model errors."""
    try:
        yield
    except QuailError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelError(f"{where}: {what}: {error}") from error
        raise


def _batches(items: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Runs of texts of about four million characters, so that memory is bounded and an interrupt is heard."""
    start, characters = 0, 0
    for index, item in enumerate(items):
        characters += len(item) if isinstance(item, str) else 0
        if characters >= _BATCH_CHARACTERS:
            yield start, items[start : index + 1]
            start, characters = index + 1, 0
    if start < len(items):
        yield start, items[start:]


def _check_unicode(text: str, index: int) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            f"text {index} is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}",
            hint="replace lone surrogates, e.g. text.encode('utf-8', 'replace').decode()",
        ) from error
