"""The layout of the registry's file: its table, what later versions added, and its indexes.

Each write adds the columns and indexes that a file lacks. A read does without them. An older
deploykit that writes to the file keeps the indexes, since SQLite does.
"""

from __future__ import annotations

VERSION = 1
"""Of the table's layout; the file's ``user_version``."""
SCHEMA = """
CREATE TABLE runs (
    run       TEXT PRIMARY KEY,
    name      TEXT NOT NULL,
    backend   TEXT NOT NULL,
    target    TEXT NOT NULL,
    folder    TEXT NOT NULL,
    plan      TEXT NOT NULL,  -- SHA-256 of the plan's text
    bundle    TEXT NOT NULL,  -- SHA-256 of the bundle
    revision  TEXT,           -- git commit of the source
    created   REAL NOT NULL,  -- seconds since the epoch
    output    TEXT NOT NULL,  -- location of the results
    id        TEXT,           -- of the job at its target, once known
    state     TEXT NOT NULL,
    native    TEXT NOT NULL DEFAULT '',
    reason    TEXT NOT NULL DEFAULT '',
    exit_code INTEGER,
    started   REAL,           -- seconds since the epoch, as the target told
    finished  REAL,
    billed    REAL,           -- seconds
    reduced   INTEGER         -- 1 once the run's source was chosen to be reduced
)
"""
ADDED = {"started": "REAL", "finished": "REAL", "billed": "REAL", "reduced": "INTEGER"}
"""Columns that a table of an older deploykit lacks."""

UNFINISHED = "state NOT IN ('cancelled', 'failed', 'succeeded', 'unsent')"
TO_REDUCE = "state IN ('cancelled', 'failed', 'succeeded') AND reduced IS NULL"
"""SQLite uses an index with a condition only where a query has that condition word for word."""
ENDS = 4
"""Characters of an id's end that are indexed."""
END = f"substr(run, -{ENDS})"
INDEXES = {
    "runs_by_time": "(created, run, state)",
    "runs_by_end": f"({END})",
    "runs_by_bundle": "(bundle)",
    "runs_unfinished": f"(created, run) WHERE {UNFINISHED}",
    "runs_to_reduce": f"(created, run) WHERE {TO_REDUCE}",
}
