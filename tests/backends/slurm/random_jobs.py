"""Hypothesis strategies for the `slurm` section and the resources of a job."""

from __future__ import annotations

from hypothesis import strategies as st

from deploykit.backends.slurm import Options
from deploykit.backends.slurm.options import Container
from deploykit.job.model import Resources

ODD = [
    *("", " ", "a b", "it's", 'a "b"', "$(id)", "`id`", "\\", "a\\", "a\\b", "#", "a #b", "%j"),
    *("a\nb", "\n#SBATCH --hold", "\r", "\t", "\x00", "\x1b[0m", "\u2028", "-x", "--hold", "="),
    *("a=b", "*", "~", "!", ";", "&", "|", ">", ",", "a,b", ":", "{{ run }}", "'", "''", '"', "é☃"),
]
TEXT = st.sampled_from(ODD) | st.text(max_size=12)


def mostly(odd, *good):
    """One of the good values, or one time in sixteen an odd one."""
    return st.integers(0, 15).flatmap(lambda n: odd if n == 0 else st.sampled_from(good))


OPTIONS = st.builds(
    Options,
    partition=mostly(TEXT, None, "main", "low", "high"),
    account=mostly(TEXT, None, "vision"),
    qos=mostly(TEXT, None),
    constraint=mostly(TEXT, None),
    reservation=mostly(TEXT, None),
    nodelist=mostly(TEXT, None, "n1", "n[2-3]"),
    exclude=mostly(TEXT, None, "n4"),
    exclusive=st.booleans(),
    gres_style=st.sampled_from(["gres", "gpus-per-node"]),
    licenses=mostly(TEXT, None),
    mail_type=mostly(TEXT, None, "END", "END,FAIL"),
    mail_user=mostly(TEXT, None, "a b"),
    python=mostly(TEXT, None, "/a b/python"),
    modules=st.lists(mostly(TEXT, "cuda/12", "a b", "$(id)"), max_size=2).map(tuple),
    setup=mostly(st.just(("echo\r",)), (), ("ulimit -c 0",), ("#SBATCH --nice=7",)),
    signal_seconds=mostly(st.just(600), None, 1, 30),
    container=st.none()
    | st.builds(
        Container,
        mostly(TEXT, "a b.sif", "nvcr.io#x:1"),
        st.sampled_from(["pyxis", "apptainer"]),
    ),
    extra=st.dictionaries(mostly(TEXT, "comment", "nice", "wckey"), mostly(TEXT, "7"), max_size=2),
)
RESOURCES = st.builds(
    Resources,
    time_limit=st.sampled_from([60, 600]),
    nodes=st.sampled_from([1, 2]),
    gpus_per_node=st.sampled_from([0, 2]),
    cpus_per_node=st.sampled_from([None, 4]),
    memory=st.sampled_from([None, 1024**3]),
)
