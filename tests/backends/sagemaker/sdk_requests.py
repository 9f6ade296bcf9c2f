"""The real SDK's requests for many jobs, from one process: importing the SDK takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deploykit.backends.sagemaker import submission

ROOT = Path(__file__).parents[3]


def sdk_requests(folder, jobs, images=()):
    """The SDK's `requests` for `jobs` (arguments of its estimator), and the names of `images`."""
    question, answer = folder / "questions.json", folder / "answers.json"
    question.write_text(json.dumps({"jobs": jobs, "images": images}))
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "tests.backends.sagemaker.sdk_requests_child",
            question,
            answer,
        ],
        env={**submission.child_environment(folder), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return json.loads(answer.read_text())
