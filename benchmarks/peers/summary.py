"""Runs to medians, spreads and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.engines import QUAIL


@dataclass(frozen=True)
class Row:
    """One engine on one part, over the rounds.

    Attributes:
        part: name of the part.
        engine: name of the engine.
        documents: of the part.
        prompts: of the part.
        share: of the part's tokens that the engine was asked about.
        seconds: of the whole part, scaled by prompt tokens if it was asked less; median, least, greatest.
        documents_per_second: median.
        prompt_tokens: of the whole part.
        computed_tokens: of what the engine was asked, scaled in the same way.
        times: how many times the seconds of Quail in the same round: median, least, greatest; None without
            Quail.
        cores: kept busy, median.
        equal: share of answers equal to Quail's; None where none were compared.
        speed_of_light: median fraction, where told.
    """

    part: str
    engine: str
    documents: int
    prompts: int
    share: float
    seconds: tuple[float, float, float]
    documents_per_second: float
    prompt_tokens: int
    computed_tokens: int
    times: tuple[float, float, float] | None
    cores: float
    equal: float | None
    speed_of_light: float | None


def rows_of(runs: Sequence[Mapping[str, Any]], parts: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Rows in the order of the parts, engines in the order of their runs.

    Args:
        runs: of `rounds.measure`.
        parts: by name, with the `documents`, `prompts` and `prompt_tokens` of the whole part.
    """
    rows = []
    for name, whole in parts.items():
        of_part = [run for run in runs if run["part"] == name]
        ours = {run["round"]: scaled_seconds(run, whole) for run in of_part if run["engine"] == QUAIL}
        for engine in dict.fromkeys(run["engine"] for run in of_part):
            own = [run for run in of_part if run["engine"] == engine]
            rows.append(row_of(name, engine, own, whole, ours))
    return rows


def row_of(
    name: str,
    engine: str,
    runs: Sequence[Mapping[str, Any]],
    whole: Mapping[str, Any],
    ours: Mapping[int, float],
) -> Row:
    """One engine's runs of one part as a row."""
    seconds = [scaled_seconds(run, whole) for run in runs]
    ratios = [
        taken / ours[run["round"]] for run, taken in zip(runs, seconds, strict=True) if run["round"] in ours
    ]
    share = runs[0]["prompt_tokens"] / whole["prompt_tokens"]
    compared = sum(run["compared"] for run in runs)
    lights = [run["speed_of_light"] for run in runs if run["speed_of_light"] is not None]
    return Row(
        part=name,
        engine=engine,
        documents=whole["documents"],
        prompts=whole["prompts"],
        share=share,
        seconds=middle(seconds),
        documents_per_second=whole["documents"] / statistics.median(seconds),
        prompt_tokens=whole["prompt_tokens"],
        computed_tokens=round(statistics.median(run["computed_tokens"] for run in runs) / share),
        times=middle(ratios) if ratios else None,
        cores=statistics.median(run["cores"] for run in runs),
        equal=sum(run["equal"] for run in runs) / compared if compared else None,
        speed_of_light=statistics.median(lights) if lights else None,
    )


def scaled_seconds(run: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """Seconds that the whole part would take at the speed of a run."""
    return float(run["seconds"] * whole["prompt_tokens"] / run["prompt_tokens"])


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return statistics.median(values), min(values), max(values)
