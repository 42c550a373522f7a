"""Quail: language-model operators over tables.

SQL with `AI.IF` and its kin, answered by an embedded engine that computes each document's key/value state
once and reuses it for every question.

    import quail

    with quail.Session() as session:
        session.register("reviews", "reviews.parquet")
        query = session.sql("SELECT id FROM reviews WHERE AI.IF(PROMPT('Is this praise? {0}', text))")
        print(query.explain())
        query.run().show()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quail.errors import (
    BindError,
    ConfigError,
    ModelError,
    PlanError,
    QuailError,
    QueryCancelled,
    QueryTimeout,
    RowError,
    SourceError,
    StoreError,
    TooManyErrors,
    UnsupportedError,
)

if TYPE_CHECKING:
    from quail.config import EngineConfig
    from quail.frames import ai_classify, ai_if, ai_probabilities, ai_score
    from quail.frontend.asking import col, prompt
    from quail.frontend.builder import Docs
    from quail.result import QueryResult, Report
    from quail.runs.handle import RunHandle
    from quail.session import Query, Session
    from quail.sources.catalog import SourceInfo

__version__ = "0.1.0"

__all__ = [
    "BindError",
    "ConfigError",
    "Docs",
    "EngineConfig",
    "ModelError",
    "PlanError",
    "QuailError",
    "Query",
    "QueryCancelled",
    "QueryResult",
    "QueryTimeout",
    "Report",
    "RowError",
    "RunHandle",
    "Session",
    "SourceError",
    "SourceInfo",
    "StoreError",
    "TooManyErrors",
    "UnsupportedError",
    "__version__",
    "ai_classify",
    "ai_if",
    "ai_probabilities",
    "ai_score",
    "col",
    "prompt",
]

# Names that need DuckDB and Arrow are imported when they are first used.
_LAZY = {
    "Docs": "quail.frontend.builder",
    "EngineConfig": "quail.config",
    "Query": "quail.session",
    "QueryResult": "quail.result",
    "Report": "quail.result",
    "RunHandle": "quail.runs.handle",
    "Session": "quail.session",
    "SourceInfo": "quail.sources.catalog",
    "ai_classify": "quail.frames",
    "ai_if": "quail.frames",
    "ai_probabilities": "quail.frames",
    "ai_score": "quail.frames",
    "col": "quail.frontend.asking",
    "prompt": "quail.frontend.asking",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quail' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
