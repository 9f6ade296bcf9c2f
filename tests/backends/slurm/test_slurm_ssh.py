"""Submitting from another machine: a real cluster behind a real sshd, with a user of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from deploykit.backends.slurm import remote
from deploykit.cli import main as cli
from deploykit.lib import paths
from tests import package_index
from tests.backends.slurm.login_node import login_node
from tests.backends.slurm.slurm_helpers import PATIENCE, output, wait_for
from tests.backends.slurm.test_slurm_stacks import HANGING
from tests.package_index import PASSWORD, USER, UV
from tests.programs import need
from tests.run.test_debugger import check
from tests.strangers import modes, too_wide

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm-ssh")]

TRAINER = """
import getpass, os, sys, time
with open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + "/starts", "a") as file:
    print(getpass.getuser(), file=file)
print("hello", *sys.argv[1:], flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep(900)
sys.exit(int(os.environ.get("CODE", "0")))
"""
JOB = """\
name: far
entrypoint: {script: train.py, args: ["it's", "$(id)", "é"], launcher: python}
resources: {time_limit: 10m}
"""
TORCHRUN = ("--set", "entrypoint.launcher=torchrun")

ODD = [[5], [0, 1, 2, 3, 4, 6, 7]]
"""The ranks of HANGING by place."""


@pytest.fixture(scope="module")
def node(running_cluster):
    need("ssh", "sshd")
    for folder in (running_cluster, running_cluster / "munge"):
        folder.chmod(0o755)  # the other user needs slurm.conf and the socket of munge
    with login_node(running_cluster / "slurm.conf") as started:
        yield started


@pytest.fixture
def laptop(cluster, node, tmp_path, monkeypatch):
    """A project on a machine without Slurm, where `ssh login1` works."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    node.use(monkeypatch)
    yield node
    node.proxy.left = None
    node.close()
    output("scancel", f"--user={node.user}")


def process(*words):
    """Run a command in a process without a cluster: exit code, standard output and error."""
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    argv = [sys.executable, "-m", "deploykit", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run(*words):
    """The same in this process, which is faster."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as off_cluster:
        off_cluster.delenv("SLURM_CONF")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([*words])
    return code, out.getvalue(), err.getvalue()


def submit(node, name, *words):
    return run("submit", "--backend", "slurm", "--run", name, *node.settings, *words)


def remote_folder(node, name):
    """The run's folder on the login node."""
    return Path(f"{node.folder}/home/runs of {node.user}/runs/{name}")


def jobs_of(name):
    ids = output("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i")
    return ids.split()


def test_the_life_of_a_run(laptop):
    code, out, err = process(
        *("submit", "--backend", "slurm", "--run", "life"), *laptop.settings, *TORCHRUN
    )
    assert code == 0, err
    assert "slurm://login1/" in out
    code, out, err = process("wait", "life")
    assert code == 0, (out, err, run("logs", "life"))
    code, out, _ = process("logs", "life", "--rank", "0")
    assert (code, out) == (0, "[rank 0] hello it's $(id) é\n")
    assert (remote_folder(laptop, "life") / "output/starts").read_text() == f"{laptop.user}\n"
    (row,) = json.loads(process("status", "life", "--json")[1])
    assert row["output"] == f"login1:{remote_folder(laptop, 'life')}/output"
    assert len(jobs_of("life")) == 1


@pytest.mark.slow
def test_the_node_sends_messages_and_this_machine_does_not_repeat_them(laptop, hook):
    notify = f"notify={json.dumps({'to': [hook.url], 'events': ['started', 'failed']})}"
    code, _, err = submit(laptop, "heard", "--set", notify, "--set", "env.CODE=3")
    assert code == 0, err
    assert run("wait", "heard")[0]
    wait_for(lambda: run("notify", "heard", "--follow")[0] == 0)  # no other follows it any more
    assert hook.events == ["started", "failed"]
    sent = remote_folder(laptop, "heard") / "exit_records"
    assert len(list(sent.glob("notified-*.json"))) == 2


@pytest.mark.nightly
@pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
def test_the_lock_of_a_project_travels_and_is_installed_there(laptop, team_index, tmp_path):
    """The nodes run as another user, and see neither the project nor its environment."""
    project = tmp_path / "project"
    package_index.write_project(project, team_index, "tiny<1.1")
    (project / "train.py").write_text("import tiny; print('tiny', tiny.version, tiny.__file__)")
    token = Path(laptop.folder, "home/token")
    token.write_text(PASSWORD)
    token.chmod(0o600)
    shutil.chown(token, laptop.user)
    shutil.copy(UV, laptop.folder / "uv")
    env = [f"UV_INDEX_TEAM_USERNAME={USER}", f"UV_INDEX_TEAM_PASSWORD=secret:file:{token}"]
    env += [f"TMPDIR={laptop.folder}/home"]
    sets = ["environment={uv: .}", f"slurm.setup=[export PATH={laptop.folder}:$PATH]"]
    sets += [f"env.{setting}" for setting in env]
    code, _, err = submit(laptop, "packages", *(it for one in sets for it in ("--set", one)))
    assert code == 0, err
    code, out, err = run("wait", "packages")
    assert code == 0, (out, err, run("logs", "packages"))
    _, out, _ = run("logs", "packages", "--rank", "0")
    assert f"tiny 1.0 {laptop.folder}/home/deploykit-" in out


READER = """
import os, pathlib
folder = pathlib.Path(os.environ["DEPLOYKIT_DATA_TRAIN"])
print("read", sorted(path.read_text() for path in folder.iterdir()), "in", folder, flush=True)
"""
SAVER = """
import os, pathlib
folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
print("found", sorted(path.name for path in folder.glob("*.pt")), flush=True)
(folder / f"epoch_{len(list(folder.glob('*.pt')))}.pt").write_text("weights")
"""


@pytest.fixture
def s3_settings(laptop, aws):
    """Words of a submit whose nodes use S3 with keys that they read from a file of the user's."""
    keys = Path(laptop.folder, "home/keys")
    keys.write_text("testing")
    keys.chmod(0o600)
    shutil.chown(keys, laptop.user)
    env = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), f"secret:file:{keys}")
    env |= {"AWS_ENDPOINT_URL": aws.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    return [word for name, value in env.items() for word in ("--set", f"env.{name}={value}")]


@pytest.mark.parametrize("source", [pytest.param("folder", marks=pytest.mark.nightly), "s3"])
def test_nodes_copy_their_data_behind_the_login_node(laptop, source, s3_settings):
    """A folder there that this machine does not have, or a prefix in S3."""
    Path("train.py").write_text(READER)
    if source == "s3":
        path = "s3://my-bucket/set"
        for number in range(4):
            content = f"{number}".encode()
            boto3.client("s3").put_object(Bucket="my-bucket", Key=f"set/{number}", Body=content)
    else:
        path = f"{laptop.folder}/home/set"
        Path(path).mkdir(exist_ok=True)
        for number in range(4):
            Path(path, f"{number}").write_text(f"{number}")
    disk = f"{laptop.folder}/home/disk of $SLURM_NODEID"
    channel = json.dumps({"path": path, "stage": "shard", "stage_folder": disk})
    words = ["--nodes", "2", "--set", f"data.train={channel}", *s3_settings]
    code, _, err = submit(laptop, f"staged-{source}", *words)
    assert code == 0, err
    code, out, err = run("wait", f"staged-{source}")
    assert code == 0, (out, err, run("logs", f"staged-{source}"))
    said = run("logs", f"staged-{source}")[1]
    assert f"read ['0', '2'] in {laptop.folder}/home/disk of 0/" in said
    assert f"read ['1', '3'] in {laptop.folder}/home/disk of 1/" in said


def test_checkpoints_of_a_cluster_behind_a_login_node_go_to_a_bucket(laptop, s3_settings, tmp_path):
    Path("train.py").write_text(SAVER)
    words = ["--set", "checkpoints=s3://my-bucket/far", *s3_settings]
    for name, found in (("saver-1", []), ("saver-2", ["epoch_0.pt"])):
        code, _, err = submit(laptop, name, *words)
        assert code == 0, err
        code, out, err = run("wait", name)
        assert code == 0, (out, err, run("logs", name))
        assert f"found {found}" in run("logs", name)[1]
    code, out, err = run("fetch", "saver-1", "--checkpoints", "--to", str(tmp_path / "here"))
    assert code == 0, err
    names = sorted(path.name for path in (tmp_path / "here/checkpoints").glob("*.pt"))
    assert names == ["epoch_0.pt", "epoch_1.pt"]
    (row,) = json.loads(run("status", "saver-2", "--json")[1])
    assert row["checkpoints"]["location"] == "s3://my-bucket/far"
    assert row["checkpoints"]["error"] == ""


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_results_come_back(laptop, tool, tmp_path, monkeypatch, request):
    """With names that a shell or a list of files could take apart; nothing is copied twice."""
    need("rsync")
    monkeypatch.setattr(remote, "_without_rsync", set())
    greeting = Path(laptop.folder, "home/.bashrc")
    if tool == "rsync":  # what a greeting prints stops rsync, but not tar
        text = greeting.read_text()
        greeting.write_text("")
        request.addfinalizer(lambda: greeting.write_text(text))
    name = f"results-{tool}"
    assert submit(laptop, name)[0] == 0
    code, out, err = run("wait", name)
    assert code == 0, (out, err)
    far = remote_folder(laptop, name) / "output"
    odd = "it's a $(touch x)/new\nline é.txt"
    (far / odd).parent.mkdir()
    (far / odd).write_text("odd")
    shutil.chown((far / odd).parent, laptop.user)
    (far / "big").write_bytes(b"0123456789" * 100_000)
    target = tmp_path / "here"

    def fetch(*words):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main(["fetch", name, "--to", str(target), "--json", *words])
        assert code == 0, out.getvalue()
        return json.loads(out.getvalue())

    listed = {one["path"] for one in fetch("--dry-run")["files"]}
    assert listed == {f"output/{odd}", "output/big", "output/starts"}
    assert not target.exists()
    assert fetch()["bytes"] == 1_000_003 + len(f"{laptop.user}\n")
    assert (target / "output" / odd).read_text() == "odd"
    assert (target / "output/big").read_bytes() == (far / "big").read_bytes()
    assert fetch()["files"] == []
    (far / "big").write_bytes(b"changed")
    assert [one["path"] for one in fetch()["files"]] == ["output/big"]
    assert (target / "output/big").read_bytes() == b"changed"
    assert remote._without_rsync == (set() if tool == "rsync" else {"login1"})
    code, out, err = run("rm", name, "--remote", "--yes")
    assert code == 0, (out, err)
    assert not far.parent.exists()


def test_an_array_and_the_exit_code_of_the_trainer(laptop):
    assert submit(laptop, "seven", "--set", "env.CODE=7", "--set", "slurm.array=2")[0] == 0
    assert len(jobs_of("seven")) in (1, 2), "one job, or its tasks"
    code, out, _ = run("wait", "seven")
    assert code == 7
    assert "2 tasks: 2 failed; task 0: rank 0 exited with code 7" in out
    code, out, _ = run("logs", "seven", "--task", "1", "--rank", "0")
    assert (code, out) == (0, "[task 1] [rank 0] hello it's $(id) é\n")
    assert (remote_folder(laptop, "seven") / "output/1/starts").read_text() == f"{laptop.user}\n"


def test_a_command_beside_a_rank(laptop):
    (Path.cwd() / "train.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    assert submit(laptop, "inside", *TORCHRUN)[0] == 0
    wait_for(lambda: "up" in run("logs", "inside")[1])
    wait_for(lambda: json.loads(run("status", "inside", "--json")[1])[0]["state"] == "running")
    script = 'echo "$RANK $1 $(id -un)"; exit 7'
    code, out, err = process("exec", "inside", "--", "sh", "-c", script, "sh", "it's  $HOME")
    assert code == 7, err
    assert out.endswith(f"\n0 it's  $HOME {laptop.user}\n")  # after what the login prints
    assert run("cancel", "inside")[0] == 0


@pytest.mark.nightly
def test_the_stacks_of_eight_ranks_of_an_ordinary_user(laptop):
    """Who may read their own processes, and no others."""
    Path("train.py").write_text(HANGING)
    settings = ["--nodes", "2", "--processes-per-node", "4", *TORCHRUN]
    assert submit(laptop, "stacks", *settings)[0] == 0

    def found():
        code, out, _ = run("dump", "stacks", "--json")
        data = json.loads(out) if code == 0 else {"groups": []}
        return data if [one["ranks"] for one in data["groups"]] == ODD else None

    data = wait_for(found)
    assert {(one["tool"], one["problem"]) for one in data["ranks"]} == {("py-spy", None)}
    assert len({one["host"] for one in data["ranks"]}) == 2
    assert data["groups"][0]["called_at"]["text"] == "time.sleep(900)"
    assert run("cancel", "stacks")[0] == 0


def test_an_editor_stops_a_rank_behind_the_login_node(laptop, monkeypatch):
    """Whose start-up files greet their user before anything else."""
    with monkeypatch.context() as off_cluster:
        off_cluster.delenv("SLURM_CONF")
        words = ["--processes-per-node", "2", "--nodes", "2", "--backend", "slurm"]
        check(Path.cwd(), "3", *words, *laptop.settings, *TORCHRUN)


def test_a_refusal(laptop):
    code, _, err = submit(laptop, "refused", "--set", "slurm.partition=nope")
    assert code == 76
    assert "error: Slurm refused the job: invalid partition specified: nope; Batch job" in err
    assert "\n  set slurm.partition to one that" in err
    assert len(err.splitlines()) == 2


def doctor(node, *words):
    """The findings about the host, by code; this machine has no cluster."""
    argv = ["doctor", "--backend", "slurm", *node.settings, *words, "--json"]
    code, out, err = run(*argv)
    assert code in (0, 80), err
    return code, {one["code"]: one for one in json.loads(out)["findings"]}


def test_doctor_examines_the_host_and_not_this_machine(laptop):
    code, findings = doctor(laptop)
    assert code == 0
    assert "no_accounting" in findings
    assert {one["severity"] for one in findings.values()} == {"note"}
    code, findings = doctor(laptop, "--set", "resources.gpus_per_node=3")
    assert code == 80
    assert "no node in partition main has 3 GPUs" in findings["site_rejects"]["message"]


def test_doctor_finds_what_would_stop_a_submit_to_the_host(laptop):
    """The folder belongs to root, and there is no such Python; nothing is created there."""
    if not os.getuid() and laptop.user == "root":
        pytest.skip("optional: the login is root's, who can write anywhere")
    settings = ["slurm.folder=/nobody/writes/here", "slurm.python=~/no venv/bin/python"]
    code, findings = doctor(laptop, *(word for one in settings for word in ("--set", one)))
    assert code == 80
    assert findings["login_node_folder"]["severity"] == "error"
    assert "slurm.folder" in findings["login_node_folder"]["fix"]["settings"]
    assert "cannot be run on login1" in findings["login_node_python"]["message"]
    assert not Path("/nobody").exists()


def test_a_probe_of_the_host(laptop):
    code, out, err = run("backends", "slurm", "--probe", "--target", "login1")
    assert code == 0, err
    assert "4 of 4 nodes usable" in out
    assert run("check", "--backend", "slurm", *laptop.settings, "--set", "slurm.site=box")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--backend", "slurm", "--set", "slurm.host=x.invalid"],
        ["backends", "slurm", "--probe", "--target", "x.invalid"],
    ],
)
def test_an_unknown_host(laptop, words):
    code, _, err = run(*words, *(laptop.settings[2:] if words[0] == "doctor" else []))
    assert code == 69
    assert "error: ssh x.invalid" in err


def test_logs_are_followed_and_a_run_is_cancelled(laptop):
    assert submit(laptop, "long", "--set", "entrypoint.args=[wait]")[0] == 0
    argv = [sys.executable, "-m", "deploykit", "logs", "-f", "--rank", "0", "long"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout.readline() == "[rank 0] hello wait\n"
        assert run("cancel", "long")[0] == 0
        assert run("wait", "long")[0] == 143
        assert follower.wait(PATIENCE) == 0


def test_a_bundle_is_copied_once(laptop):
    def bundles():
        folder = remote_folder(laptop, "held").parents[1] / "bundles"
        return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    held = ("--set", "slurm.extra.hold=")
    assert submit(laptop, "held", *held)[0] == 0
    before = bundles()
    assert submit(laptop, "again", *held)[0] == 0
    assert bundles() == before
    assert submit(laptop, "again", *held)[0] == 0
    assert len(jobs_of("again")) == 1


def test_files_on_the_host_are_private(laptop):
    """Whatever the umask there, which only the trainer keeps; an open folder is closed."""
    home = remote_folder(laptop, "closed").parents[1]
    with Path(f"{laptop.folder}/home/.bashrc").open("a") as file:
        print("umask 0", file=file)
    home.mkdir(exist_ok=True)
    if not os.getuid():
        shutil.chown(home, laptop.user)
    home.chmod(0o777)
    code, _, err = process("submit", "--backend", "slurm", "--run", "closed", *laptop.settings)
    assert code == 0, err
    assert f"login1: {home}: the folder was accessible to other users; its mode is now 0700" in err
    assert run("wait", "closed")[0] == 0
    run("logs", "closed")
    mode_by_path = modes(home)
    assert mode_by_path["runs/closed/output/starts"] == 0o666
    trainers = {path for path in mode_by_path if path.endswith("/starts") or "__pycache__" in path}
    new = {path: mode for path, mode in mode_by_path.items() if "/" not in path or "closed" in path}
    assert too_wide({path: mode for path, mode in new.items() if path not in trainers}) == {}
    assert too_wide(modes(paths.state())) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="optional: only root can change the owner of a folder")
def test_a_folder_of_another_user_is_refused(laptop):
    folder = Path(f"{laptop.folder}/home/another's")
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    words = ["--set", f"slurm.folder={folder}"]
    code, _, err = submit(laptop, "another-owner", *words)
    assert code == 73
    assert f"login1: {folder} belongs to another user" in err
    assert list(folder.iterdir()) == []


def test_a_broken_connection_neither_loses_nor_repeats_a_job(laptop):
    """Broken at ten points: five while the bundle is copied, and five with the bundle in place."""
    whole = passed(laptop, "whole", fresh=True)
    short = passed(laptop, "short", fresh=False)
    cuts = [(whole * n // 6, True) for n in range(1, 6)]
    cuts += [(short * n // 11, False) for n in range(2, 11, 2)]
    ends = [cut(laptop, f"cut-{n}", *at) for n, at in enumerate(cuts)]
    assert any(ends), "no submit failed"


def passed(node, name, *, fresh):
    """The number of bytes of an undisturbed submit on a new connection."""
    before = node.proxy.passed
    assert send(node, name, fresh=fresh) == 0
    return node.proxy.passed - before


def send(node, name, *, fresh):
    if fresh:
        with Path("train.py").open("a") as file:
            print(f"# {name}", file=file)
    node.close()
    return submit(node, name, "--set", "slurm.extra.hold=")[0]


def cut(node, name, after, fresh):
    """Submit with a connection that breaks after `after` bytes, then again; the first exit code."""
    broken = node.proxy.broken
    node.proxy.left = after
    first = send(node, name, fresh=fresh)
    assert node.proxy.broken == broken + 1, "the connection did not break"
    code, out, err = submit(node, name, "--set", "slurm.extra.hold=")
    assert code == 0, err
    (job,) = jobs_of(name)
    assert f"slurm://login1/{job}" in out
    return first
