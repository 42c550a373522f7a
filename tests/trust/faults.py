"""Failures that tests inject: every n-th call of something fails in a chosen way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quail.kv.pages import PageArena


class Fault:
    """A function whose calls of some numbers fail.

    Args:
        call: the function.
        fails: of the number of the call, from 1.
        how: what a failing call does instead.
    """

    def __init__(
        self, call: Callable[..., Any], fails: Callable[[int], bool], how: Callable[[], Any]
    ) -> None:
        self.call, self.fails, self.how = call, fails, how
        self.num_calls = self.num_failed = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        if self.fails(self.num_calls):
            self.num_failed += 1
            return self.how()
        return self.call(*arguments, **named)


def raising(error: type[BaseException], *arguments: object) -> Callable[[], Any]:
    def fail() -> Any:
        raise error(*arguments)

    return fail


def every(step: int) -> Callable[[int], bool]:
    return lambda number: number % step == 0


def only(number: int) -> Callable[[int], bool]:
    return lambda each: each == number


def refuse_pages(patch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[Fault]:
    """Some calls of the arena find no pages."""
    return _patched(patch, fails, {"open": lambda: None, "extend": lambda: False})


def fail_in_pages(
    patch: pytest.MonkeyPatch, fails: Callable[[int], bool], how: Callable[[], Any]
) -> list[Fault]:
    """Some calls of the arena raise before they change anything."""
    return _patched(patch, fails, {"open": how, "extend": how})


def _patched(
    patch: pytest.MonkeyPatch, fails: Callable[[int], bool], how: dict[str, Callable[[], Any]]
) -> list[Fault]:
    faults = []
    for name, act in how.items():
        fault = Fault(getattr(PageArena, name), fails, act)
        faults.append(fault)
        patch.setattr(PageArena, name, lambda *arguments, fault=fault, **named: fault(*arguments, **named))
    return faults
