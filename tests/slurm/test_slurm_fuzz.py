"""The `slurm` section at random, judged by the controller: it has what was meant, or was not asked.

`EXAMPLES=20000 pytest tests/slurm/test_slurm_fuzz.py` tries more of them than CI does.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_helpers import output

from deploykit import bundle as bundles
from deploykit.backends import slurm
from deploykit.backends.slurm import Options, sending
from deploykit.backends.slurm.options import Container
from deploykit.errors import SubmitRefused
from deploykit.model import Entrypoint, JobSpec, Resources

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("EXAMPLES", "2000"))
BUNDLE = bundles.Bundle(Path("/nowhere"), (), "0" * 64)
ODD = [
    *(
        "",
        " ",
        "a b",
        "it's",
        'a "b"',
        "$(id)",
        "`id`",
        "\\",
        "a\\",
        "a\\b",
        "#",
        "a #b",
        "%j",
        "é☃",
    ),
    *(
        "a\nb",
        "\n#SBATCH --hold",
        "\r",
        "\t",
        "\x00",
        "\x1b[0m",
        "\u2028",
        "-x",
        "--hold",
        "=",
        "a=b",
    ),
    *("*", "~", "!", ";", "&", "|", ">", ",", "a,b", ":", "{{ run }}", "'", "''", '"'),
]
TEXT = st.sampled_from(ODD) | st.text(max_size=12)
LINES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)


def now_and_then(odd, *good):
    """One of the good values, and one time in sixteen an odd one."""
    return st.integers(0, 15).flatmap(lambda n: odd if n == 0 else st.sampled_from(good))


OPTIONS = st.builds(
    Options,
    partition=now_and_then(TEXT, None, "main", "low", "high"),
    account=now_and_then(TEXT, None, "vision"),
    qos=now_and_then(TEXT, None),
    constraint=now_and_then(TEXT, None),
    reservation=now_and_then(TEXT, None),
    nodelist=now_and_then(TEXT, None, "n1", "n[2-3]"),
    exclude=now_and_then(TEXT, None, "n4"),
    exclusive=st.booleans(),
    gres_style=st.sampled_from(["gres", "gpus-per-node"]),
    licenses=now_and_then(TEXT, None),
    mail_type=now_and_then(TEXT, None, "END", "END,FAIL"),
    mail_user=now_and_then(TEXT, None, "a b"),
    python=now_and_then(TEXT, None, "/a b/python"),
    modules=st.lists(now_and_then(TEXT, "cuda/12", "a b", "$(id)"), max_size=2).map(tuple),
    setup=now_and_then(st.just(("echo\r",)), (), ("ulimit -c 0",), ("#SBATCH --nice=7",)),
    signal_seconds=now_and_then(st.just(600), None, 1, 30),
    container=st.none()
    | st.builds(
        Container,
        now_and_then(TEXT, "a b.sif", "nvcr.io#x:1"),
        st.sampled_from(["pyxis", "apptainer"]),
    ),
    extra=st.dictionaries(
        now_and_then(TEXT, "comment", "nice", "wckey"), now_and_then(TEXT, "7"), max_size=2
    ),
)
RESOURCES = st.builds(
    Resources,
    time_limit=st.sampled_from([60, 600]),
    nodes=st.sampled_from([1, 2]),
    gpus_per_node=st.sampled_from([0, 2]),
    cpus_per_node=st.sampled_from([None, 4]),
    memory=st.sampled_from([None, 1024**3]),
)
FIELDS = {
    "partition": "Partition",
    "account": "Account",
    "nodelist": "ReqNodeList",
    "exclude": "ExcNodeList",
    "constraint": "Features",
    "mail_user": "MailUser",
    "licenses": "Licenses",
}
"""What `scontrol show job` calls them."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What became of the examples, and the accepted scripts: shellcheck sees them in the end."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    folder = tmp_path_factory.mktemp("scripts")
    found = Counter()
    yield found, folder
    print(dict(found))  # noqa: T201 - with -s, the figure
    assert min(found[word] for word in ("accepted", "refused by check")) >= EXAMPLES // 10
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
def test_the_controller_has_what_was_meant_or_the_value_was_refused(
    cluster, judged, options, resources, comment
):
    found, folder = judged
    extra = {**options.extra, **({"comment": comment} if comment else {})}
    options = dataclasses.replace(options, extra=extra)
    job = JobSpec("fuzz", Entrypoint("train.py"), resources)
    problems = list(slurm.check(job, options))
    if problems:
        assert all(re.match(r"slurm\.|resources\.", problem.path) for problem in problems)
        found["refused by check"] += 1
        return
    text = slurm.plan(job, options, run="fuzz-1", bundle=BUNDLE).text
    script = folder / f"{found['accepted']}.sh"
    script.write_bytes(text.encode())
    subprocess.run(["bash", "-n", script], check=True)
    argv = ["sbatch", "--hold", "--parsable", script]
    sent = subprocess.run(argv, capture_output=True, text=True, check=False)
    if sent.returncode:
        assert type(sending.refusal(sent.stderr)) is SubmitRefused, sent.stderr
        found["refused by Slurm"] += 1
        script.unlink()
        return
    found["accepted"] += 1
    number = sent.stdout.strip()
    try:
        stored = output("scontrol", "write", "batch_script", number, "-")
        assert stored == text.replace("\r\n", "\n")
        as_meant(output("scontrol", "--oneliner", "show", "job", number), options, resources)
    finally:
        subprocess.run(["scancel", number], check=True)


def as_meant(shown, options, resources):
    """The controller's record has each value, and no option that nobody chose."""
    has = dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w/:]+=|\s*$)", shown))
    for name, field in FIELDS.items():
        value = getattr(options, name)
        if value is not None and (name != "mail_user" or options.mail_type):  # shown with it alone
            # Slurm makes an account's letters small, but those of ASCII alone, as bytes.lower does
            meant = value.encode().lower().decode() if name == "account" else value
            assert has.get(field, "") == meant.strip(), (name, shown)
    assert has["JobName"] == "fuzz-1"
    assert int(has["NumNodes"].split("-")[0]) == resources.nodes
    minutes = -(-resources.time_limit // 60)
    assert has["TimeLimit"] == f"00:{minutes:02}:00"
    if comment := options.extra.get("comment"):
        assert f" Comment={comment} " in shown
    assert has["Reason"] == "JobHeldUser"
