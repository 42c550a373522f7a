"""A `tokenizer.json` made from the metadata of a GGUF file.

GGUF stores vocabulary and merges, but names the pre-tokenizer by a tag only (`tokenizer.ggml.pre`); a missing
or unknown tag is refused, because a wrong split gives other tokens without any error.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quail.errors import ModelError
from quail.models.gguf_file import NumberArray
from quail.models.tokenizer import TokenizerSource

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LONGEST_TOKEN = 4096
_MOST_PAIRS_A_TOKEN = 32
"""Vocabularies in use have two or three on average."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is split before merges apply, and what else goes with that kind of tokenizer."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = _PreTokenizer(
    (_split(_CONTRACTIONS + r"\p{N}{1,3}" + _PUNCTUATION_AND_SPACE), _byte_level(False)),
    ignore_merges=True,
    add_bos=True,
)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer((_byte_level(True),)),
    "smollm": _PreTokenizer((_DIGITS, _byte_level(True))),
    "qwen2": _PreTokenizer(
        (_split(_CONTRACTIONS + r"\p{N}" + _PUNCTUATION_AND_SPACE), _byte_level(False)),
        normalizer={"type": "NFC"},
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> TokenizerSource:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ModelError: parts are missing or contradict each other, or the kind or pre-tokenizer is unknown.
    """
    vocabulary = _Vocabulary.read(metadata, where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        fields, add_bos = _byte_level_tokenizer(vocabulary, metadata, where)
    elif kind == "llama":
        fields, add_bos = _sentencepiece_tokenizer(vocabulary, metadata, where)
    else:
        raise ModelError(f"{where}: unknown tokenizer model {reprlib.repr(kind)}", hint="known: gpt2, llama")
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    if not isinstance(flag, bool | None):
        raise ModelError(f"{where}: tokenizer.ggml.add_bos_token is {reprlib.repr(flag)}, not a Boolean")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSource(
        json=json.dumps(fields, ensure_ascii=False),
        add_bos=add_bos if flag is None else flag,
        bos_token=vocabulary.token(metadata, "bos", where),
        eos_token=vocabulary.token(metadata, "eos", where),
        chat_template=template if isinstance(template, str) else None,
    )


def _texts(metadata: Mapping[str, Any], name: str, where: str) -> Sequence[str]:
    """An array of texts of the metadata; empty if there is none."""
    values = metadata.get(f"tokenizer.ggml.{name}", ())
    if isinstance(values, NumberArray) and not len(values):
        return ()
    if not isinstance(values, tuple) or not all(type(value) is str for value in values):
        raise ModelError(f"{where}: tokenizer.ggml.{name} is no array of texts")
    return values


def _numbers(kinds: str, metadata: Mapping[str, Any], name: str, where: str, count: int) -> Sequence[Any]:
    """An array of `count` numbers of the metadata, of numpy's `kinds`; empty if there is none.

    It becomes Python objects only if it has as many entries as there are tokens.
    """
    values = metadata.get(f"tokenizer.ggml.{name}", ())
    if values == ():
        return ()
    if not isinstance(values, NumberArray) or values.values.dtype.kind not in kinds:
        raise ModelError(f"{where}: tokenizer.ggml.{name} is no array of such numbers")
    if len(values) != count:
        raise ModelError(f"{where}: {count} tokens, but tokenizer.ggml.{name} has {len(values)} entries")
    found: list[Any] = values.values.tolist()
    return found


@dataclass(frozen=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], where: str) -> _Vocabulary:
        tokens = _texts(metadata, "tokens", where)
        if not tokens:
            raise ModelError(f"{where}: the vocabulary (tokenizer.ggml.tokens) is missing")
        longest = max(map(len, tokens))
        if longest > _LONGEST_TOKEN:
            raise ModelError(f"{where}: a token of {longest} characters; at most {_LONGEST_TOKEN} are read")
        types = _numbers("iu", metadata, "token_type", where, len(tokens)) or [_NORMAL] * len(tokens)
        twice = next((token for token, count in Counter(tokens).items() if count > 1), None)
        if twice is not None:
            raise ModelError(f"{where}: the token {reprlib.repr(twice)} occurs twice in the vocabulary")
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def added(self) -> list[dict[str, Any]]:
        """Control and user-defined tokens, as `tokenizer.json` lists them."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **flags, "special": kind != _USER_DEFINED}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def token(self, metadata: Mapping[str, Any], name: str, where: str) -> str | None:
        """Text of the BOS, EOS or unknown token."""
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ModelError(
                f"{where}: the {name} token is {reprlib.repr(index)}, but there are {len(self.tokens)} tokens"
            )
        return self.tokens[index]


def _byte_level_tokenizer(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], bool]:
    tag = metadata.get("tokenizer.ggml.pre")
    if tag not in _PRE_TOKENIZERS:
        fault = "no pre-tokenizer is named" if tag is None else f"unknown pre-tokenizer {reprlib.repr(tag)}"
        raise ModelError(
            f"{where}: {fault} (tokenizer.ggml.pre)",
            hint=f"known: {', '.join(_PRE_TOKENIZERS)}; or use the model's folder with its tokenizer.json",
        )
    pre_tokenizer = _PRE_TOKENIZERS[tag]
    merges = _texts(metadata, "merges", where)
    if not merges:
        raise ModelError(f"{where}: the merges (tokenizer.ggml.merges) are missing")
    pairs = [merge.split(" ") for merge in merges]
    wrong = next((index for index, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(f"{where}: merge {wrong} is {reprlib.repr(merges[wrong])}; two tokens are needed")
    model = _bpe_model(vocabulary.ids(), pairs) | {"ignore_merges": pre_tokenizer.ignore_merges}
    fields = _tokenizer_fields(
        vocabulary,
        model,
        normalizer=pre_tokenizer.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)},
        decoder=_byte_level(True),
    )
    return fields, pre_tokenizer.add_bos


def _sentencepiece_tokenizer(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE: no merges are stored; the pair whose joint piece scores best merges first."""
    scores = _numbers("f", metadata, "scores", where, len(vocabulary.tokens))
    if not scores:
        raise ModelError(f"{where}: the scores (tokenizer.ggml.scores) are missing")
    ids = vocabulary.ids()
    ordinary = {
        token: token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind == _NORMAL
    }
    ranked: list[tuple[float, int, list[str]]] = []
    for token in ordinary:
        for cut in range(1, min(len(token), 512)):
            head = ordinary.get(token[:cut])
            tail = None if head is None else ordinary.get(token[cut:])
            if head is not None and tail is not None:
                ranked.append((-scores[ids[token]], ids[token], [head, tail]))
        if len(ranked) > _MOST_PAIRS_A_TOKEN * len(ids):
            raise ModelError(
                f"{where}: over {len(ranked)} pairs of its {len(ids)} tokens make a token; at most "
                f"{_MOST_PAIRS_A_TOKEN} a token are read"
            )
    ranked.sort()
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoder: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    model = _bpe_model(ids, [pair for _, _, pair in ranked])
    model |= {
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": vocabulary.token(metadata, "unknown", where),
    }
    fields = _tokenizer_fields(
        vocabulary,
        model,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoder},
    )
    return fields, True


def _bpe_model(ids: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _tokenizer_fields(
    vocabulary: _Vocabulary,
    model: dict[str, Any],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
