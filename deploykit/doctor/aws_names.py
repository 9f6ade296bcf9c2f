"""Patterns for the names of AWS that answers and job files share."""

from __future__ import annotations

import re

from deploykit.job.decode import Pattern

BUCKET = Pattern(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "a bucket name of 3 to 63 lower-case letters, digits, dots and hyphens",
)

IMPOSSIBLE = re.compile(
    r"\.\.|^(\d+\.){3}\d+$|^(xn--|sthree-|amzn-s3-demo-)|(-s3alias|--ol-s3|\.mrap|--table-s3)$"
)
"""Names that S3 refuses although they match:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
REGION = Pattern(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region such as us-east-1")
