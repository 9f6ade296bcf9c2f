"""Waiting for another process that has locked the registry of runs, and saying so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

_SOON, _PATIENCE = 2, 60
"""Seconds to wait for another process's lock without a word, and in all after that."""


def take(database: sqlite3.Connection, statement: str) -> None:
    """Execute what takes a lock; it and what follows wait for other processes."""
    import sqlite3  # as in `registry`

    database.execute(f"PRAGMA busy_timeout = {_SOON * 1000}")
    try:
        database.execute(statement).fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        import logging  # seldom

        (_, _, file), *_ = database.execute("PRAGMA database_list")
        what = f"the registry of runs {file}, which another process has locked"
        logging.getLogger("deploykit").warning("waiting up to %d s for %s", _PATIENCE, what)
        database.execute(f"PRAGMA busy_timeout = {_PATIENCE * 1000}")
        database.execute(statement).fetchall()
    database.execute(f"PRAGMA busy_timeout = {_PATIENCE * 1000}")
