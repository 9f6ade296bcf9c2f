"""Packages of a uv.lock, installed beside PyTorch of the image, below SageMaker's real launcher."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploykit.job.model import Environment, LogLine
from deploykit.observe import usage
from tests import package_index
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts
from tests.package_index import PASSWORD, UV

pytestmark = [
    pytest.mark.aws,
    pytest.mark.torch,
    pytest.mark.xdist_group("port-7777"),
    pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv"),
]
PROGRAM = """\
import json, os, sys
import tiny, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.destroy_process_group()
with open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + f"/rank-{rank}.json", "w") as file:
    json.dump([tiny.version, sys.prefix, torch.__file__, torch.__version__], file)
"""


def test_the_lock_is_installed_and_pytorch_of_the_image_stays(
    aws, captured, source, tmp_path, monkeypatch
):
    packages = tmp_path / "packages"
    package_index.add_wheel(packages, "tiny", "1.0")
    package_index.add_wheel(packages, "torch", "9.9", ["cudalibs"])
    package_index.add_wheel(packages, "cudalibs", "1.0")
    package_index.add_program_wheel(tmp_path / "links", "uv", "9.0", UV)
    (source / "train.py").write_text(PROGRAM)
    (tmp_path / "disk").mkdir()
    image = {
        "TEAM_TOKEN": PASSWORD,
        "TMPDIR": str(tmp_path / "disk"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_FIND_LINKS": str(tmp_path / "links"),
        "PIP_NO_INDEX": "1",
    }
    (tmp_path / "hosts").mkdir()
    hosts = on_loopback(tmp_path / "hosts", 1)
    with package_index.serve(packages) as url:
        package_index.write_project(source, url, "tiny", "torch")
        monkeypatch.chdir(source)
        uv = Environment(uv=".")
        request = captured(source, nodes=1, environment=uv, env=package_index.SETTINGS)
        assert PASSWORD not in json.dumps(request)
        (output,) = run_on_hosts(request, aws.endpoint, hosts, image=image)
    found = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    version, prefix, torch, torch_version = found[0]
    assert version == "1.0"
    assert Path(prefix).is_relative_to(tmp_path / "disk")
    assert not Path(torch).is_relative_to(prefix)
    assert torch_version != "9.9"
    log = (hosts[0].folder / "log.txt").read_text()
    assert "uv is not on this node; installing uv>=0.9 with pip" in log
    assert log.count("environment: installing the packages of uv.lock into ") == 1
    assert ", and keeping torch of " in log
    assert not list(Path(prefix).rglob("cudalibs*"))  # needed by torch of the lock alone
    assert PASSWORD not in log
    line = re.search(r"Z \[node 0\] (packages: .*)", log)[1]
    recorded = usage.packages(tmp_path, [LogLine(line, node=0)])
    assert recorded["tiny"] == "1.0"
    assert recorded["torch"] in {torch_version, torch_version.partition("+")[0]}
