"""The page of a report: one file with everything in it, without a script.

The content security policy forbids scripts and everything from outside, so that even a mistake in
the escaping of a text could load and run nothing (https://www.w3.org/TR/CSP3/).
"""

from __future__ import annotations

from deploykit.lib import paths
from deploykit.observe.report.markup import Markup, text

LARGEST = 1_000_000
"""Bytes of a page at most."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'"


def page(title: str, body: Markup, footer: str) -> str:
    """The document."""
    style = (paths.shipped("templates") / "report" / "report.css").read_text(encoding="utf-8")
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>\n{style}</style></head>"
        f"<body><main>{body}</main><footer><p>{text(footer)}</p></footer></body></html>\n"
    )
