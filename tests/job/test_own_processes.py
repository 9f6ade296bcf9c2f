"""Scripts that start their own processes, which `check` and `init` see."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from deploykit.cli import main as cli

TUTORIAL = """\
import torch.multiprocessing as mp
import torch.distributed as dist

def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
PLAIN = {
    TUTORIAL: "calls mp.spawn (line 8)",
    "import torch\nif True:\n    torch.multiprocessing.spawn(main)\n": (
        "calls torch.multiprocessing.spawn"
    ),
    "from torch.multiprocessing import spawn as go\ngo(main)\n": "calls torch.multi",
    "from accelerate import notebook_launcher\nnotebook_launcher(f)\n": "calls notebook_launcher",
    "import os\nos.system('torchrun --nproc-per-node 4 a.py')\n": "runs torchrun (line 2)",
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-m', 'torch.distributed.launch', 'a.py'])\n": (
        "runs torch.distributed.launch"
    ),
    "from subprocess import run\nrun(['accelerate', 'launch', 'a.py'])\n": "runs accelerate launch",
    "import subprocess\nsubprocess.Popen('python -m fastai.launch a.py', shell=True)\n": (
        "runs fastai.launch"
    ),
}
QUIET = {
    "a usage": '"""Start it with torchrun --nproc-per-node 4, or mp.spawn( ... )."""\nprint(1)\n',
    "a comment": "# accelerate launch a.py\nprint(1)\n",
    "a method": "import multiprocessing as mp\nmp.set_start_method('spawn')\n",
    "another program": "import subprocess\nsubprocess.run(['git', 'log'])  # torchrun\n",
    "no Python": "mp.spawn(\n",
}


@pytest.fixture
def checked(project, capsys):
    def check(text, **entry):
        Path("train.py").write_text(text)
        job = {"name": "one", "entrypoint": {"script": "train.py", **entry}}
        Path("job.yaml").write_text(json.dumps({**job, "resources": {"time_limit": "10m"}}))
        code = cli.main(["check", "--backend", "local", "--json"])
        return code, json.loads(capsys.readouterr().out)["warnings"]

    return check


@pytest.mark.parametrize("text", PLAIN, ids=PLAIN.values())
def test_a_script_that_starts_its_own_processes(text, checked):
    code, found = checked(text)
    (warning,) = found
    assert (code, warning["severity"]) == (0, "warning")
    assert f"train.py {PLAIN[text]}" in warning["message"]
    assert "launcher: python" in warning["hint"]
    assert checked(text, launcher="python") == (0, [])


@pytest.mark.parametrize("name", QUIET)
def test_words_alone_are_no_warning(name, checked):
    code, found = checked(QUIET[name])
    assert (code, found) == (0, [])


def test_an_address_of_its_own(checked):
    program = """\
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"tcp://{host}:12355", rank=0, world_size=2)
    """
    _, found = checked(textwrap.dedent(program))
    (warning,) = found
    assert "passes a tcp:// address to init_process_group (line 2)" in warning["message"]
    assert "without the address" in warning["hint"]


ADDRESS = "import os\nos.environ['MASTER_ADDR'] = 'localhost'\n"


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_an_address_that_is_every_node_itself(checked, capsys, launcher):
    assert checked(ADDRESS, launcher=launcher) == (0, [])
    two = ["check", "--backend", "local", "--set", "resources.nodes=2"]
    assert cli.main(two) == 0
    assert "train.py sets MASTER_ADDR to localhost (line 2), so each" in capsys.readouterr().err
    checked(f"import os\nif 'MASTER_ADDR' not in os.environ:\n    {ADDRESS[10:]}")
    assert cli.main(two) == 0
    assert "sets MASTER_ADDR" not in capsys.readouterr().err


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_a_launcher_as_the_module(module, checked):
    _, found = checked("", script=None, module=module)
    assert any(f"run {module} and start more ranks" in one["message"] for one in found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("retries", 1), ("resources.nodes", "2:4"), ("resources.processes_per_node", 2)],
)
def test_what_a_plain_process_lacks(project, key, value, capsys):
    words = ["--set", "entrypoint.launcher=python", "--set", f"{key}={value}"]
    assert cli.main(["check", "--backend", "local", *words]) == 65
    said = capsys.readouterr().err
    assert f"{key.replace('resources.nodes', 'resources.min_nodes')}: " in said
    assert "`launcher: python` starts " in said


def test_init_chooses_the_launcher(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TUTORIAL)
    assert cli.main(["init"]) == 0
    text = Path("job.yaml").read_text()
    assert "  launcher: python " in text
    assert "processes_per_node: 2" not in text
    assert cli.main(["check", "--backend", "local", "--strict"]) == 0
