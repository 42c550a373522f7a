"""Two questions about each licence; the second reads the document's KV that the first computed."""

from pathlib import Path

import quail

DATA = Path(__file__).parent / "data"

with quail.Session() as session:
    session.register("licences", DATA / "licences.parquet")
    query = session.sql(r"""
        SELECT id, name
        FROM licences
        WHERE length(text) BETWEEN 1000 AND 1500
          AND AI.IF(PROMPT(E'{0}\n\nThis license is for', text), answers := ['code', 'fonts'])
          AND AI.IF(PROMPT(E'{0}\n\nThis software comes from a', text), answers := ['university', 'company'])
        ORDER BY id
    """)
    result = query.run()
    result.show()
    print(result.report)
