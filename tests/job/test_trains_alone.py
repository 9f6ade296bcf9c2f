"""Programs for one process: with several ranks, each would train alone on all data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job import checks
from deploykit.job import script as script_job
from deploykit.job.model import Entrypoint, JobSpec, Resources

ROOT = Path(__file__).parents[2]
TRAINS = "import torch\nmodel = torch.nn.Linear(1, 1)\n"
ALONE = {
    "PyTorch alone": TRAINS,
    "other packages": "import numpy as np, pandas\nfrom tqdm import tqdm\nfrom torch import nn\n",
    "only words": f'"""No torch.distributed, no RANK."""\n{TRAINS}print("not RANK")  # RANK\n',
    "a rank of a matrix": f"{TRAINS}rank = torch.linalg.matrix_rank(model.weight)\n",
    "a Trainer class of one's own": f"{TRAINS}class Trainer: ...\nTrainer()\n",
    "transformers, and a loop": f"{TRAINS}from transformers import AutoModel\n",
    "DataParallel, in one process": f"{TRAINS}torch.nn.DataParallel(model)\n",
}
TOGETHER = {
    "a process group": f"{TRAINS}torch.distributed.init_process_group()\n",
    "a process group, imported": f"{TRAINS}from torch import distributed as d\n",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel as DDP\n",
    "torchrun's variables": f"import os\n{TRAINS}os.environ['RANK']\n",
    "Slurm's variables": f"import os\n{TRAINS}os.getenv('SLURM_PROCID')\n",
    "the old option": f"{TRAINS}parser.add_argument('--local_rank')\n",
    "Lightning": f"{TRAINS}import lightning as L\n",
    "Accelerate": f"{TRAINS}from accelerate import Accelerator\n",
    "transformers.Trainer": f"{TRAINS}from transformers import AutoModel, Seq2SeqTrainer\n",
    "transformers.Trainer, by its module": f"{TRAINS}import transformers\ntransformers.Trainer()\n",
    "a package that is not known": f"{TRAINS}import teamlib.train\n",
    "an import by a variable": f"{TRAINS}import importlib\nimportlib.import_module(name)\n",
    "no PyTorch": "import numpy\nprint('hello')\n",
    "no Python": "import torch\nprint 'hello'\n",
}


@pytest.fixture
def checked(project, capsys):
    """The warnings of `check` about a job of two ranks, and its files."""

    def check(files, *words, entry="script: train.py"):
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        limits = "resources: {nodes: 1, processes_per_node: 2, time_limit: 10m}"
        Path("job.yaml").write_text(f"name: one\nentrypoint: {{{entry}}}\n{limits}\n")
        assert cli.main(["check", "--backend", "local", "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)["warnings"]
        return [one for one in found if "does not look distributed" in one["message"]]

    return check


@pytest.mark.parametrize("name", ALONE)
def test_a_script_for_one_process(name, checked):
    (warning,) = checked({"train.py": ALONE[name]})
    assert warning["message"].startswith("train.py does not look distributed: each of the 2 ranks")
    assert (warning["path"], warning["line"]) == ("entrypoint.script", 2)
    assert warning["hint"].startswith("set processes_per_node: 1; or use DistributedDataParallel")


@pytest.mark.parametrize("name", TOGETHER)
def test_a_script_whose_ranks_may_work_together(name, checked):
    assert checked({"train.py": TOGETHER[name]}) == []


def test_its_own_modules_are_read_too(checked):
    script = "from engine import loop\nimport models.small\nloop.train()\n"
    files = {
        "train.py": script,
        "engine/__init__.py": "",
        "engine/loop.py": "from .step import step\nfrom . import setup\n",
        "engine/step.py": "import torch\n",
        "engine/setup.py": "",
        "models/small.py": "import train\n",
    }
    assert len(checked(files)) == 1
    for name in ("engine/__init__.py", "engine/step.py", "engine/setup.py", "models/small.py"):
        assert checked({**files, name: "import torch.distributed\n"}) == [], name
    assert len(checked(files)) == 1


def test_a_module_and_packages_in_another_folder(checked):
    files = {"src/team/train.py": f"{TRAINS}import helper\n", "src/team/__init__.py": ""}
    files["src/helper.py"] = ""
    module = ("--set", "env.PYTHONPATH=src")
    (warning,) = checked(files, *module, entry="module: team.train")
    assert warning["message"].startswith("team.train does not look distributed")
    files["src/helper.py"] = "import torch.distributed\n"
    assert checked(files, *module, entry="module: team.train") == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--nodes", "3"], "set nodes: 1, processes_per_node: 1; or"),
        (["--nodes", "3", "--processes-per-node", "1"], "set nodes: 1; or"),
        (["--set", "resources={gpus_per_node: 4}"], "set gpus_per_node: 1; or"),
    ],
)
def test_how_to_train_once(checked, words, hint):
    (warning,) = checked({"train.py": TRAINS}, *words)
    assert warning["hint"].startswith(hint)


def test_one_process_is_enough_for_it(checked):
    assert checked({"train.py": TRAINS}, "--processes-per-node", "1") == []
    plain = ["--set", "entrypoint.launcher=python", "--nodes", "2", "--processes-per-node", "1"]
    assert checked({"train.py": TRAINS}, *plain) == []


def test_submit_says_so_once(project, capsys):
    Path("train.py").write_text(TRAINS)
    words = ["--processes-per-node", "2", "--dry-run"]
    assert cli.main(["submit", "train.py", *words]) == 0
    assert capsys.readouterr().err.count("does not look distributed") == 1
    assert cli.main(["check", "-b", "local", "-b", "slurm", "--processes-per-node", "2"]) == 0
    assert capsys.readouterr().err.count("does not look distributed") == 1


SCRIPTS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("examples", "entrypoints", "templates", "benchmarks", "tests", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if script_job._RUNS.search(path.read_text("utf-8"))
]
"""All files that do something when they are run."""
FOR_ONE_PROCESS = {"examples/tutorials/one-to-many/single.py"}


def test_no_false_alarm_about_the_scripts_of_this_repository():
    """Each script in its own folder, as a job of two ranks."""
    warned = set()
    for name in SCRIPTS:
        script = ROOT / name
        entry = Entrypoint(script=script.name)
        job = JobSpec(
            name="one",
            source=str(script.parent),
            entrypoint=entry,
            resources=Resources(processes_per_node=2),
        )
        warned |= {name for _ in checks.check_together(job)}
    assert warned == FOR_ONE_PROCESS
