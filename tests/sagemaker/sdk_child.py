"""The real SDK, asked about many jobs in one process: importing it is what takes long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deploykit.backends.sagemaker import sdk

_SCRIPT = Path(__file__).with_name("ask_sdk.py")


def ask(folder, jobs, images=()):
    """Its `requests` for `jobs`, arguments of its estimator, and the names of `images`."""
    question, answer = folder / "questions.json", folder / "answers.json"
    question.write_text(json.dumps({"jobs": jobs, "images": images}))
    subprocess.run(
        [sys.executable, "-P", _SCRIPT, sdk.__file__, question, answer],
        env=sdk.surroundings(folder),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return json.loads(answer.read_text())
