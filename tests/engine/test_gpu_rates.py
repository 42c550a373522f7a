"""Rates of GPUs: found by the names that drivers give, and overridden by a file."""

from __future__ import annotations

import json

import pytest
import torch

from quail.config import EngineConfig
from quail.cost.device import DeviceRates
from quail.cost.gpus import CARDS, SourcedRates, assumed_rates, own_rates, rates_of_card
from quail.cost.roofline import Rates
from quail.errors import ConfigError
from quail.execution import runner
from quail.execution.runner import Engine
from quail.kernels.choice import KernelChoice
from quail.models import device, self_check
from tests.engine.kernel_sets import plain_kernels

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
            expected, found = CARDS[key].rates(dtype), rates_of_card(name, dtype, {})
            assert found.known == expected, name
            assert found.source == f"by a table ({key})" if expected else "no table has" in found.source


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
        "NVIDIA A10-4Q",
        "NVIDIA A10-24A",
        "NVIDIA L4-8B",
        "NVIDIA A100-SXM4-40GB-20C",
        "NVIDIA A100-1-5CME",
        "GRID A100-PCIE-40GB",
        "GRID T4-2Q",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 SUPER",
        "NVIDIA GeForce RTX 4090 Max-Q",
        "NVIDIA GeForce RTX 3090 with Max-Q Design",
        "Some Card 9",
    ],
)
def test_a_card_that_only_sounds_alike_is_not_known(name: str) -> None:
    found = rates_of_card(name, "bfloat16", {})
    assert found.known is None
    assert found.rates == assumed_rates("bfloat16")
    assert found.source == f"assumed as an A100's: no table has {name}"


def test_a_card_without_bfloat16_has_no_rate_of_it() -> None:
    assert rates_of_card("Tesla T4", "bfloat16", {}).known is None
    assert rates_of_card("Tesla T4", "float32", {}).known == Rates(8.1e12, 4.05e12, 320e9)
    assert assumed_rates("bfloat16").matmul_flops == 312e12


def test_the_users_file_wins(tmp_path) -> None:
    assert own_rates(tmp_path) == {}
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    given = {"matmul_flops": 1e14, "attention_flops": 5e13, "memory_bytes": 10**12}
    path.write_text(json.dumps({"H200": given, "Card 9": given | {"row_bytes": 2e12}}))
    own = own_rates(tmp_path)
    assert rates_of_card("NVIDIA H200", "bfloat16", own) == SourcedRates(
        Rates(1e14, 5e13, 1e12), "yours (gpus.json)"
    )
    assert rates_of_card("Some Card 9", "float32", own).known == Rates(1e14, 5e13, 1e12, 2e12)
    assert rates_of_card("NVIDIA H100 NVL", "bfloat16", own).known == CARDS["H100 NVL"].rates("bfloat16")


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
        (
            '{"H200": {"matmul_flops": 1%s, "attention_flops": 1, "memory_bytes": 1}}' % ("0" * 400),
            "does not hold rates of GPUs",
        ),
        ("[" * 100_000, "does not hold rates of GPUs"),
        ('{"H200": "\udcff"}', "does not hold rates of GPUs"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="gpus.json") as found:
        own_rates(tmp_path)
    assert message in str(found.value)
    assert "such as" in str(found.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path) -> None:
    (tmp_path / "rates" / "gpus.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"gpus.json cannot be read: Is a directory"):
        own_rates(tmp_path)


CUDA = torch.device("cuda")


@pytest.fixture
def unknown_card(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card 9")


def test_a_session_reads_the_file_once(tmp_path, unknown_card) -> None:
    """What becomes of the file while queries run reaches none of them."""
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    path.write_text('{"Card 9": {"matmul_flops": 1e14, "attention_flops": 5e13, "memory_bytes": 1e12}}')
    rates = DeviceRates(CUDA, torch.bfloat16, tmp_path)
    path.write_text("{")
    assert rates.known(plain_kernels()) == rates.found(plain_kernels()) == Rates(1e14, 5e13, 1e12)
    with pytest.raises(ConfigError):
        DeviceRates(CUDA, torch.bfloat16, tmp_path)
    path.unlink()
    others = DeviceRates(CUDA, torch.bfloat16, tmp_path)
    assert others.known(plain_kernels()) is None
    assert others.found(plain_kernels()) == assumed_rates("bfloat16")


def test_a_damaged_file_stops_the_boot_before_the_model_is_loaded(
    tmp_path, monkeypatch, unknown_card
) -> None:
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setattr(runner, "device_of", lambda name: CUDA)
    monkeypatch.setattr(self_check, "trusted_dtype", lambda dtype, device, kernels: (dtype, None))

    def load(*args, **settings):
        raise AssertionError("the model is loaded")

    config = EngineConfig(device="cuda", kernels="reference", dtype="float32", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="gpus.json does not hold rates of GPUs"):
        Engine.boot(config, load=load)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("NVIDIA H200", "by a table (H200)"),
        ("Your Card", "yours (gpus.json)"),
        ("Some Card 9", "assumed as an A100's: no table has Some Card 9"),
    ],
)
def test_doctor_says_whose_rates_a_card_has(tmp_path, monkeypatch, name: str, source: str) -> None:
    path = tmp_path / "rates" / "gpus.json"
    path.parent.mkdir()
    path.write_text('{"Your": {"matmul_flops": 1e14, "attention_flops": 5e13, "memory_bytes": 1e12}}')
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(device, "device_of", lambda _: CUDA)
    monkeypatch.setattr(KernelChoice, "kernels", lambda *args: plain_kernels())
    config = EngineConfig(device="cuda", kernels="reference", dtype="float32", cache_dir=tmp_path)
    rates, about = device.measured_rates(config)
    assert about == f"rates of cuda in float32 with reference kernels, {source}"
    assert (rates == assumed_rates("float32")) == (name == "Some Card 9")
