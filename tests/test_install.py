"""What the page on installing says, the Makefile does and the package claims."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest

from infra import install

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/install.md").read_text()
README = (ROOT / "README.md").read_text()
TORCH = re.search(r"^torch==(.+)$", install.CONSTRAINTS.read_text(), re.MULTILINE)[1]
UV = {"UV_DEFAULT_INDEX": "{site}/simple"}
PIP = {"PIP_INDEX_URL": "{site}/simple"}
"""Settings with which uv, or only pip, finds the ordinary index: that one installs."""


def make_wheel(folder, version):
    """A package torch, and the page that lists it in an index."""
    folder.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    name = f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server with an ordinary index and one of CPU builds; yields its address."""
    folder = tmp_path_factory.mktemp("site")
    make_wheel(folder / "simple/torch", TORCH)
    make_wheel(folder / "cpu/torch", f"{TORCH}+cpu")
    make_wheel(folder / "old/torch", "1.0+cpu")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def silent():
    """The address of a server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An environment as the script makes it, for many tests: that takes seconds."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def install_torch(site, empty, tmp_path):
    """Install torch into an environment; returns what that prints and torch's version."""

    def installed(*, made=True, **variables):
        if made and not (tmp_path / "venv").exists():
            shutil.copytree(empty, tmp_path / "venv", symlinks=True)
        environment = {
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": os.devnull,
            **{name: value.format(site=site) for name, value in variables.items()},
        }
        command = [sys.executable, ROOT / "infra/install.py", tmp_path / "venv", "torch"]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        code = "import importlib.metadata as m; print(m.version('torch'))"
        shown = subprocess.run(
            [tmp_path / "venv/bin/python", "-c", code], check=True, capture_output=True, text=True
        )
        return done.stdout, shown.stdout.strip()

    return installed


@pytest.mark.slow
@pytest.mark.parametrize("configured", [PIP, UV], ids=["pip", "uv"])
def test_a_cpu_index_that_answers_is_used(configured, install_torch, site):
    shown, version = install_torch(TORCH_INDEX="{site}/cpu", **configured)
    assert shown == f"Installing PyTorch {TORCH} from {site}/cpu\n"
    assert version == f"{TORCH}+cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("http://torch.invalid/whl/cpu", "http://torch.invalid/whl/cpu cannot be used: [Errno"),
        pytest.param("{silent}", "no answer within 3 s", marks=pytest.mark.nightly),
        ("{site}/missing", "cannot be used: "),
        pytest.param(
            "{site}/old", "/old has no suitable build for this machine", marks=pytest.mark.nightly
        ),
        pytest.param("", "TORCH_INDEX is empty", marks=pytest.mark.nightly),
    ],
    ids=["unresolvable", "hanging", "without torch", "too old", "none"],
)
def test_the_ordinary_index_suffices(index, reason, install_torch, silent):
    shown, version = install_torch(TORCH_INDEX=index.replace("{silent}", silent), **PIP)
    *_, line = shown.splitlines()
    assert f" from the default index, {install.USUAL_SIZE} (" in line
    assert reason in line
    assert version == TORCH


@pytest.mark.slow
def test_a_gpu_needs_the_ordinary_index(install_torch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").touch(0o755)
    shown, version = install_torch(made=False, **PIP)
    assert shown.endswith("(this machine has an NVIDIA driver)\n")
    assert version == TORCH


@pytest.mark.slow
def test_pip_tries_what_uv_cannot_install(install_torch):
    shown, version = install_torch(UV_DEFAULT_INDEX="{site}/missing", TORCH_INDEX="", **PIP)
    assert shown.endswith("(TORCH_INDEX is empty)\nuv failed; trying pip.\n")
    assert version == TORCH


@pytest.mark.slow
def test_the_installed_build_of_torch_is_kept(install_torch):
    install_torch(TORCH_INDEX="{site}/cpu", **PIP)
    for configured in (PIP, UV):
        assert install_torch(TORCH_INDEX="", **configured) == ("", f"{TORCH}+cpu")


def test_an_old_python_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or later.*\n.*make PYTHON="):
        install.main(str(tmp_path / "venv"), "torch")
    assert not (tmp_path / "venv").exists()


def test_the_pages_agree_with_the_script():
    for page in (README, PAGE):
        assert f"pip install torch --index-url {install.CPU_INDEX}`" in page
        assert "`pip install '.[train]'`" in page
    for size in re.findall(r"\d\.\d", install.CPU_SIZE + install.USUAL_SIZE):
        assert size in PAGE
    assert README.index("make run") < README.index("make test") < README.index("pip install")


def test_python_versions_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    documented = re.findall(r"^\| (3\.\d+) \|", PAGE, re.MULTILINE)
    assert claimed == documented
    assert project["requires-python"] == f">={claimed[0]}"
