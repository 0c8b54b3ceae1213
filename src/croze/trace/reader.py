"""Reading a trace with SQL, also while the run writes it and after it died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from croze.errors import UsageError
from croze.trace.tables import TABLES, read_table

_TOKENS_VIEW = """
CREATE VIEW tokens AS
SELECT rollout_id, position, token_id[position + 1] AS token_id, text[position + 1] AS text,
       logprob[position + 1] AS logprob, mask[position + 1] AS mask,
       list_filter(producers, lambda p: p.start <= position AND position < p.end)[1].producer AS producer,
       list_filter(weights, lambda w: w.start <= position AND position < w.end)[1].weights_id AS weights_id
FROM (SELECT *, unnest(range(len(token_id))) AS position FROM token_lists)
"""


class TraceReader:
    """A snapshot of a run folder's trace. SQL sees ``spans``, ``rollouts`` and ``tokens`` (one row a token).

    In ``rollouts``, ``reward`` may be written for ``score``.
    """

    def __init__(self, run_dir: Path) -> None:
        import duckdb

        if not run_dir.is_dir():
            raise UsageError("there is no such run folder", where=str(run_dir))
        self._where = str(run_dir)
        self._db = duckdb.connect(config={"enable_external_access": "false", "threads": "1"})
        for table in TABLES:
            name = "token_lists" if table == "tokens" else table
            self._db.register(name, read_table(run_dir / "trace" / table, table))
        self._db.execute(_TOKENS_VIEW)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query, by column name. Raises UsageError in the database's words when it is wrong."""
        import duckdb

        try:
            found = self._db.execute(sql)
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        except duckdb.Error as error:
            raise UsageError(
                str(error), where=self._where, fix="columns: croze trace RUN --sql 'DESCRIBE rollouts'"
            ) from None

    def rollouts(self, where: str | None = None, limit: int = 0) -> list[dict[str, Any]]:
        """Rollouts by step, group, member and attempt. ``where``: an SQL condition; ``limit`` 0 gives all."""
        order = "step, TRY_CAST(regexp_extract(group_id, '[0-9]+') AS BIGINT), group_id, member, attempt"
        bound = f"LIMIT {limit}" if limit else ""
        return self.query(f"SELECT * EXCLUDE (reward) {_from(where)} ORDER BY {order} {bound}")

    def count(self, where: str | None = None) -> int:
        """How many rollouts meet an SQL condition."""
        return self.query(f"SELECT count(*) AS n {_from(where)}")[0]["n"]

    def tokens(self, rollout_id: str) -> list[dict[str, Any]]:
        """Every token of a rollout in order; none when tokens were not kept."""
        quoted = rollout_id.replace("'", "''")
        return self.query(f"SELECT * FROM tokens WHERE rollout_id = '{quoted}' ORDER BY position")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _from(where: str | None) -> str:
    # The line break ends a comment that the condition may end in.
    condition = f"WHERE ({where}\n)" if where else ""
    return f"FROM (SELECT *, score AS reward FROM rollouts) {condition}"
