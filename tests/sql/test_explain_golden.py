"""Whole plans against golden files, as text and as JSON.

`python -m tests.sql.test_explain_golden` writes the files anew; what changed is then in the diff.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quail
from quail.config import EngineConfig
from quail.cost.roofline import Rates
from quail.execution import forecast
from quail.explain import explain
from quail.result import Report
from tests.models.tiny import make_tiny

GOLDEN = Path(__file__).parent / "golden"
RATES = Rates(matmul_flops=1e9, attention_flops=1e9, memory_bytes=1e9)
START = "The ship left the harbour before dawn, and nobody on the pier waved. "
PAIR = "AI.IF(PROMPT('Does {0} name {1}?', log, name))"
CREW = "AI.IF(PROMPT('Was {1} aboard when {0}?', log, sailor), selectivity := 0.25)"
RAIN = r"AI.IF(PROMPT(E'{0}\n\nIs it raining?', log), selectivity := 0.5)"

STATEMENTS = {
    "one_filter": f"SELECT id FROM logs WHERE id < 9 AND {RAIN}",
    "two_filters_and_a_label": f"SELECT id, AI.CLASSIFY(log, ['calm', 'storm']) FROM logs WHERE {RAIN} "
    "AND AI.IF(PROMPT('Is it day? {0}', log))",
    "row_limit": f"SELECT id FROM logs WHERE {RAIN} LIMIT 2",
    "one_join": f"SELECT id, name FROM logs, ships WHERE {PAIR}",
    "filter_then_join": f"SELECT id, name FROM logs JOIN ships ON {PAIR} WHERE {RAIN}",
    "star_of_joins": f"SELECT id, name, sailor FROM logs, ships, crew WHERE {PAIR} AND {CREW} AND {RAIN}",
    "chain_of_joins": "SELECT id FROM logs, ships, crew WHERE " + PAIR + " AND "
    "AI.IF(PROMPT('Could {0} be run by {1}?', name, sailor), selectivity := 0.1)",
    "exists": f"SELECT id FROM logs WHERE EXISTS (SELECT 1 FROM crew WHERE {CREW}) AND {RAIN}",
    "anti_join": f"SELECT id FROM logs ANTI JOIN ships ON {PAIR}",
    "left_join": f"SELECT id, name FROM logs LEFT JOIN ships ON {PAIR} AND logs.id <> ships.n",
    "and_or": f"SELECT id FROM logs, ships WHERE ({PAIR} OR logs.id = ships.n) AND {RAIN}",
    "nothing_asked": "SELECT count(*) FROM logs",
}

DONE = Report(
    seconds={"run": 0.5},
    tokens={"naive": 900, "computed": 400, "reused_rewind": 300, "reused_prefix": 200, "reused_retained": 0},
    speed_of_light=0.4,
    order=({"planned": [1, 0], "calls": [0, 1], "pilot_rows": 16, "revisions": 1},),
    stages=(
        {
            "call": "AI.IF(…)",
            "evaluated": 6,
            "passed": 2,
            "seconds": 0.1,
            "tokens": {"naive": 450, "computed": 250, "reused_prefix": 200},
        },
        {"call": "AI.IF(…)", "evaluated": 8, "passed": 1},
    ),
)


def open_session(folder: Path) -> quail.Session:
    model = make_tiny(folder / "tiny", "llama", hidden=16, layers=1, heads=2)
    session = quail.Session(
        EngineConfig(
            model=str(model),
            dtype="float32",
            layout="completion",
            cache_dir=folder,
            kv_memory="4MiB",
            kernels="reference",
        )
    )
    logs = [{"id": n, "log": START * 2 + "Rain. " * n} for n in range(6)]
    session.register("logs", [*logs, {"id": 9, "log": None}])
    session.register("ships", [{"n": n, "name": f"ship {n}"} for n in range(4)])
    session.register("crew", [{"sailor": f"sailor {n} of the crew"} for n in range(8)])
    return session


def plan_of(session: quail.Session, name: str, format: str, *, analyze: bool = False) -> str:
    bound = session.sql(STATEMENTS[name])._bound
    done = (lambda: DONE) if analyze else None
    return explain(bound, session._catalog, format=format, config=session.config, analyze=done) + "\n"


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """File, statement, format, whether it is analyzed."""
    for name in STATEMENTS:
        yield f"{name}.txt", name, "text", False
        yield f"{name}.json", name, "json", False
    yield "filter_then_join.analyzed.txt", "filter_then_join", "text", True
    yield "filter_then_join.analyzed.json", "filter_then_join", "json", True


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quail.Session]:
    with pytest.MonkeyPatch.context() as patch, open_session(tmp_path_factory.mktemp("golden")) as found:
        patch.setattr(forecast, "kept_rates", lambda *args: RATES)
        yield found


@pytest.mark.parametrize(("file", "name", "format", "analyze"), [*cases()], ids=lambda value: str(value))
def test_plan(session: quail.Session, file: str, name: str, format: str, analyze: bool) -> None:
    assert plan_of(session, name, format, analyze=analyze) == (GOLDEN / file).read_text()


def test_every_golden_file_is_compared() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {file for file, *_ in cases()}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    forecast.kept_rates = lambda *args: RATES  # type: ignore
    with tempfile.TemporaryDirectory() as made, open_session(Path(made)) as opened:
        for file, name, format, analyze in cases():
            (GOLDEN / file).write_text(plan_of(opened, name, format, analyze=analyze))
