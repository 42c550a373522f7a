"""Memory of GPUs that are not here: how it is divided, how large passes are made in it, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from quail.cost.budgets import DEFAULT_TOKEN_BUDGET, ModelShape
from quail.cost.grants import (
    MOST_DEVICE_BUDGET,
    PASSES_IN_PAGES,
    WORKING_SHARE,
    DeviceMemory,
    device_grant,
    host_grant,
)
from quail.errors import PlanError
from quail.kv.pages import PAGE_TOKENS, PageArena
from quail.kv.retention import cap_pages
from quail.models import device

GIB = 2**30


def shape(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, head_dim: int, billions: float):
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        context_tokens=32768,
        element_bytes=2,
        weight_bytes=round(billions * 2e9),
    )


SHAPES = {
    "0.1B": shape(30, 576, 9, 3, 1536, 64, 0.135),
    "0.6B": shape(28, 1024, 16, 8, 3072, 128, 0.6),
    "4B": shape(36, 2560, 32, 8, 9728, 128, 4.0),
    "32B": shape(64, 5120, 64, 8, 25600, 128, 32.8),
}
CARDS = {"80 GiB": 79 * GIB, "24 GiB": round(23.6 * GIB), "2 GiB": round(1.9 * GIB)}
FITS = [
    ("80 GiB", "0.1B", 16384),
    ("80 GiB", "0.6B", 16384),
    ("80 GiB", "4B", 16384),
    ("80 GiB", "32B", 4096),
    ("24 GiB", "0.1B", 16384),
    ("24 GiB", "0.6B", 16384),
    ("24 GiB", "4B", 16384),
    ("2 GiB", "0.1B", 8192),
    ("2 GiB", "0.6B", 256),
]


@pytest.mark.parametrize(("card", "model", "budget"), FITS)
def test_passes_are_as_large_as_memory_allows(card: str, model: str, budget: int) -> None:
    grant = device_grant(DeviceMemory(CARDS[card], 2 * CARDS[card]))
    found = grant.token_budget(SHAPES[model])
    assert found == budget
    plan = grant.plan(SHAPES[model], token_budget=found)
    left = grant.limit_bytes - plan.weight_bytes
    assert plan.weight_bytes + plan.working_bytes + plan.arena_bytes <= grant.limit_bytes < CARDS[card]
    assert grant.limit_bytes - plan.working_bytes - plan.weight_bytes - plan.arena_bytes < plan.page_bytes
    assert plan.working_bytes <= WORKING_SHARE * left
    assert plan.num_pages * PAGE_TOKENS >= PASSES_IN_PAGES * found
    assert cap_pages(plan.num_pages, found, PAGE_TOKENS) >= plan.num_pages // 2, (
        "room for two passes in flight"
    )
    twice = SHAPES[model].working_bytes(2 * found)
    tokens = (left - twice) // plan.page_bytes * PAGE_TOKENS
    assert (
        found == MOST_DEVICE_BUDGET or twice > WORKING_SHARE * left or tokens < PASSES_IN_PAGES * 2 * found
    ), "twice as many would fit"


@pytest.mark.parametrize(("card", "model"), [("2 GiB", "4B"), ("24 GiB", "32B"), ("2 GiB", "32B")])
def test_models_that_do_not_fit_are_refused_with_the_numbers(card: str, model: str) -> None:
    grant = device_grant(DeviceMemory(CARDS[card], 2 * CARDS[card]))
    chosen = SHAPES[model]
    with pytest.raises(PlanError, match=r"the weights take [\d.]+ GiB, and the limit is") as found:
        grant.check_weights(chosen.weight_bytes)
    assert "90% of the" in str(found.value) and "that are free of the GPU's" in str(found.value)
    with pytest.raises(PlanError, match=r"no room for KV: .* of the GPU's .* leaves 0 bytes"):
        grant.plan(chosen, token_budget=grant.token_budget(chosen))


def test_kv_that_the_user_grants_bounds_the_passes() -> None:
    grant = device_grant(DeviceMemory(80 * GIB, 80 * GIB))
    chosen = SHAPES["4B"]
    assert grant.token_budget(chosen, GIB) == 1024
    plan = grant.plan(chosen, token_budget=1024, kv_bytes=GIB)
    assert plan.num_pages == GIB // chosen.page_bytes
    with pytest.raises(PlanError, match=r"kv_memory = 79.0 GiB does not fit: the limit of 72.0 GiB \(90% of"):
        grant.plan(chosen, token_budget=1024, kv_bytes=79 * GIB)


def test_the_hosts_passes_do_not_follow_from_memory() -> None:
    assert host_grant().token_budget(SHAPES["32B"]) == DEFAULT_TOKEN_BUDGET


def test_slots_of_many_gigabytes_are_whole_numbers_of_64_bits() -> None:
    """The pages of 268 GiB (288 GB) of the default model's KV: an element's offset in a layer passes 2**31."""
    num_pages = 268 * GIB // SHAPES["0.1B"].page_bytes
    pages = PageArena(num_pages)
    all_of_them = pages.open("all", num_pages * PAGE_TOKENS)
    assert all_of_them is not None
    slots = all_of_them.append(num_pages * PAGE_TOKENS)
    assert slots.dtype == "int64"
    assert slots.max() == num_pages * PAGE_TOKENS - 1
    assert int(slots.max()) * SHAPES["0.1B"].num_kv_heads * SHAPES["0.1B"].head_dim > 2**31
    assert math.prod((30, 2, num_pages, PAGE_TOKENS, 3, 64)) > 2**32
    pages.close(all_of_them)


def test_memory_that_torch_holds_without_use_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    cuda = torch.device("cuda")
    assert device.device_memory(cuda) == DeviceMemory(12 * GIB, 24 * GIB)
    assert device.grant_of(cuda).limit_bytes == math.floor(0.9 * 12 * GIB)
    assert "90% of the 12.0 GiB that are free of the GPU's 24.0 GiB" in device.grant_of(cuda).source
    assert not device.grant_of(torch.device("cpu")).sizes_passes
