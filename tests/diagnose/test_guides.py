"""Troubleshooting guides: with placeholders, with a run's values, and with hostile ones.

tests/cli/test_every_verb.py renders them for real runs of every backend.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest

from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules, guides
from deploykit.diagnose.guides import GUIDES, GuideContext
from deploykit.job.model import LogLine
from deploykit_node.network import interfaces
from deploykit_node.network.interfaces import Route
from deploykit_node.preflight.group import TRIALS

CHOSEN = 'network: {0} ({1}) is on the route to another node ({2}): NCCL_SOCKET_IFNAME="={0}"'


def case(*lines):
    result = GuideContext(
        "digits-1", "slurm", "42", state="failed", reason="rank 0 exited with code 1"
    )
    guides.read_nodes(result, [LogLine(text, node) for node, text in lines])
    return result


def commands(page):
    """The lines of all shell blocks."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.replace("\\\n", "").splitlines()]


@pytest.mark.parametrize("name", GUIDES)
def test_every_page_says_what_the_symptom_means_and_how_to_prove_the_cure(name):
    page = guides.page(name, GuideContext())
    assert page.startswith("# ")
    for heading in ("## The symptom", "## What it means", "## Verify", "## If it st"):
        assert heading in page
    assert all(shlex.split(line, comments=True) for line in commands(page))
    assert "{{" not in page
    assert max(map(len, page.splitlines())) < 220


def test_one_interface_on_all_nodes_is_set_exactly():
    nodes = case(
        (0, "interfaces: lo 127.0.0.1; ens5 10.0.0.1; docker0 172.17.0.1 (down)"),
        (0, CHOSEN.format("ens5", "10.0.0.1", "10.0.0.2")),
        (1, CHOSEN.format("ens5", "10.0.0.2", "10.0.0.1")),
    )
    page = guides.page("nccl", nodes)
    assert "Run digits-1 on slurm: failed. rank 0 exited with code 1" in page
    assert "| 0 | ens5 | 10.0.0.1 | 10.0.0.2 | lo 127.0.0.1; ens5 10.0.0.1; docker0 172." in page
    assert 'NCCL_SOCKET_IFNAME: "=ens5"' in page
    assert "export GLOO_SOCKET_IFNAME=ens5" in page
    assert "deploykit logs digits-1 --first-error" in page


def test_nccl_that_hangs_where_gloo_works_is_bisected():
    page = guides.page("nccl", GuideContext())
    tried = re.findall(r"`(NCCL_\w+): \"?(\w+)\"?`", page)
    assert dict(tried) == dict(pair for trial in TRIALS for pair in trial.env.items())
    assert "--preflight" in page.partition("## NCCL hangs, but Gloo works")[2]
    assert guides.BY_CAUSE["p2p_error"] == "nccl"


def test_unlike_interfaces_are_excluded_not_named():
    nodes = case(
        (0, CHOSEN.format("ens5", "10.0.0.1", "10.0.0.2")),
        (1, CHOSEN.format("enp3s0", "10.0.0.2", "10.0.0.1")),
    )
    assert '  NCCL_SOCKET_IFNAME: "^lo,docker,veth,br-,virbr,cni"\n' in guides.page("nccl", nodes)


def test_what_the_user_chose_is_told_apart_from_what_the_launcher_chose():
    page = guides.page("nccl", case((1, "network: keeping your NCCL_SOCKET_IFNAME=eth9 (WARNING)")))
    assert "Node 1 kept your own setting, `NCCL_SOCKET_IFNAME=eth9`" in page


def test_a_node_without_a_route_says_why():
    reason = "there is no route to another node of the job"
    page = guides.page("nccl", case((0, f"network: no interface chosen, because {reason}")))
    assert f"Node 0 chose no interface: {reason}." in page


def test_the_rendezvous_page_names_where_the_nodes_met():
    meeting = (0, "node 0 of 2 (srun): rendezvous at 10.0.0.1 port 12345")
    page = guides.page("rendezvous", case(meeting))
    assert "nc -vz 10.0.0.1 12345" in commands(page)


def test_the_sentences_are_those_of_the_launcher(monkeypatch):
    monkeypatch.setattr(interfaces, "_problem", lambda _: None)
    monkeypatch.setattr(interfaces, "_first_address", lambda route: route.source)
    choice = interfaces.choose(Route("10.0.0.2", "10.0.0.1", "ens5"), {})
    (node,) = case((0, choice.why)).nodes
    assert (node.interface, node.address, node.peer) == ("ens5", "10.0.0.1", "10.0.0.2")
    (node,) = case((0, f"interfaces: {interfaces.inventory()}")).nodes
    assert "lo 127.0.0.1" in node.interfaces


@pytest.mark.parametrize("name", GUIDES)
def test_hostile_values_become_neither_commands_nor_markup(name):
    evil = "x`; touch canary #|\n```sh\nrm -rf ~"
    context = GuideContext(
        evil, evil, evil, state=evil, reason=evil, file=evil, host=evil, port=evil
    )
    page = guides.page(name, context)
    assert all("touch" not in shlex.split(line, comments=True) for line in commands(page))
    assert page.count("\n```") == guides.page(name, GuideContext(state="failed")).count("\n```")
    assert not re.search(r"^rm -rf", page, re.MULTILINE)


def test_the_list_and_an_unknown_name(capsys):
    assert cli.main(["guide"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(GUIDES)
    assert cli.main(["guide", "nccll"]) == 64
    assert "did you mean 'nccl'?" in capsys.readouterr().err
    assert cli.main(["guide", "efa", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["guide"] == "efa"


def test_causes_point_to_guides_that_exist(tmp_path, capsys):
    assert set(guides.BY_CAUSE) <= {rule.label for rule in cause_rules.load().causes}
    assert set(guides.BY_CAUSE.values()) <= set(GUIDES)
    log = tmp_path / "node-0.log"
    log.write_text("NCCL WARN Bootstrap : no socket interface found\n")
    assert cli.main(["diagnose", str(log)]) == 79
    assert capsys.readouterr().out.endswith(
        "\n\nmore on this cause: deploykit explain net_iface_wrong\n"
        "step-by-step guide: deploykit guide nccl\n"
    )


def aws_commands(page):
    return [words for line in commands(page) if (words := shlex.split(line))[:1] == ["aws"]]


def test_the_page_without_a_job_has_every_rule_that_a_group_needs():
    """TCP and EFA in, EFA out, HTTPS to S3; the endpoint; and where a job's groups are found."""
    found = aws_commands(guides.page("security-groups", GuideContext()))
    assert [words[2] for words in found] == [
        "describe-training-job",
        "describe-security-groups",
        "authorize-security-group-ingress",
        "authorize-security-group-ingress",
        "authorize-security-group-egress",
        "authorize-security-group-egress",
        "create-vpc-endpoint",
    ]
    rules = [
        json.loads(words[words.index("--ip-permissions") + 1])[0]
        for words in found
        if "--ip-permissions" in words
    ]
    assert [(rule["IpProtocol"], rule.get("ToPort")) for rule in rules] == [
        ("tcp", 65535),
        ("-1", None),
        ("-1", None),
        ("tcp", 443),
    ]


def test_a_job_without_a_vpc_needs_no_group(project, capsys):
    """AWS is not asked: without credentials the page says so all the same."""
    section = "sagemaker: {role: 'arn:aws:iam::123456789012:role/r', bucket: my-bucket, "
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ours:1"
    section += f"region: us-east-1, instance_type: ml.g5.xlarge, image_uri: '{image}'}}\n"
    with (project / "job.yaml").open("a") as file:
        file.write(section)
    assert cli.main(["guide", "security-groups", "--job", "job.yaml"]) == 0
    page = capsys.readouterr().out
    assert "This page does not apply: the job has no VPC" in page
    assert aws_commands(page) == []


def test_the_efa_page_reads_the_log_of_a_job_that_runs():
    """The files of --debug are in S3 once a SageMaker job has ended."""
    found = commands(guides.page("efa", GuideContext()))
    assert found[0].endswith("--set env.NCCL_DEBUG=INFO")
    assert found[1].startswith("deploykit logs RUN | grep")
    context = GuideContext("digits-1", "sagemaker", "digits-1", state="running")
    assert "deploykit logs digits-1 | grep" in guides.page("efa", context)
