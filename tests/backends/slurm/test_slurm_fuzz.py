"""Random `slurm` sections: the controller records what was meant, or `check` refused the job.

`EXAMPLES=20000 pytest tests/backends/slurm/test_slurm_fuzz.py` tries more than CI does.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.backends import slurm
from deploykit.backends.slurm import commands
from deploykit.bundle import archive as bundles
from deploykit.job.model import Entrypoint, JobSpec
from deploykit.lib.errors import SubmitRefused
from tests.backends.slurm.random_jobs import OPTIONS, RESOURCES
from tests.backends.slurm.slurm_helpers import output
from tests.programs import need

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("EXAMPLES", "400"))
BUNDLE = bundles.Bundle(Path("/nowhere"), (), "0" * 64)
LINES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
FIELDS = {
    "partition": "Partition",
    "account": "Account",
    "nodelist": "ReqNodeList",
    "exclude": "ExcNodeList",
    "constraint": "Features",
    "mail_user": "MailUser",
    "licenses": "Licenses",
}
"""Options, and their names in `scontrol show job`."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """How the examples ended, and the folder of accepted scripts, which shellcheck checks last."""
    need("shellcheck")
    folder = tmp_path_factory.mktemp("scripts")
    counts = Counter()
    yield counts, folder
    print(dict(counts))  # noqa: T201 - shown with -s
    assert min(counts[kind] for kind in ("accepted", "refused by check")) >= EXAMPLES // 20
    scripts = sorted(folder.iterdir())
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=list(HealthCheck),
)
@given(options=OPTIONS, resources=RESOURCES, comment=st.none() | LINES)
def test_the_controller_records_what_was_meant_or_check_refuses_the_job(
    cluster, judged, options, resources, comment
):
    counts, folder = judged
    extra = {**options.extra, **({"comment": comment} if comment else {})}
    options = dataclasses.replace(options, extra=extra)
    job = JobSpec("fuzz", Entrypoint("train.py"), resources)
    problems = list(slurm.check(job, options))
    if problems:
        assert all(re.match(r"slurm\.|resources\.", problem.path) for problem in problems)
        counts["refused by check"] += 1
        return
    text = slurm.plan(job, options, run="fuzz-1", bundle=BUNDLE).text
    script = folder / f"{counts['accepted']}.sh"
    script.write_bytes(text.encode())
    subprocess.run(["bash", "-n", script], check=True)
    argv = ["sbatch", "--hold", "--parsable", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        assert type(commands.error_for(done.stderr)) is SubmitRefused, done.stderr
        counts["refused by Slurm"] += 1
        script.unlink()
        return
    counts["accepted"] += 1
    number = done.stdout.strip()
    try:
        stored = output("scontrol", "write", "batch_script", number, "-")
        assert stored == text.replace("\r\n", "\n")
        assert_as_meant(output("scontrol", "--oneliner", "show", "job", number), options, resources)
    finally:
        subprocess.run(["scancel", number], check=True)


def assert_as_meant(text, options, resources):
    """The controller's record has each value that was set."""
    record = dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w/:]+=|\s*$)", text))
    for name, field in FIELDS.items():
        value = getattr(options, name)
        if value is not None and (name != "mail_user" or options.mail_type):  # shown only with it
            # Slurm lowers the ASCII letters of an account, as bytes.lower does
            meant = value.encode().lower().decode() if name == "account" else value
            assert record.get(field, "").strip() == meant.strip(), (name, text)
    assert record["JobName"] == "fuzz-1"
    assert int(record["NumNodes"].split("-")[0]) == resources.nodes
    minutes = -(-resources.time_limit // 60)
    assert record["TimeLimit"] == f"00:{minutes:02}:00"
    if comment := options.extra.get("comment"):
        assert f" Comment={comment} " in text
    assert record["Reason"] == "JobHeldUser"
