"""What a `tokenizer.json` says, and the same tokenizer without its control tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quail.errors import ModelError

NO_BOUND = 2**31 - 1

_LARGEST_VOCABULARY = 2**24
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MARKER = re.compile(r"[<\[｜|].*[>\]｜|]", re.DOTALL)
# Most bytes of text for one byte of normalized text (U+1FEF, three bytes, becomes a grave accent).
_NORMALIZER_SHRINKAGE = {"NFC": 3, "NFD": 3}
_NO_SPACE_IN_FRONT: dict[str, dict[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace"}


@dataclass(frozen=True)
class TokenizerFacts:
    """What was found in a `tokenizer.json`.

    Attributes:
        vocab_size: one more than the highest id.
        control: ids of the control tokens by their text.
        max_token_bytes: a text of n known bytes has at least n / max_token_bytes tokens, or `NO_BOUND`.
        unknown_bytes: bytes that the vocabulary cannot spell; texts lose them.
        has_post_processor: whether the tokenizer may put something around texts.
        plain_json: the tokenizer without control tokens and without anything put around texts.
    """

    vocab_size: int
    control: dict[str, int]
    max_token_bytes: int
    unknown_bytes: bytes
    has_post_processor: bool
    plain_json: str


def analyse_tokenizer(text: str, chat_template: str, where: str) -> TokenizerFacts:
    """Read a `tokenizer.json`.

    Args:
        text: the file's content.
        chat_template: markers that it writes are control tokens, whatever their flags say.
        where: names the file in errors.

    Raises:
        ModelError: it is damaged, or no BPE.
    """
    try:
        return _analysed(_without_space_in_front(json.loads(text)), chat_template)
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{where}: no usable tokenizer.json: {error!r}") from error


def without_space_in_front(text: str) -> str:
    """A `tokenizer.json` that `analyse_tokenizer` accepted, changed to read each text as it is written."""
    return json.dumps(_without_space_in_front(json.loads(text)))


def _analysed(fields: dict[str, Any], chat_template: str) -> TokenizerFacts:
    model = fields["model"]
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise ModelError(f"tokenizers of type {kind!r} are not supported; BPE is")
    vocab: dict[str, int] = model["vocab"]
    added: list[dict[str, Any]] = fields.get("added_tokens") or []
    ids = [*vocab.values(), *(token["id"] for token in added)]
    if not all(type(i) is int and 0 <= i < _LARGEST_VOCABULARY for i in ids):
        raise ModelError(f"token ids must be whole numbers between 0 and {_LARGEST_VOCABULARY}")
    control = {token["content"]: int(token["id"]) for token in added if _is_control(token, chat_template)}
    unknown_bytes = _unknown_bytes(fields)
    return TokenizerFacts(
        vocab_size=1 + max(ids, default=-1),
        control=control,
        max_token_bytes=_max_token_bytes(fields, control, unknown_bytes),
        unknown_bytes=unknown_bytes,
        has_post_processor=bool(fields.get("post_processor")),
        plain_json=json.dumps(_without_control(fields, control)),
    )


def _is_control(token: dict[str, Any], template: str) -> bool:
    """Whether an added token has a meaning of its own rather than standing for its characters."""
    content: str = token["content"]
    if token.get("special"):
        return True
    if not content or content.isspace():
        return False
    written_by_template = content in template and not content.isalnum()
    return written_by_template or _MARKER.fullmatch(content) is not None


def _without_space_in_front(fields: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, but each piece of a prompt is read as it is written.

    SentencePiece tokenizers put a space in front of a text, which stands right only at the start of a prompt.
    """
    kept = {
        "normalizers": [s for s in _steps(fields.get("normalizer"), "normalizers") if s["type"] != "Prepend"],
        "pretokenizers": [
            {**step, **_NO_SPACE_IN_FRONT.get(step["type"], {})}
            for step in _steps(fields.get("pre_tokenizer"), "pretokenizers")
        ],
        "decoders": [
            {**step, **_NO_SPACE_IN_FRONT.get(step["type"], {})}
            for step in _steps(fields.get("decoder"), "decoders")
            if step["type"] != "Strip"
        ],
    }
    names = {"normalizers": "normalizer", "pretokenizers": "pre_tokenizer", "decoders": "decoder"}
    changed = {names[k]: {"type": "Sequence", k: steps} if steps else None for k, steps in kept.items()}
    return {**fields, **changed}


def _without_control(fields: dict[str, Any], control: dict[str, int]) -> dict[str, Any]:
    """The same tokenizer without control tokens, even in its vocabulary, and with nothing around texts."""
    kept = [token for token in fields.get("added_tokens") or [] if token["content"] not in control]
    model = dict(fields["model"])
    unknown = model.get("unk_token")
    hidden = {content for content in control if content != unknown}
    vocab = {token: i for token, i in model["vocab"].items() if token not in hidden}
    model["vocab"] = vocab | {token["content"]: token["id"] for token in kept}
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    model["merges"] = [
        [a, b] for a, b in pairs if a + b not in hidden and a not in hidden and b not in hidden
    ]
    plain = {"post_processor": None, "truncation": None, "padding": None}
    return {**fields, **plain, "added_tokens": kept, "model": model}


def _max_token_bytes(fields: dict[str, Any], control: dict[str, int], unknown_bytes: bytes) -> int:
    """The longest token in bytes, times what the normalizer may shrink a text by."""
    model, added = fields["model"], fields.get("added_tokens") or []
    kept = [token for token in added if token["content"] not in control]
    shrinkage = 1
    for step in _steps(fields.get("normalizer"), "normalizers"):
        keeps_length = step["type"] == "Replace" and step.get("pattern") == {"String": " "}
        shrinkage *= 1 if keeps_length else _NORMALIZER_SHRINKAGE.get(step["type"], NO_BOUND)
    for step in _steps(fields.get("pre_tokenizer"), "pretokenizers"):
        isolates = step["type"] == "Split" and step.get("behavior") == "Isolated"
        shrinkage *= 1 if isolates or step["type"] in _KEEPING_PRE_TOKENIZERS else NO_BOUND
    byte_level = _is_byte_level(fields)
    one_each = model.get("unk_token") is not None and not model.get("fuse_unk")
    spells_all = byte_level or model.get("byte_fallback") or one_each
    swallows_space = any(token.get("lstrip") or token.get("rstrip") for token in kept)
    if not spells_all or swallows_space or (unknown_bytes and shrinkage > 1):
        return NO_BOUND
    lengths = [_token_bytes(token, byte_level) for token in model["vocab"] if token not in control]
    lengths += [len(token["content"].encode("utf-8", "replace")) for token in kept]
    return min(NO_BOUND, max([1, *lengths]) * shrinkage)


def _unknown_bytes(fields: dict[str, Any]) -> bytes:
    """The bytes that a byte-level vocabulary has no token for; texts lose them."""
    if not _is_byte_level(fields):
        return b""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # stand for themselves
    hidden = [byte for byte in range(256) if byte not in shown]  # moved behind U+0100, in order
    characters = {byte: chr(byte) for byte in shown} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
    return bytes(byte for byte, character in characters.items() if character not in fields["model"]["vocab"])


def _is_byte_level(fields: dict[str, Any]) -> bool:
    return any(s["type"] == "ByteLevel" for s in _steps(fields.get("pre_tokenizer"), "pretokenizers"))


def _steps(component: dict[str, Any] | None, list_name: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    return list(component[list_name]) if component.get("type") == "Sequence" else [component]


def _token_bytes(token: str, byte_level: bool) -> int:
    if byte_level:  # one character stands for one byte
        return len(token)
    return 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace("▁", " ").encode("utf-8", "replace"))
