"""How memory is divided, and refused."""

from __future__ import annotations

import math

import pytest

from quail.cost import budgets
from quail.cost.budgets import DEFAULT_KV_SHARE, ModelShape, plan_memory
from quail.errors import PlanError
from quail.kernels.choice import KernelChoice
from quail.models.device import dtype_name

SHAPE = ModelShape(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    context_tokens=8192,
    element_bytes=4,
    weight_bytes=538 * 2**20,
)


def test_pages_are_what_weights_and_working_space_leave():
    for kv_bytes in (None, 10 * 2**20, 2**30):
        plan = plan_memory(SHAPE, token_budget=2048, limit_bytes=4 * 2**30, kv_bytes=kv_bytes)
        left = plan.limit_bytes - plan.weight_bytes - plan.working_bytes
        assert plan.num_pages == math.floor(left / plan.page_bytes)
        assert (
            left == kv_bytes
            if kv_bytes
            else left == math.floor(DEFAULT_KV_SHARE * (4 * 2**30 - plan.weight_bytes - plan.working_bytes))
        )


def test_page_bytes_use_the_head_size():
    assert SHAPE.page_bytes == 2 * 30 * 16 * 3 * 64 * 4


def test_working_space_grows_with_the_budget():
    assert SHAPE.working_bytes(4096) > 1.9 * SHAPE.working_bytes(2048) - 2 * 8192 * 192 * 4


@pytest.mark.parametrize(
    ("limit", "kv_bytes", "message"),
    [
        (
            600 * 2**20,
            None,
            "no room for KV: one page of 16 tokens takes 720.0 KiB, the limit of 600.0 MiB less",
        ),
        (4 * 2**30, 2**16, "kv_memory is 64.0 KiB"),
        (
            4 * 2**30,
            2**33,
            "kv_memory = 8.0 GiB does not fit: the limit of 4.0 GiB less 538.0 MiB of weights",
        ),
    ],
)
def test_too_little_memory_is_refused_with_the_numbers(limit, kv_bytes, message):
    with pytest.raises(PlanError) as found:
        plan_memory(SHAPE, token_budget=2048, limit_bytes=limit, kv_bytes=kv_bytes)
    assert message in str(found.value)
    assert "hint:" in str(found.value)


def test_container_limits_of_both_kinds_are_seen(tmp_path):
    assert budgets.container_limit_bytes(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert budgets.container_limit_bytes(tmp_path) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    assert budgets.container_limit_bytes(tmp_path) == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert budgets.container_limit_bytes(tmp_path) == 2**30
    (tmp_path / "memory.max").write_text("2147483648\n")
    assert budgets.container_limit_bytes(tmp_path) == 2**31


def test_the_default_takes_a_share_of_what_is_available(monkeypatch):
    monkeypatch.setattr(budgets, "available_bytes", lambda: 10 * 2**30)
    assert budgets.default_limit_bytes() == 6 * 2**30 - budgets.IMPORT_BASELINE_BYTES
    monkeypatch.setattr(budgets, "available_bytes", lambda: 2**20)
    assert budgets.default_limit_bytes() == 0


@pytest.mark.parametrize(
    ("tiles", "multiplies", "expected"),
    [(False, False, "float32"), (True, False, "bfloat16"), (False, True, "bfloat16")],
)
def test_bfloat16_is_chosen_where_its_products_are_fast(monkeypatch, tiles, multiplies, expected):
    monkeypatch.setattr("quail.models.device.has_tiles", lambda: tiles)
    monkeypatch.setattr(KernelChoice, "multiplies", property(lambda self: multiplies))
    choice = KernelChoice(None, "a test")
    assert dtype_name("auto", "cpu", choice) == expected
    assert dtype_name("float32", "cpu", choice) == "float32"
    assert dtype_name("auto", "cuda", choice) == "bfloat16"
