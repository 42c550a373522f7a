"""Answers of a pass on their way from the device to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from quail.execution.reads import Answered, Float32s, Pending


class Event(Protocol):
    """What marks a place in the order of a device's work: `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Waits until the device is past it."""


class CopiedBehind:
    """Answers that are copied into the host's memory behind the pass; nothing waits until they are asked for.

    Args:
        host: (n,) float32, being filled.
        shapes: of the arrays in it, one behind another.
        done: stands behind the copy.
    """

    def __init__(self, host: torch.Tensor, shapes: Sequence[tuple[int, ...]], done: Event) -> None:
        self._host, self._shapes, self._done = host, shapes, done

    def answers(self) -> list[Float32s]:
        """Waits for the copy; the arrays are the caller's own."""
        self._done.synchronize()
        found = self._host.numpy()
        answers, start = [], 0
        for shape in self._shapes:
            stop = start + math.prod(shape)
            answers.append(found[start:stop].reshape(shape).copy())
            start = stop
        return answers


def pending_on(device: torch.device, found: Sequence[torch.Tensor]) -> Pending:
    """A pass that was started on a device, and its answers as the device has them or will have them.

    A pass without answers is waited for as well: else the host would run ahead without bound.

    Args:
        device: where it runs.
        found: float32 of any shapes.
    """
    if device.type != "cuda":
        return Answered([each.cpu().numpy() for each in found])
    host = copied(found, pinned=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return CopiedBehind(host, [tuple(each.shape) for each in found], done)


def copied(found: Sequence[torch.Tensor], *, pinned: bool) -> torch.Tensor:
    """(n,) all elements in one copy to the host, which is not waited for where its memory is pinned."""
    if not found:
        return torch.empty(0, dtype=torch.float32)
    flat = torch.cat([each.reshape(-1) for each in found])
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pinned).copy_(flat, non_blocking=pinned)
