"""The docs say what the code does: generated pages, links, names, and consoles that are run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from deploykit.backends.sagemaker import catalog
from deploykit.bundle import node_plane
from deploykit.cli import main as cli
from deploykit.job import checks
from deploykit.job.model import JobSpec, State
from tests.docs_runner import blocks, fits, play
from tests.package_index import PASSWORD, USER, UV, add_wheel
from tests.ports import free_port
from tests.programs import SLURM, needs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
JOB, SAGEMAKER = (block.text for block in blocks(README) if block.language == "yaml")
SHOWN = ("submit --dry-run", "submit -b slurm", "submit -b sagemaker --wait")


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def generator():
    before = list(sys.path)
    sys.path.insert(0, str(DOCS))
    try:
        spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_generated_pages_are_what_the_code_says_now(generator):
    pages = generator.pages()
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("reference/*")}
    assert set(on_disk) - {"glossary.md", "causes.md"} == set(pages)
    for name, text in pages.items():
        assert on_disk[name] == text, f"docs/reference/{name} is out of date: make docs"
    for name, text in generator.for_agents().items():
        on_disk = (DOCS / "extra" / name).read_text(encoding="utf-8")
        assert on_disk == text, f"docs/extra/{name} is out of date: make docs"


def test_agents_are_told_what_exists(generator):
    """AGENTS.md names targets, folders and packages; llms.txt has every page of the site."""
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    named = re.findall(r"`([\w.]+/[\w./]*)`", text)
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "deploykit" / path).exists(), path
    listed = re.findall(r"\]\((.*?)\.html\)", generator.for_agents()["llms.txt"])
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert set(listed) == pages - {"index", "extra/SKILL"}
    assert len(listed) == len(set(listed))


@pytest.mark.torch
def test_the_code_of_the_python_guide_runs(project):
    page = (DOCS / "how-to/python.md").read_text(encoding="utf-8")
    code = [block.text for block in blocks(page) if block.language == "python"]
    assert len(code) == 6
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] hello ['--epochs', '3']" in done.stdout
    assert "retries must be at least 0" in done.stdout
    assert "#SBATCH --nodes=1" in done.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_is_documented_and_explained(verb):
    page = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
    common = page.partition("\n## Common arguments\n")[2].partition("\n## ")[0]
    section = page.partition(f"\n## deploykit {verb}\n")[2].partition("\n## ")[0]
    kinds = cli.parser([verb])._actions
    sub = next(a for a in kinds if isinstance(a, argparse._SubParsersAction)).choices[verb]
    assert section
    for action in sub._actions:
        assert action.help
        if {"-h", "--help"}.isdisjoint(action.option_strings):
            written = section if action.help not in common else common
            assert all(f"`{form}" in written for form in action.option_strings)
            assert not action.option_strings or f"{action.option_strings[0]}" in section


def test_every_key_of_a_job_file_is_documented(generator):
    page = (DOCS / "reference/job-file.md").read_text(encoding="utf-8")
    for name, cls in {"": JobSpec, **generator.options()}.items():
        prefix = f"{name}." if name else ""
        assert all(f"`{prefix}{field.name}`" in page for field in dataclasses.fields(cls))


def test_the_states_are_explained(generator):
    assert set(generator.words.STATES) == {state.value for state in State}


def test_the_variables_on_the_node_are_those_of_the_code(generator):
    files = [
        ROOT / name.replace(node_plane.FOLDER, "entrypoints") for name in node_plane.node_plane()
    ]
    files += [ROOT / "deploykit/backends/base.py", ROOT / "deploykit/job/checks.py"]
    files += [ROOT / "deploykit/backends/sagemaker/request.py"]
    code = "".join(
        path.read_text(encoding="utf-8") for path in [*files, *ROOT.glob("templates/*.sh")]
    )
    described = {*generator.words.VARIABLES, *generator.words.INTERNAL}
    ours = {name.replace("<NAME>", "") for name in described if name.startswith("DEPLOYKIT_")}
    assert set(re.findall(r"\bDEPLOYKIT_[A-Z_]+", code)) == ours
    assert set(checks._RESERVED) - {"GROUP_RANK"} == {
        name for name in described if not name.startswith("DEPLOYKIT_")
    }
    assert "\nGRACE = 30.0\n" in code  # the number that the page gives


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_pages_name_no_path_of_the_machine_that_wrote_them(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"(?<![\w.:/])/(home|root|tmp|work|var|usr)/", text) is None


def test_readme_is_short_and_comes_to_the_point():
    lines = README.splitlines()
    assert len(lines) <= 100
    assert "make run" in "\n".join(lines[:10])
    head = "\n".join(lines[:32])
    assert head.count("```") % 2 == 0
    assert "pip install" in head
    assert "name: digits" in head
    for words in SHOWN:
        assert re.search(rf"^deploykit {words}\b", head, re.MULTILINE)


def test_all_pages_name_the_image_that_init_writes():
    """A page about older images may name one without a registry."""
    named = {
        (path.name, image)
        for path in (ROOT / "README.md", *DOCS.glob("how-to/*.md"), *DOCS.glob("tutorial/*.md"))
        for image in re.findall(r"\d{12}\.dkr\.ecr\.[\w.-]+/[\w.:-]+", path.read_text("utf-8"))
        if not image.startswith("123456789012")
    }
    assert {image for _, image in named} == {catalog.NEWEST_IMAGE}, named
    assert len(named) > 3


@pytest.fixture
def readme_project(tmp_path, monkeypatch):
    """The first job file of the README beside the project's own trainer."""
    folder = tmp_path / "a project"
    shutil.copytree(ROOT / "entrypoints/trainer", folder / "trainer")
    shutil.copy(ROOT / "entrypoints/train.py", folder)
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("words", SHOWN)
def test_the_three_commands_of_the_readme_can_be_planned(words, readme_project, capsys):
    argv = words.split()
    if "sagemaker" in argv:
        (readme_project / "job.yaml").write_text(JOB + SAGEMAKER)
    assert cli.main([*argv, *(["--dry-run"] if "--dry-run" not in argv else [])]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.torch
def test_readme_runs(readme_project):
    play(README, readme_project)


@pytest.mark.torch
def test_first_steps_run(tmp_path, monkeypatch):
    monkeypatch.delenv("DEPLOYKIT_HOME")
    folder = tmp_path / "hello"
    folder.mkdir()
    play((DOCS / "tutorial/first-steps.md").read_text(encoding="utf-8"), folder)


@pytest.mark.torch
def test_trainer_guide_runs(tmp_path):
    for name in ("train.py", "evaluate.py", "export.py", "trainer"):
        copy = shutil.copytree if name == "trainer" else shutil.copy
        copy(ROOT / "entrypoints" / name, tmp_path / name)
    play((DOCS / "how-to/trainer.md").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.torch
@pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
def test_the_script_of_the_environments_guide_runs(tmp_path, team_index, team_wheels, monkeypatch):
    text = "def intcomma(number):\n    return f'{number:,}'\n"
    add_wheel(team_wheels, "humanize", "4.0", text=text)
    address = team_index.replace("//", f"//{USER}:{PASSWORD}@")
    monkeypatch.setenv("UV_DEFAULT_INDEX", address)
    folder = tmp_path / "project"
    folder.mkdir()
    play((DOCS / "how-to/environments.md").read_text(encoding="utf-8"), folder)


@pytest.mark.torch
@pytest.mark.nightly
def test_ci_recipe_runs(tmp_path):
    page = (DOCS / "how-to/ci.md").read_text(encoding="utf-8")
    (recipe,) = [yaml.safe_load(one.text) for one in blocks(page) if one.language == "yaml"]
    steps = [step["run"] for step in recipe["jobs"]["train"]["steps"] if "run" in step]
    for verb in ("submit", "cancel", "report"):  # the steps of the recipe are played below
        assert any(f"deploykit {verb} " in step for step in steps)
        assert f"$ deploykit {verb} " in page
    play(page, tmp_path)


@pytest.mark.nightly
@pytest.mark.torch
def test_evaluate_guide_runs(tmp_path):
    play((DOCS / "how-to/evaluate.md").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.torch
@needs("curl")
def test_deploy_guide_runs(tmp_path):
    play((DOCS / "how-to/deploy.md").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.timeout(900)
def test_infra_guide_runs(tmp_path):
    play((DOCS / "how-to/infra.md").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.timeout(900)
def test_sagemaker_rehearsal_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    page = (DOCS / "how-to/rehearse-sagemaker.md").read_text(encoding="utf-8")
    install = "$ pip install --quiet 'moto[server]'\n"
    assert install in page
    play(page.replace(install, "").replace("5000", str(free_port())), tmp_path)


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
@needs(*SLURM)
def test_slurm_guide_runs(tmp_path, monkeypatch):
    project = tmp_path / "checkout"
    for name in ("infra", "entrypoints"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copy(ROOT / "job.yaml", project)
    boxes = Path(tempfile.mkdtemp(prefix="boxes-"))
    monkeypatch.setenv("TMPDIR", str(boxes))
    try:
        play((DOCS / "how-to/slurm.md").read_text(encoding="utf-8"), project)
    finally:
        for box in boxes.iterdir():
            stop = [sys.executable, ROOT / "infra/slurm/cluster.py", "stop", box]
            subprocess.run(stop, capture_output=True, check=True)
        shutil.rmtree(boxes)


def test_the_runner_sees_differences(tmp_path):
    assert fits("one ... three\n...\nend\n", "one two three\nx\ny\nend\n")
    assert not fits("one\n", "one\ntwo\n")
    with pytest.raises(AssertionError, match="and the page says"):
        play("```console\n$ echo yes\nno\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="false"):
        play("```console\n$ false\n```\n", tmp_path)
    play(
        "`f`:\n\n```text\nyes\n```\n```console\n$ cat f; exit_with() { return $1; }\nyes\n"
        "$ exit_with 3\n[exit code 3]\n```\n",
        tmp_path,
    )
