"""Patterns for the names of AWS that answers and job files share."""

from __future__ import annotations

from deploykit.job.decode import Pattern

BUCKET = Pattern(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "a bucket name of 3 to 63 lower-case letters, digits, dots and hyphens",
)

REGION = Pattern(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region such as us-east-1")
