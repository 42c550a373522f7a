"""Rates of GPUs: found by the names that drivers give, and overridden by a file."""

from __future__ import annotations

import json

import pytest

from quail.cost.gpus import CARDS, assumed_rates, own_rates, rates_of_card
from quail.cost.roofline import Rates
from quail.errors import ConfigError

NAMES = {
    "NVIDIA A10": "A10",
    "NVIDIA A100-PCIE-40GB": "A100 PCIE 40GB",
    "NVIDIA A100-SXM4-40GB": "A100 SXM4 40GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A100-SXM4-80GB": "A100 SXM4 80GB",
    "NVIDIA B200": "B200",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100 80GB HBM3",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "Tesla T4": "T4",
}


def test_every_card_is_found_by_its_own_name() -> None:
    assert set(NAMES.values()) == set(CARDS)
    for name, key in NAMES.items():
        for dtype in ("bfloat16", "float32"):
            assert rates_of_card(name, dtype, {}) == CARDS[key].rates(dtype), name


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "NVIDIA RTX A4000",
        "Some Card 9",
    ],
)
def test_a_card_that_only_sounds_alike_is_not_known(name: str) -> None:
    assert rates_of_card(name, "bfloat16", {}) is None


def test_a_card_without_bfloat16_has_no_rate_of_it() -> None:
    assert rates_of_card("Tesla T4", "bfloat16", {}) is None
    assert rates_of_card("Tesla T4", "float32", {}) == Rates(8.1e12, 4.05e12, 320e9)
    assert assumed_rates("bfloat16").matmul_flops == 312e12


def test_the_users_file_wins(tmp_path) -> None:
    assert own_rates(tmp_path) == {}
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    given = {"matmul_flops": 1e14, "attention_flops": 5e13, "memory_bytes": 10**12}
    path.write_text(json.dumps({"H200": given, "Card 9": given | {"row_bytes": 2e12}}))
    own = own_rates(tmp_path)
    assert rates_of_card("NVIDIA H200", "bfloat16", own) == Rates(1e14, 5e13, 1e12)
    assert rates_of_card("Some Card 9", "float32", own) == Rates(1e14, 5e13, 1e12, 2e12)
    assert rates_of_card("NVIDIA H100 NVL", "bfloat16", own) == CARDS["H100 NVL"].rates("bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not hold rates of GPUs"),
        ("[]", "does not hold rates of GPUs"),
        ('{"H200": 3}', "does not hold rates of GPUs"),
        ('{"H200": {"matmul_flops": 1e14, "attention_flops": 5e13}}', "memory_bytes is missing"),
        (
            '{"H200": {"matmul_flops": 1, "attention_flops": 1, "memory_bytes": 1, "tflops": 1}}',
            "'tflops' is none of matmul_flops",
        ),
        (
            '{"H200": {"matmul_flops": -1, "attention_flops": 1, "memory_bytes": 1}}',
            "matmul_flops = -1 is not a rate",
        ),
        (
            '{"H200": {"matmul_flops": "fast", "attention_flops": 1, "memory_bytes": 1}}',
            "matmul_flops = 'fast' is not a rate",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match="gpus.json") as found:
        own_rates(tmp_path)
    assert message in str(found.value)
    assert "such as" in str(found.value)
