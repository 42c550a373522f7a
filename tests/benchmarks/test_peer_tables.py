"""Runs to rows, tables, plots and pages."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import curves, pages, plots
from benchmarks.peers import cli, tables
from benchmarks.peers.engines import ROOT
from benchmarks.peers.rounds import Run
from benchmarks.peers.summary import rows_of


def run(engine: str, number: int, seconds: float, tokens: int = 100, **others: Any) -> dict[str, Any]:
    made = Run(engine, "filter", number, seconds, 10, 10, tokens, computed_tokens=tokens, cores=1.9)
    return asdict(made) | others


RESULTS: dict[str, Any] = {
    "date": "2026-11-30",
    "machine": {"processor": "2 x Thing", "instruction_sets": "avx2", "memory": "8 GiB"},
    "settings": {
        "documents": 10,
        "rounds": 3,
        "is_quick": False,
        "dtype": "float32",
        "threads": 2,
        "kv_gib": 4,
    },
    "engines": {
        "quail": {"engine": "Quail 1", "boot_seconds": 2.0, "peak_bytes": 2**30, "idle_cores": 0.0},
        "vllm": {"engine": "vLLM 2", "boot_seconds": 50.0, "peak_bytes": 2**31, "idle_cores": 0.5},
        "llama_cpp": {"missing": "llama_cpp cannot be installed: no | compiler"},
        "transformers": {"engine": "t 3", "boot_seconds": 1.0, "peak_bytes": 2**30, "idle_cores": 0.0},
    },
    "parts": {"filter": {"title": "one filter", "documents": 10, "prompts": 10, "prompt_tokens": 100}},
    "runs": [
        *(run("quail", n, s, speed_of_light=0.5) for n, s in enumerate((1.0, 2.0, 4.0))),
        *(run("vllm", n, s, equal=9, compared=10) for n, s in enumerate((3.0, 3.0, 4.0))),
        *(run("transformers", n, s, tokens=50) for n, s in enumerate((0.4, 0.8, 1.0))),
    ],
}


def test_ratios_are_taken_round_by_round_and_samples_are_scaled() -> None:
    rows = {row.engine: row for row in rows_of(RESULTS["runs"], RESULTS["parts"])}
    assert list(rows) == ["quail", "vllm", "transformers"]
    assert rows["vllm"].times == (1.5, 1.0, 3.0), "3/1, 3/2, 4/4"
    assert rows["vllm"].equal == pytest.approx(0.9)
    sampled = rows["transformers"]
    assert sampled.share == 0.5 and sampled.seconds == (1.6, 0.8, 2.0)
    assert sampled.computed_tokens == 100
    assert sampled.times == (0.8, 0.5, 0.8)
    assert rows["quail"].documents_per_second == 5.0
    assert rows["quail"].speed_of_light == 0.5 and rows["vllm"].speed_of_light is None


def test_without_quail_there_are_no_ratios() -> None:
    runs = [each for each in RESULTS["runs"] if each["engine"] != "quail"]
    assert all(row.times is None for row in rows_of(runs, RESULTS["parts"]))


def test_the_short_table_shows_lost_rows_in_bold_and_boots() -> None:
    lines = tables.short_table(RESULTS).splitlines()
    assert lines[0] == "|  | Quail, documents/s | x vLLM | x transformers |"
    assert lines[2] == "| one filter | 5 | 1.50 (1.00–3.00) | **0.80 (0.50–0.80)** |"
    assert lines[3] == "| start to first answer | 2.0 s | 25 | **0.5** |"


def test_the_report_names_what_is_missing_and_what_was_sampled() -> None:
    written = tables.report(RESULTS)
    assert "llama_cpp cannot be installed: no / compiler" in written
    assert "transformers, 50% asked" in written
    assert "| 90.0% |" in written
    assert "2026-11-30 on 2 x Thing (avx2), 8 GiB: 10 documents" in written
    for block in re.findall(r"(?:^\|.*\n)+", written, flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, "as many cells in each line"


def test_pages_are_written_between_their_comments_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = "before\n<!-- peers:begin (words) -->\nold\n<!-- peers:end -->\nafter\n"
    for name in ("README.md", "docs/benchmarks.md"):
        (tmp_path / name).write_text(page)
    tables.write_pages(RESULTS, tmp_path)
    once = (tmp_path / "README.md").read_text()
    assert once.startswith("before\n<!-- peers:begin (words) -->\nMeasured 2026-11-30")
    assert once.endswith("|\n<!-- peers:end -->\nafter\n") and "old" not in once
    assert "peak resident" in (tmp_path / "docs" / "benchmarks.md").read_text()
    plot = tmp_path / "benchmarks" / "results" / "peers-2026-11-30.svg"
    plot.parent.mkdir(parents=True)
    plot.touch()
    tables.write_pages(RESULTS, tmp_path)
    assert (tmp_path / "README.md").read_text() == once
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "(../benchmarks/results/peers-2026-11-30.svg)" in page


@pytest.mark.parametrize(
    "page",
    [
        "no comments",
        "<!-- t:begin -->\n",
        "<!-- t:end -->\n<!-- t:begin -->\n",
        "<!-- t:begin -->\n<!-- t:end --><!-- t:begin -->\n<!-- t:end -->",
    ],
)
def test_a_page_without_its_place_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="must"):
        pages.with_section(page, "t", "new")


def test_the_projects_pages_have_their_places() -> None:
    for name, section in (
        ("README.md", "peers"),
        ("docs/benchmarks.md", "peers"),
        ("docs/benchmarks.md", "curves"),
        ("docs/performance.md", "profile"),
    ):
        assert pages.with_section((ROOT / name).read_text(), section, "new")


def test_results_are_stored_and_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    quick = RESULTS | {"settings": RESULTS["settings"] | {"is_quick": True}, "date": "2026-12-01"}
    for results in (RESULTS, quick):
        cli.store(results)
    assert cli.newest() == tmp_path / "peers-2026-11-30.json"
    assert json.loads((tmp_path / "peers-2026-11-30.json").read_text()) == RESULTS
    assert (tmp_path / "peers-quick-2026-12-01.md").read_text() == tables.report(quick)
    shown: list[Any] = []
    monkeypatch.setattr(tables, "write_pages", lambda results: shown.append(results) or [])
    assert cli.main(["--pages"]) == 0
    assert shown == [RESULTS]


def test_pages_without_results_are_a_clear_error(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["--pages"])
    assert "measure first" in capsys.readouterr().err


def numbers(root: ElementTree.Element, tag: str, name: str) -> list[float]:
    return [float(each.attrib[name]) for each in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]


def test_bars_point_to_the_side_of_the_faster_engine() -> None:
    drawn = plots.ratio_bars("t", {"a < b": {"x": 10.0}, "c": {"x": 0.1}}, below="l", above="r")
    root = ElementTree.fromstring(drawn)
    ground, won, lost, _ = zip(numbers(root, "rect", "x"), numbers(root, "rect", "width"), strict=True)
    assert ground[0] == 0
    assert won[1] == lost[1] > 100, "10 and 1/10 are as long"
    assert lost[0] + lost[1] == pytest.approx(won[0])


def test_lines_rise_on_logarithmic_axes() -> None:
    drawn = plots.log_lines("t", "x", "y", {"s": [(1, 1), (10, 10), (100, 100)]})
    root = ElementTree.fromstring(drawn)
    xs, ys = numbers(root, "circle", "cx"), numbers(root, "circle", "cy")
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2]) and ys[0] > ys[2]


def test_a_single_point_is_drawn() -> None:
    ElementTree.fromstring(plots.log_lines("t", "x", "y", {"s": [(5, 0.1)]}))


def test_a_plot_of_results_is_a_picture() -> None:
    assert "one filter" in cli.plot(RESULTS)
    alone = RESULTS | {"runs": [each for each in RESULTS["runs"] if each["engine"] == "quail"]}
    assert "no peer was measured" in cli.plot(alone)


def test_a_curve_is_a_table_and_a_picture() -> None:
    points = [curves.Point("documents", n, (n / 10, n / 20, n / 5), 100 * n, 90 * n, 0.5) for n in (1, 10)]
    written = curves.tables_of(points)
    assert "| 10 | 1.00 (0.50–2.00) | 900 of 1,000 | 900 | 50% |" in written
    ElementTree.fromstring(curves.plot("documents", points))


def test_quick_settings_are_smaller_and_arguments_win() -> None:
    whole = cli.settings_of(cli.parser().parse_args([]))
    quick = cli.settings_of(cli.parser().parse_args(["--quick", "--rounds", "2"]))
    assert quick.documents < whole.documents and quick.rounds == 2 and quick.is_quick
