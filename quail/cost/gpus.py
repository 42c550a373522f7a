"""Rates of GPUs: the makers' figures for common cards, and those that a user gives instead.

Products in bfloat16 are dense, without sparsity, accumulated in float32; float32 products run on the ordinary
units, not in TF32. Nothing here was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quail.cost.roofline import Rates
from quail.errors import ConfigError

ATTENTION_SHARE = 0.5
"""Rate of attention as a share of that of products: an estimate, on no data sheet."""

OWN_RATES_FILE = "gpus.json"
"""In the folder `rates` of the cache folder: rates by (part of) a card's name, instead of the table's."""

_OTHER = frozenset(("D", "GRID", "LAPTOP", "MAX", "MIG", "SUPER", "TI"))
"""Words of names that say that it is not the card of that name: more, less, or a part of it."""

_SLICE = re.compile(r"\d+[QCAB]|\d+CME")
"""A word of names of virtual GPUs: gigabytes of memory and a profile, as in A10-4Q."""

_FIELDS = ("matmul_flops", "attention_flops", "memory_bytes", "row_bytes")


@dataclass(frozen=True)
class Card:
    """What a data sheet says of a card.

    Attributes:
        bfloat16_flops: dense products a second; None where the card has no such units.
        float32_flops: the same of float32.
        memory_bytes: memory bandwidth in bytes a second.
    """

    bfloat16_flops: float | None
    float32_flops: float
    memory_bytes: float

    def rates(self, dtype: str) -> Rates | None:
        """Rates in `bfloat16` or `float32`; None where the card lacks the first."""
        flops = self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops
        return None if flops is None else Rates(flops, ATTENTION_SHARE * flops, self.memory_bytes)


@dataclass(frozen=True)
class SourcedRates:
    """Rates of a GPU to plan with.

    Attributes:
        rates: operations and bytes a second.
        source: where they come from, in words.
        is_known: whether they are of this card; else they are of another, taken in its place.
    """

    rates: Rates
    source: str
    is_known: bool = True

    @property
    def known(self) -> Rates | None:
        """The rates if they are of this card."""
        return self.rates if self.is_known else None


CARDS = {
    "A10": Card(125e12, 31.2e12, 600e9),
    "A100 PCIE 40GB": Card(312e12, 19.5e12, 1555e9),
    "A100 SXM4 40GB": Card(312e12, 19.5e12, 1555e9),
    "A100 80GB PCIe": Card(312e12, 19.5e12, 1935e9),
    "A100 SXM4 80GB": Card(312e12, 19.5e12, 2039e9),
    "B200": Card(2250e12, 75e12, 7.7e12),
    "H100 PCIe": Card(756e12, 51e12, 2.0e12),
    "H100 80GB HBM3": Card(989e12, 67e12, 3.35e12),
    "H100 NVL": Card(835e12, 60e12, 3.9e12),
    "H200": Card(989e12, 67e12, 4.8e12),
    "H200 NVL": Card(835e12, 60e12, 4.8e12),
    "L4": Card(121e12, 30.3e12, 300e9),
    "L40S": Card(362e12, 91.6e12, 864e9),
    "MI300X": Card(1307e12, 163.4e12, 5.3e12),
    "RTX 3090": Card(71e12, 35.6e12, 936e9),
    "RTX 4090": Card(165e12, 82.6e12, 1008e9),
    "RTX 5090": Card(209.5e12, 104.8e12, 1792e9),
    "T4": Card(None, 8.1e12, 320e9),
}
"""By the words of the name that the driver gives a card. The SXM cards of the H100 call themselves HBM3."""

ASSUMED_CARD = CARDS["A100 SXM4 80GB"]
"""Planned with where a card is in no table; nothing is told of its speed of light."""


def rates_of_card(name: str, dtype: str, own: Mapping[str, Rates]) -> SourcedRates:
    """Rates of a GPU: the user's, else those of the table, else `assumed_rates`.

    Args:
        name: as the driver gives it, such as `NVIDIA A100-SXM4-80GB`.
        dtype: `bfloat16` or `float32`.
        own: the user's rates, by (part of) a name; they are taken for any dtype.
    """
    words = _words(name)
    mine = _best(words, own)
    if mine is not None:
        return SourcedRates(own[mine], f"yours ({OWN_RATES_FILE})")
    is_other = words & _OTHER or any(_SLICE.fullmatch(word) for word in words)
    found = None if is_other else _best(words, CARDS)
    rates = None if found is None else CARDS[found].rates(dtype)
    if rates is not None:
        return SourcedRates(rates, f"by a table ({found})")
    return SourcedRates(assumed_rates(dtype), f"assumed as an A100's: no table has {name}", is_known=False)


def assumed_rates(dtype: str) -> Rates:
    """Rates to plan with on a card that is in no table: those of `ASSUMED_CARD`."""
    found = ASSUMED_CARD.rates(dtype)
    assert found is not None
    return found


def own_rates(cache_dir: Path) -> dict[str, Rates]:
    """The user's rates, from `rates/gpus.json` of the cache folder; none without the file.

    Raises:
        ConfigError: the file is not what it should be, or cannot be read.
    """
    path = cache_dir / "rates" / OWN_RATES_FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="delete it, or repair it"
        ) from None
    example = '{"RTX 6000": {"matmul_flops": 1.8e14, "attention_flops": 9e13, "memory_bytes": 9.6e11}}'
    try:
        return {name: _rates(given) for name, given in json.loads(data).items() if _words(name)}
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} does not hold rates of GPUs: {error}", hint=f"such as {example}") from None


def _rates(given: Mapping[str, float]) -> Rates:
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(_FIELDS)}")
    missing = [name for name in _FIELDS[:3] if name not in given]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name} = {value!r} is not a rate a second")
    return Rates(**{name: float(value) for name, value in given.items()})


def _words(name: str) -> frozenset[str]:
    return frozenset(name.upper().replace("-", " ").split())


def _best(words: frozenset[str], table: Mapping[str, object]) -> str | None:
    """The entry all of whose words are among those of a name; of several, the one that says most."""
    found = [key for key in table if _words(key) <= words]
    return max(found, key=lambda key: len(_words(key)), default=None)
