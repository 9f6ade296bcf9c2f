"""What names and paths in a job file may be."""

from __future__ import annotations

from deploykit.job.decode import Pattern

NAME = Pattern(
    r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,39}",
    "letters, digits and single inner hyphens, at most 40 characters",
)
VARIABLE = Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "an environment variable's name")
CHANNEL = Pattern(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", "letters, digits and underscores")
OUTPUT = Pattern(
    r"[^/~\x00-\x1f\x7f][^\x00-\x1f\x7f]*",
    "a pattern below the working folder, such as snapshot.pt or checkpoints/*.pt",
)
METRIC = Pattern(r"[ -~]{1,100}", "a name of at most 100 printable ASCII characters")
PATH = Pattern(r"[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*", "a name or path without control characters")
BUDGET = Pattern(
    r"[0-9]{1,12}([.][0-9]{1,9})? ?[A-Z]{3}(/month)?( for [A-Za-z0-9][A-Za-z0-9_.-]{0,62})?",
    "an amount of money such as 2000 USD, 500 USD/month or 500 USD/month for vision",
)
PROFILE = Pattern(
    r"(torch|nsys):([2-9]|[1-9][0-9]{1,8}):[1-9][0-9]{0,8}|nsys|memory",
    "torch:FIRST:LAST, such as torch:20:25: optimizer steps from 2 on; nsys:FIRST:LAST or nsys; "
    "or memory",
)
MONEY = Pattern(r"[0-9]{1,12}([.][0-9]{1,9})? ?[A-Z]{3}", "an amount of money such as 50 USD")
MLFLOW = Pattern(
    r"https?://[^\s/@?#]+(/[^\s@?#]*)?"
    r"|arn:aws(-us-gov)?:sagemaker:[a-z0-9-]+:[0-9]{12}:mlflow-(tracking-server|app)/[A-Za-z0-9-]+",
    "an address such as https://mlflow.example.com without a user name (set "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead), or SageMaker's "
    "arn:aws:sagemaker:REGION:ACCOUNT:mlflow-tracking-server/NAME; a file store needs "
    "`mlflow server --backend-store-uri` in front of it",
)
FOLDER_OR_S3 = Pattern(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?|[^:\x00-\x1f\x7f]+",
    "a folder without a colon in its name, or an s3:// prefix",
)
TRACKIO = Pattern(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", "a project such as digits or team-digits")
PROJECT = Pattern(
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}",
    "a project such as digits or team/digits",
)
