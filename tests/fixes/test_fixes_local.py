"""Fixes of failures on this machine: the run fails, the printed command is run, the next succeeds.

Where a command only shows something, the test checks that it shows the fact that the step is about.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.run import lifecycle
from tests.fixes.printed import commands, ended, log_of, shell, starting, submitted
from tests.ports import free_port

pytestmark = pytest.mark.torch

JOB = """\
name: one
entrypoint: {script: train.py, launcher: %s, args: [%s]}
resources: {nodes: 1, processes_per_node: %d, time_limit: 5m}
env: {OMP_NUM_THREADS: 1%s}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A function that writes the job of this folder; one rank needs no torchrun, nor torch."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(program, args="", ranks=1, env="", more=""):
        Path("train.py").write_text(program)
        launcher = "python" if ranks == 1 else "torchrun"
        Path("job.yaml").write_text(JOB % (launcher, args, ranks, env) + more)

    return write


def test_a_secret_file_that_others_can_read(job, capsys, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("abc")
    secret.chmod(0o644)
    job("import os; assert os.environ['TOKEN'] == 'abc'", env=f", TOKEN: 'secret:file:{secret}'")
    assert ended("before")[0] == 78
    found = commands(capsys, "before", "secret_unresolved")
    assert found == [f"chmod 600 {secret}"]
    assert shell(starting(found, "chmod 600 ")).returncode == 0
    assert ended("after")[0] == 0


def test_a_package_that_is_missing(job, capsys, tmp_path):
    python = environment(tmp_path / "env")
    wheel(tmp_path / "wheels")
    job("import slugify; print('found', slugify.NAME)", more=f"local: {{python: {python}}}\n")
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "missing_module")
    look, install = starting(found, f"{python} -c "), starting(found, f"{python} -m pip install ")
    assert (look, install) == (
        f"{python} -c 'import slugify'",
        f"{python} -m pip install python-slugify",
    )
    assert shell(look).returncode == 1
    done = shell(install, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert done.returncode == 0, done.stderr
    assert shell(look).returncode == 0
    code, log = ended("after")
    assert (code, "found ours" in log) == (0, True)


def test_a_package_of_the_source_in_src(job, capsys):
    job("import nets; print('found', nets.__file__)")
    Path("src/nets").mkdir(parents=True)
    Path("src/nets/__init__.py").touch()
    assert ended("before")[0] == 1
    again = starting(commands(capsys, "before", "missing_module"), "deploykit rerun ")
    assert again.endswith(" --set env.PYTHONPATH=src")
    code, run = submitted(shell(again))
    assert (code, "/src/nets/__init__.py" in log_of(run)) == (0, True)


CUDA_ONLY = """\
import os, torch
if hasattr(torch._C, "_cuda_setDevice"):
    del torch._C._cuda_setDevice  # as in a build without CUDA
if not os.environ.get("ON_CPU"):
    torch.cuda.set_device(0)
"""


@pytest.mark.nightly
def test_a_pytorch_that_is_built_without_cuda(job, capsys):
    job(CUDA_ONLY)
    assert ended("before")[0] == 1
    (look,) = commands(capsys, "before", "gpu_not_visible")
    assert look.startswith(f"{sys.executable} -c ")
    here = importlib.import_module("torch").version.cuda
    assert shell(look).stdout.strip() == str(here)
    job(CUDA_ONLY, env=", ON_CPU: 'yes'")
    assert ended("after")[0] == 0


def environment(folder):
    """An environment of its own that sees this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def wheel(folder):
    """A package whose name is not that of its module."""
    folder.mkdir()
    info = "python_slugify-1.0.dist-info"
    with zipfile.ZipFile(folder / "python_slugify-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("slugify.py", "NAME = 'ours'\n")
        text = "Metadata-Version: 2.1\nName: python-slugify\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", text)
        tags = "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.nightly
def test_a_time_limit_on_this_machine(job, capsys):
    """The minimum in a job file is a minute; the plan of the first run has 3 s."""
    job("import time; time.sleep(20); print('finished')")
    plan = lifecycle.prepare(Path("job.yaml"), [], "local", "before").plan
    text = plan.text.replace("--time-limit=300 ", "--time-limit=3 ")
    lifecycle.submit(plan._replace(text=text))
    assert cli.main(["wait", "before"]) == 124
    (again,) = commands(capsys, "before", "time_limit")
    assert again == "deploykit rerun before --set resources.time_limit=TIME"
    cli.main(["diagnose", "before"])
    assert "failed first" not in capsys.readouterr().out
    code, run = submitted(shell(again.replace("TIME", "10m")))
    assert (code, "finished" in log_of(run)) == (0, True)


def test_a_port_that_another_process_uses(job, capsys):
    port = free_port()
    program = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', %d)); s.listen()"
    holder = subprocess.Popen([sys.executable, "-c", f"{program % port}; time.sleep(900)"])
    try:
        job(f"{program % port}".replace("s.bind", f"print('port: {port} in use?'); s.bind"))
        while not listens(port):
            assert holder.poll() is None
        code, _ = ended("before")
        assert code == 1
        found = commands(capsys, "before", "port_in_use")
        shown = shell(starting(found, "ss -ltnp ")).stdout
        assert f"pid={holder.pid}," in shown
        (pid,) = re.findall(r"pid=(\d+),", shown)
        assert shell(starting(found, "kill ").replace("PID", pid)).returncode == 0
        holder.wait()
        assert ended("after")[0] == 0
    finally:
        holder.kill()
        holder.wait()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_port_of_a_launcher_on_one_node(job, capsys, tmp_path):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        log, port = tmp_path / "a.log", holder.getsockname()[1]
        fixed = "from torch.distributed import TCPStore; "
        fixed += f"TCPStore('127.0.0.1', {port}, is_master=True)"
        done = shell(f'{sys.executable} -c "{fixed}"')
        log.write_text(done.stdout + done.stderr)
        found = commands(capsys, log, "port_in_use")
        assert starting(found, "ss -ltnp ") == f"ss -ltnp | grep :{port}"
        job("print('ran')")
        command = starting(found, "torchrun --standalone ")
        done = shell(
            command.replace("PER-NODE=N", "").replace("=N", "=1").replace("SCRIPT", "train.py")
        )
        assert (done.returncode, done.stdout) == (0, "ran\n")


def test_arguments_that_the_program_does_not_accept(job, capsys):
    job(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--epochs', type=int)\nprint(parser.parse_args())\n",
        args="--epoch, 5, --lr, 1",
    )
    assert ended("before")[0] == 2
    (usage,) = commands(capsys, "before", "bad_arguments")
    assert usage == f"{sys.executable} train.py --help"
    done = shell(usage)
    assert (done.returncode, "--epochs EPOCHS" in done.stdout) == (0, True)
    job(Path("train.py").read_text(), args="--epochs, 5")
    assert ended("after")[0] == 0


RAISES = """\
import os
print("world", os.environ.get("WORLD_SIZE"), flush=True)
if "FIXED" not in os.environ:
    raise ValueError("not yet")
"""


def test_an_exception_of_the_program(job, capsys):
    job(RAISES, ranks=2)
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "user_code_error")
    shown = shell(starting(found, "deploykit logs before --first-error"))
    assert "Traceback (most recent call last)" in shown.stdout
    assert "ValueError: not yet" in shown.stdout
    alone = starting(found, "deploykit rerun before --backend local --set resources.nodes=1 ")
    done = shell(alone)
    assert (done.returncode, done.stdout.count("world 1")) == (1, 1), done.stdout
    job(RAISES, ranks=2, env=", FIXED: 'yes'")
    assert ended("after")[0] == 0


def test_one_rank_on_this_machine_is_not_told_to_run_with_one_rank_on_this_machine(job, capsys):
    job(RAISES)
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "user_code_error")
    assert found == ["deploykit logs before --first-error"]


def test_a_file_that_does_not_exist(job, capsys, tmp_path):
    data = tmp_path / "data.bin"
    job(f"open('{data}').read()")
    assert ended("before")[0] == 1
    (look,) = commands(capsys, "before", "file_not_found")
    assert look == f"ls -l {data}"
    assert shell(look).returncode == 2
    data.write_text("here")
    assert shell(look).returncode == 0
    assert ended("after")[0] == 0


MANY = "files = [open('/dev/null') for _ in range(300)]; print('opened')"


def test_too_many_open_files(job, capsys):
    job(MANY)
    low = "ulimit -S -n 256; "
    assert "Too many open files" in failed_log(low)
    raised = starting(commands(capsys, "low", "fd_limit"), "ulimit -n ")
    done = shell(f"{low}{raised} && deploykit submit --backend local")
    assert submitted(done)[0] == 0


def failed_log(before):
    shell(f"{before}deploykit submit --backend local --run low")
    assert cli.main(["wait", "low"]) == 1
    return log_of("low")


def test_a_script_with_a_syntax_error(job, capsys, tmp_path):
    job("if True\n    pass\n")
    assert ended("before")[0] == 1
    log, script = tmp_path / "a.log", tmp_path / "a.sh"
    script.write_text("if true; then\n")
    log.write_text(shell(f"bash {script}").stderr)
    mine = commands(capsys, "before", "user_code_error")
    python = starting(mine, f"{sys.executable} -m py_compile ")
    bash = starting(commands(capsys, log, "user_code_error"), "bash -n ")
    assert shell(python.replace("FILE", "train.py")).returncode == 1
    assert shell(bash.replace("SCRIPT", str(script))).returncode == 2
    job("if True:\n    pass\n")
    script.write_text("if true; then :; fi\n")
    assert shell(python.replace("FILE", "train.py")).returncode == 0
    assert shell(bash.replace("SCRIPT", str(script))).returncode == 0
    assert ended("after")[0] == 0


def test_a_full_disk(job, capsys, tmp_path):
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("optional: only root can mount a small disk")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", small], check=True)
    try:
        job(f"open('{small}/checkpoint', 'wb').write(bytes(1 << 20))")
        assert ended("before")[0] == 1
        found = commands(capsys, "before", "disk_full")
        shown = shell(starting(found, "df -h; df -i")).stdout
        assert re.search(rf"100% {small}$", shown, re.MULTILINE), shown
        subprocess.run(["mount", "-o", "remount,size=8m", small], check=True)
        assert ended("after")[0] == 0
    finally:
        subprocess.run(["umount", small], check=True)


LATE = """\
import datetime, os, time
import torch
from torch import distributed
distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
distributed.barrier()
if not os.environ.get("FIXED"):
    distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    if os.environ["RANK"] == "1":
        time.sleep(600)
distributed.all_reduce(torch.ones(1))
distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_a_collective_that_timed_out(job, capsys):
    job(LATE, ranks=2)
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "collective_timeout")
    code, run = submitted(shell(starting(found, "deploykit rerun before --set preflight=true")))
    assert (code, "preflight: " in log_of(run)) == (1, True)
    code, run = submitted(shell(starting(found, "deploykit rerun before --set debug=true")))
    assert (code, paths.run_folder(run).joinpath("debug").is_dir()) == (1, True)
    job(LATE, ranks=2, env=", FIXED: 'yes'")
    assert ended("after")[0] == 0


LOADS = """\
import argparse, os
import torch
if not os.path.exists("/{file}"):
    torch.save({{"options": argparse.Namespace(lr=0.1)}}, "/{file}")
{permit}
print("lr", torch.load("/{file}")["options"].lr)
"""


def test_a_class_that_torch_load_refuses(job, capsys, tmp_path):
    file = str(tmp_path / "last.pt")[1:]
    job(LOADS.format(file=file, permit=""))
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "weights_only")
    permit = starting(found, "torch.serialization.add_safe_globals(")
    assert permit.replace("argparse.Namespace", "") == "torch.serialization.add_safe_globals([])"
    job(LOADS.format(file=file, permit=permit))
    code, log = ended("after")
    assert (code, "lr 0.1" in log) == (0, True)


TRAINS = """\
import sys
import torch
from pathlib import Path
{early}
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
{late}
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("threads of gloo:", any("gloo" in name for name in names), flush=True)
import os
os._exit(0)
"""


@pytest.mark.nightly
def test_threads_of_gloo_that_outlive_python(job, capsys, tmp_path):
    """Whether one of them aborts Python is chance, so the test looks for the threads."""
    log = tmp_path / "a.log"
    log.write_text("terminate called without an active exception\n")
    found = commands(capsys, log, "aborted_at_exit")
    late = [
        starting(found, "del model, optimizer"),
        starting(found, "torch.distributed.destroy_process_group()"),
    ]
    early = starting(found, "import torch.distributed.nn.functional")
    for name, above, below, left in (
        ("before", "", "", True),
        ("without-import", "", "\n".join(late), True),
        ("after", early, "\n".join(late), False),
    ):
        job(TRAINS.format(early=above, late=below), ranks=2)
        code, text = ended(name)
        assert (code, f"threads of gloo: {left}" in text) == (0, True), (name, text)


def test_what_deploykit_knows_of_a_run(job, capsys):
    """The steps that look at the logs of a rank, or at the state of the run."""
    text = "ncclUniqueId: Timed out after 9 s"
    job(f"import sys; sys.exit({text!r})")
    assert ended("before")[0] == 1
    found = commands(capsys, "before", "nccl_init_timeout")
    assert text in shell(starting(found, "deploykit logs before --rank 0")).stdout
    job("import sys; sys.exit('slurmctld is not responding: Unable to contact slurm controller')")
    assert ended("busy")[0] == 1
    found = commands(capsys, "busy", "slurm_controller_busy")
    assert "busy: failed" in shell(starting(found, "deploykit status busy")).stdout


def test_logs_of_ranks_without_deploykit(job, capsys, tmp_path):
    job("raise KeyError('label')")
    words = f"torchrun --log-dir {tmp_path}/LOGS --tee 3 --nproc-per-node=1 train.py"
    done = shell(f"MASTER_PORT={free_port()} {words}")
    assert done.returncode
    log = tmp_path / "a.log"
    log.write_text("ncclRemoteError: a call failed, remote process exited\n")
    command = starting(commands(capsys, log, "remote_peer_died"), "deploykit diagnose ")
    done = shell(f"cd {tmp_path} && {command} --json")
    assert json.loads(done.stdout)["causes"][0]["cause"] == "user_code_error"
