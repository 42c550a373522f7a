"""A device whose matrix products are wrong is found out before it answers anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import quail
from quail.kernels import reference
from quail.kernels.choice import KernelChoice
from quail.kernels.interface import Kernels
from quail.kernels.reference import TorchKernels
from quail.models import self_check
from tests.engine.kernel_sets import skip_without
from tests.models.tiny import make_tiny

CPU = torch.device("cpu")
STATEMENT = "SELECT id FROM docs WHERE AI.IF(PROMPT('Good? {0}', text)) ORDER BY id"
KERNELS = TorchKernels(reference.attend)
Product = Callable[[Kernels, torch.Tensor, torch.Tensor], torch.Tensor]


def wrong_in(dtype: torch.dtype, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Product:
    right = self_check.multiply

    def product(kernels: Kernels, left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = right(kernels, left, other)
        return spoil(found) if left.dtype == dtype else found

    return product


def saturated(found: torch.Tensor) -> torch.Tensor:
    return found.clamp(max=1000)


def one_element_off(found: torch.Tensor) -> torch.Tensor:
    return found.index_put((torch.tensor([7]), torch.tensor([9])), found[7, 9] + 8)


def not_a_number(found: torch.Tensor) -> torch.Tensor:
    return found.index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(torch.nan, dtype=found.dtype))


def noisy_where_elements_differ(found: torch.Tensor) -> torch.Tensor:
    return found if (found == found[0, 0]).all() else found * 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_this_machine_multiplies_rightly(dtype: torch.dtype, mode: str) -> None:
    cache = quail.EngineConfig().cache_path
    choice = KernelChoice.of(mode, "cpu", cache).compiled(mode)
    skip_without(dtype, choice)
    assert self_check.fault_of_products(choice.kernels(dtype, CPU, 1), dtype, CPU) is None


@pytest.mark.parametrize("spoil", [saturated, one_element_off, not_a_number, noisy_where_elements_differ])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_products_are_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    monkeypatch.setattr(self_check, "multiply", wrong_in(dtype, spoil))
    fault = self_check.fault_of_products(KERNELS, dtype, CPU)
    assert fault is not None
    assert ("sums of 1024 ones" in fault) == (spoil is not noisy_where_elements_differ)


def test_a_product_less_exact_than_its_dtype_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_check.multiply

    def rounded(kernels: Kernels, left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return right(kernels, left.bfloat16(), other.bfloat16()).to(left.dtype)

    monkeypatch.setattr(self_check, "multiply", rounded)
    fault = self_check.fault_of_products(KERNELS, torch.float32, CPU)
    assert fault is not None
    assert "differs from float64 by 0.00" in fault


@pytest.mark.alone
def test_it_costs_next_to_nothing() -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        self_check.fault_of_products(KERNELS, torch.float32, CPU)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.2


def of_products(report: quail.Report) -> list[str]:
    return [warning for warning in report.warnings if "matrix products" in warning]


def test_a_session_goes_on_in_float32_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama")
    monkeypatch.setattr(self_check, "multiply", wrong_in(torch.bfloat16, saturated))

    def rows(dtype: str) -> tuple[list[tuple[int]], quail.Report]:
        config = quail.EngineConfig(model=str(folder), dtype=dtype, device="cpu", threads=1, kv_memory="4MiB")
        with quail.Session(config) as session:
            session.register("docs", [{"id": each, "text": f"text {each}"} for each in range(20)])
            first = session.sql(STATEMENT).run()
            again = session.sql(STATEMENT).run()
            assert of_products(again.report) == of_products(first.report), "every report says so"
            return first.fetchall(), first.report

    expected, report = rows("float32")
    assert not of_products(report)
    with pytest.warns(
        UserWarning, match=r"matrix products in bfloat16 are wrong on this cpu: .* float32 instead"
    ):
        found, report = rows("bfloat16")
    assert found == expected
    assert report.dtype == "float32"
    (warning,) = of_products(report)
    assert "the model runs in float32 instead" in warning


def test_a_device_that_is_wrong_in_float32_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        self_check, "multiply", lambda kernels, left, right: torch.zeros(len(left), len(right))
    )
    with pytest.raises(
        quail.ModelError, match="products in float32 are wrong on this cpu: 65,536 of 65,536 sums"
    ):
        self_check.trusted_dtype(torch.bfloat16, CPU, lambda dtype: KERNELS)
