"""Site profiles parsed from the output of Slurm's commands on various sites, and their checks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import site
from deploykit.backends.slurm.options import Container
from deploykit.job.model import Entrypoint, JobSpec, Resources
from deploykit.lib.errors import NotFound

CONFIG = """\
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = prod
GresTypes               = gpu,nvme
JobRequeue              = 1
MaxArraySize            = 1001
PreemptMode             = OFF
PreemptType             = preempt/none
SelectType              = {select}
SLURM_VERSION           = 23.11.4
"""
PARTITIONS = """\
PartitionName=cpu AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-12:00:00 \
MinNodes=0 State=UP TotalNodes=2 PreemptMode=OFF
PartitionName=gpu AllowAccounts=vision,speech AllowQos=normal,long Default=NO MaxNodes=8 \
MaxTime=04:00:00 MinNodes=2 State=UP TotalNodes=3 PreemptMode=OFF
"""
NODES = """\
NodeName=c1 CPUTot=64 AvailableFeatures=(null) Gres=(null) OS=Linux 6.1 #1 SMP RealMemory=1 \
State=IDLE Partitions=cpu BootTime=None
NodeName=c2 CPUTot=64 AvailableFeatures=(null) Gres=(null) OS=Linux 6.1 #1 SMP RealMemory=1 \
State=DOWN+NOT_RESPONDING Partitions=cpu BootTime=None
NodeName=g1 CPUTot=96 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1),nvme:1 RealMemory=1 \
State=MIXED Partitions=gpu
NodeName=g2 CPUTot=96 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1),nvme:1 RealMemory=1 \
State=ALLOCATED Partitions=gpu
NodeName=g3 CPUTot=96 AvailableFeatures=h100,ib Gres=gpu:h100:8(S:0-1) RealMemory=1 \
State=IDLE+DRAIN Partitions=gpu
"""


@pytest.fixture
def prod():
    config = CONFIG.format(select="select/cons_res")
    return site.parse(config, PARTITIONS, NODES, "--container-image=IMAGE", "2026-11-21T00:00:00")


def problems(profile, *, options=None, **resources):
    job = JobSpec("one", Entrypoint("train.py"), Resources(**{"time_limit": 600, **resources}))
    chosen = slurm.Options(**(options or {}))
    return [(problem.path, problem.severity) for problem in site.problems(job, chosen, profile)]


def test_a_profile_has_what_the_commands_print(prod):
    assert (prod.cluster, prod.version, prod.accounting) == ("prod", "23.11.4", True)
    found = (prod.gpu_style, prod.has_memory, prod.pyxis, prod.max_array_size)
    assert found == ("gres", False, True, 1001)
    cpu, gpu = prod.partitions
    assert (cpu.default, cpu.max_seconds, cpu.max_nodes, cpu.accounts) == (True, 129600, None, None)
    assert (gpu.max_seconds, gpu.max_nodes, gpu.min_nodes) == (14400, 8, 2)
    assert gpu.accounts == ("vision", "speech")
    counts = [(group.count, group.usable, group.gpus) for group in prod.node_groups]
    assert counts == [(2, 1, 0), (2, 2, 4), (1, 0, 8)]
    assert prod.node_groups[1].features == ("a100", "ib")


GPU = {"partition": "gpu", "account": "vision", "gres_style": "gres"}


@pytest.mark.parametrize(
    ("options", "resources", "paths"),
    [
        ({}, {}, []),
        (GPU, {"nodes": 2, "gpus_per_node": 4}, []),
        (GPU, {"nodes": 1}, [("resources.nodes", "error")]),
        (GPU, {"nodes": 9}, [("resources.nodes", "error")] * 2),
        (GPU, {"nodes": 2, "time_limit": 14460}, [("resources.time_limit", "error")]),
        (GPU, {"nodes": 2, "gpus_per_node": 8}, [("resources.nodes", "error")]),
        (GPU, {"nodes": 3, "gpus_per_node": 4}, [("resources.nodes", "warning")]),
        ({**GPU, "account": "text"}, {"nodes": 2}, [("slurm.account", "error")]),
        ({**GPU, "qos": "short"}, {"nodes": 2}, [("slurm.qos", "error")]),
        ({**GPU, "constraint": "a100&ib"}, {"nodes": 2, "gpus_per_node": 4}, []),
        ({**GPU, "constraint": "h100"}, {"nodes": 2}, [("resources.nodes", "error")]),
        (
            {**GPU, "gres_style": "gpus-per-node"},
            {"nodes": 2, "gpus_per_node": 4},
            [("slurm.gres_style", "error")],
        ),
        ({**GPU, "constraint": "v100"}, {"nodes": 2}, [("slurm.constraint", "error")]),
        ({}, {"memory": 2**30}, [("resources.memory", "error")]),
        ({"array": 1001}, {}, []),  # indices 0 to 1000, which a controller accepts
        ({"array": 1002}, {}, [("slurm.array", "error")]),
        (
            {},
            {"gpus_per_node": 1},
            [("slurm.gres_style", "error"), ("resources.gpus_per_node", "error")],
        ),
    ],
)
def test_what_the_site_would_reject(options, resources, paths, prod):
    assert problems(prod, options=options, **resources) == paths


def test_a_container_requires_pyxis_and_a_job_a_partition(prod):
    options = {"container": Container("ubuntu")}
    assert problems(prod, options=options) == []
    without = dataclasses.replace(prod, pyxis=False)
    assert problems(without, options=options) == [("slurm.container.runtime", "error")]
    closed = dataclasses.replace(prod, partitions=prod.partitions[1:])
    assert problems(closed) == [("slurm.partition", "error")]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:2", 2),
        ("gpu:a100:4(S:0-1),nvme:1", 4),
        ("gpu:tesla:1,gpu:kepler:2", 3),
        ("(null)", 0),
        ("craynetwork:4", 0),
        ("gpu:a100_3g.20gb:2(S:0)", 2),
    ],
)
def test_the_number_of_gpus_of_a_node(text, count):
    assert site.gpus(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("UNLIMITED", None), ("30:00", 1800), ("04:00:00", 14400), ("7-00:00:00", 604800)],
)
def test_time_limits(text, seconds):
    assert site.seconds(text) == seconds


def test_a_profile_can_be_saved_and_loaded(prod, tmp_path):
    assert site.load(str(site.save(prod, tmp_path / "x.json"))) == prod
    assert site.save(prod) == site.path_of("prod")
    assert str(site.path_of("~who/prod.json")) == "~who/prod.json"
    assert site.load("prod") == prod


def test_a_missing_or_malformed_profile_is_named(prod, tmp_path):
    with pytest.raises(NotFound, match=r"sites/nowhere\.json"):
        site.load("nowhere")
    path = site.save(prod, tmp_path / "x.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_array_size": "many"}))
    with pytest.raises(NotFound, match="max_array_size expected a whole number"):
        site.load(str(path))
