"""Quail: the statement as a user writes it.

Of the protocol it serves `query` where others serve `run`:

    -> {"do": "query", "sql": …, "tables": {name: {column: [values]}}}
    <- {"ok": true, "seconds": [of the whole query, binding and result included], "computed": [tokens],
        "naive": tokens of all prompts, "rows": [[values], …], "speed_of_light": fraction or null}
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
from serving import serve

import quail


class Quail:
    """One session for all workloads."""

    def boot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads the model and answers one question."""
        self.session = quail.Session(
            quail.EngineConfig(
                dtype=message["dtype"],
                threads=message["threads"],
                kv_memory=f"{message['kv_gib']}GiB",
                answers="off",  # a later round would ask nothing
            )
        )
        self.session.register("t", {"text": ["A fine film."]})
        self.session.sql("SELECT AI.IF(PROMPT('Is it good? {0}', text)) FROM t").run(progress=False)
        about = self.session._engine.describe()  # type: ignore[union-attr]
        shown = ("dtype", "layout", "token_budget", "threads", "memory")
        return {
            "engine": f"Quail {quail.__version__}",
            "settings": {name: about[name] for name in shown if name in about},
        }

    def forget(self) -> None:
        """Empties the pool of retained KV, which no user needs to do."""
        retention = self.session._engine.retention  # type: ignore[union-attr]
        if retention is not None:
            retention.pool.clear()

    def query(self, message: dict[str, Any]) -> dict[str, Any]:
        """Runs a statement."""
        for name, columns in message["tables"].items():
            self.session.register(name, pa.table(columns))
        started = time.perf_counter()
        result = self.session.sql(message["sql"]).run(progress=False, order="as_written")
        rows = result.fetchall()
        seconds = time.perf_counter() - started
        light = getattr(result.report, "speed_of_light", None)
        return {
            "seconds": [seconds],
            "computed": [result.report.tokens["computed"]],
            "naive": result.report.tokens["naive"],
            "rows": rows,
            "speed_of_light": float(light) if isinstance(light, int | float) else None,
        }


if __name__ == "__main__":
    serve(Quail())
