"""Small damages to small valid inputs; what is drawn depends on the random generator alone."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

EDGE_INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 4095, 65535, 65536),
    *(2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
NO_TEXT = (b"\xff", b"\xfe\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"\xef\xbb\xbf")
"""Bytes that are not UTF-8, a lone surrogate, one code point too many, NUL, a byte order mark."""


def damaged(random: Random, raw: bytes, fields: Sequence[int] = ()) -> bytes:
    """Bytes with one to four damages.

    Args:
        random: decides.
        raw: what is damaged.
        fields: offsets of numbers in `raw`, which half of the damages aim at.
    """
    data = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.choice(fields) if fields and random.random() < 0.5 else random.randrange(len(data) + 1)
        _damage(random, data, at)
    return bytes(data)


def _damage(random: Random, data: bytearray, at: int) -> None:
    match random.randrange(9):
        case 0 if at < len(data):
            data[at] ^= 1 << random.randrange(8)
        case 1 if at < len(data):
            data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, random.randrange(256)))
        case 2 | 3 | 4:
            size = random.choice((1, 2, 4, 8))
            value = random.choice((*EDGE_INTEGERS, len(data), len(data) - 1, len(data) + 1))
            data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        case 5:
            del data[at:]
        case 6:
            del data[at : at + random.randrange(1, 40)]
        case 7:
            start = random.randrange(len(data) + 1)
            data[at:at] = data[start : start + random.randrange(1, 200)]
        case _:
            data[at:at] = random.choice(NO_TEXT)


EDGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "a", " ", "\0", "\ud800", "\U0001f600", "x" * 2000, "llama", "../x", "/etc/passwd", "9" * 5000),
    *([], {}, [[]], [None], [0], [""], {"": None}, {"type": "Sequence"}, {"type": "BPE"}, [{}], [[], {}]),
)


def damaged_json(random: Random, value: Any) -> bytes:
    """The text of a value with one to three entries replaced, removed, doubled or nested deeply."""
    tree = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        tree = _changed(random, tree)
    text = json.dumps(tree)
    if random.random() < 0.1:
        text = _with_a_key_twice(random, text)
    if random.random() < 0.05:
        depth = random.choice((100, 900, 5000, 100_000))
        text = text.replace("null", "[" * depth + "]" * depth, 1) if "null" in text else "[" * depth + text
    raw = text.encode()
    return damaged(random, raw) if random.random() < 0.2 else raw


def _changed(random: Random, tree: Any) -> Any:
    """The tree with one change at a random place."""
    places = list(_places(tree))
    if not places:
        return copy.deepcopy(random.choice(EDGE_VALUES))
    holder, key = random.choice(places)
    match random.randrange(6):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(random.choice(EDGE_VALUES))
        case 3:
            del holder[key]
        case 4:
            other_holder, other_key = random.choice(places)
            value = json.loads(json.dumps(other_holder[other_key])) if _has(other_holder, other_key) else None
            if isinstance(holder, list):
                holder.insert(key, value)
            else:
                holder[f"{key}{random.choice(('', 'x'))}"] = value
        case _:
            for _ in range(random.choice((1, 3, 50))):
                holder[key] = random.choice(([holder[key]], {"type": "Sequence", "a": holder[key]}))
    return tree


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(tree: Any) -> Any:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from _places(value)


def _with_a_key_twice(random: Random, text: str) -> str:
    at = [i for i, character in enumerate(text) if character == "{"]
    if not at:
        return text
    start = random.choice(at) + 1
    key = text[start : text.find(":", start)]
    return f"{text[:start]}{key}: {random.choice(('1', 'null', '[]'))}, {text[start:]}" if key else text


def number_offsets(raw: bytes, texts: Sequence[bytes]) -> list[int]:
    """Offsets of the lengths in front of texts and of the numbers behind them."""
    found = [4, 8, 16]
    for text in texts:
        at = raw.find(struct.pack("<Q", len(text)) + text)
        if at >= 0:
            behind = at + 8 + len(text)
            found += [at, behind, behind + 4, behind + 8, behind + 12]
    return found
