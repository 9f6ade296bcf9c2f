"""Display in notebooks: escaped, and shown by a real kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import deploykit
from deploykit.api.run import Run
from deploykit.job.model import State, Status
from deploykit.lib import render
from deploykit.run import registry
from tests.backends.test_example_backend import installed  # noqa: F401 - a backend that runs nothing

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"
HOSTILE = "</td></pre><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e\"'"
EXECUTE = """
import nbformat, sys
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        assert [name for name, _ in attributes if name != "style"] == []
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def shown(thing):
    return Tags(thing._repr_html_())


def test_no_text_of_a_run_becomes_html(project, monkeypatch):
    import backend_print

    run = deploykit.submit(backend="print", run="one", set={"output": HOSTILE})
    line = deploykit.LogLine(f"RuntimeError: {HOSTILE} CUDA out of memory", rank=0)
    monkeypatch.setattr(backend_print, "logs", lambda handle, follow: iter([line]))
    status = Status(State.FAILED, HOSTILE, HOSTILE, 1)
    monkeypatch.setattr(backend_print, "status", lambda handles: dict.fromkeys(handles, status))
    for thing in (run, deploykit.runs(), run.diagnose()):
        page = shown(thing)
        assert "<script>alert(1)</script>" in page.text
        assert page.tags <= {"b", "table", "thead", "tbody", "tr", "th", "td", "pre", "div"}
        assert not {"\x1b", "\u202e"} & set(page.text)
    assert "one: failed, exit code 1" in shown(run).text
    assert registry.get("one").reason == HOSTILE


def test_a_plan_shows_its_text_and_warnings(project, monkeypatch):
    options = {"set": {"resources.memory": "1GiB", "entrypoint.args": [HOSTILE]}, "run": "one"}
    plan = deploykit.plan(backend="local", **options)
    warned = Run(registry.Run("r", "n", "local", "t", "/f", "", "", None, 0.0, ""), plan.warnings)
    monkeypatch.setattr(Run, "status", lambda run: Status(State.RUNNING))
    assert "resources.memory: is not enforced on this machine" in shown(warned).text
    page = shown(plan)
    assert "resources.memory: is not enforced on this machine" in page.text
    assert "torchrun --nnodes=1" in page.text
    assert page.tags == {"b", "table", "tbody", "tr", "th", "td", "pre", "div"}


def test_the_middle_of_a_very_long_text_is_left_out():
    page = render.block("a" * 50_000 + "end")
    assert len(page) < 25_000
    assert "... 30003 characters ..." in page
    assert page.endswith("end</pre>")


@pytest.mark.torch
def test_a_real_kernel_runs_the_notebook(tmp_path):
    pytest.importorskip("nbclient", reason="optional: pip install nbclient ipykernel")
    copy = tmp_path / "notebook.ipynb"
    shutil.copy(NOTEBOOK, copy)
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "HOME": str(tmp_path)}
    argv = [sys.executable, "-c", EXECUTE, copy.name]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    plain, pages, printed = [], [], ""
    for cell in cells:
        for output in cell["outputs"]:
            data = output.get("data", {})
            plain += ["".join(data.get("text/plain", []))]
            pages += ["".join(data["text/html"])] if "text/html" in data else []
            printed += "".join(output.get("text", []))
    assert "{0: (20, 45), 1: (25, 45)}" in plain
    assert any("ValueError: a bad batch" in text for text in plain)
    plan, run, table, diagnosis = pages
    assert "torchrun --nnodes=1" in plan
    assert "succeeded, exit code 0" in run
    cell = '<td style="text-align: left">'
    assert [table.count(f"{cell}{state}<") for state in ("succeeded", "failed")] == [2, 1]
    assert "ValueError: a bad batch" in diagnosis
    assert "[rank 0] <b>training</b> [&#x27;" not in printed
    assert "[rank 0] <b>training</b> ['--lr', '0.1']" in printed


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
