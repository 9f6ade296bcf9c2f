"""`sweep report` and `sweep watch`: a page read by a parser and a browser, and a live table."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths, render
from deploykit.observe import charts
from deploykit.observe.charts import Axis
from tests.browser import AXE, BROWSER, findings
from tests.live_run import OnTerminal
from tests.observe.test_report import EVIL, checked
from tests.sweep.test_sweep import SLEEP, deploykit, priced, wait_for

PARAMETERS = """{
  lr: {range: [0.001, 0.1], log: true},
  optimizer: {choice: [sgd, adamw]},
  momentum: {range: [0, 0.9], if: {optimizer: sgd}}}"""

SEED = """--do 'print("step 4/4 loss=%f" % (lr + {value}))'"""


@pytest.fixture
def searched(write, toy, sweep):
    """A sweep `s` with a price, and a parameter that depends on another."""
    priced(toy, billed=20)
    write(parameters=PARAMETERS, trials=10, parallel=5)
    sweep("start", "--sweep", "s")


@pytest.mark.slow
def test_the_page_of_a_sweep(searched, sweep):
    best = sweep("best", "s", "--json")
    assert sweep("report", "s").startswith("report-s.html: ")
    found = checked("report-s.html")
    for text in (
        "s finished",
        "10 of 10 trials on plain: 10 succeeded",
        f"The best is trial {best['trial']}, with loss {best['value']:.6g}",
        "Cost so far: 200.00 USD.",
        "deploykit sweep best s --write best.yaml",
        "PED-ANOVA",
        "Each line is a successful trial",
        "spent 200.00 USD",
        "0 to 0.9; if optimizer is sgd",
    ):
        assert text in found.text
    titles = " ".join(svg.get("aria-label", "") for svg in found.all("svg"))
    assert re.search(r"Importance (lr|optimizer) \d+% ", found.text)
    assert "parameters and objective of each trial" in titles
    page = Path("report-s.html").read_text()
    dots = re.findall('<circle class="dot [^>]*><title>(trial [^<]*)</title>', page)
    sgd = page.count(">sgd</td>")
    # each in the charts of trials, of lr and of optimizer; momentum is a parameter of sgd only
    assert len(dots) == 3 * 10 + sgd
    assert f"trial {best['trial']}: loss {best['value']:.6g}, lr " in "".join(dots)
    lines = page.count("<title>trial ") - len(dots)
    assert lines == 10 + 8  # a line each, and the curves of the best eight
    assert page.count('class="steps c1"') == 2  # the best so far, and its legend
    assert len(found.all("a")) == 1 + 10  # the run of the best trial, and of each
    headings = re.findall('<th scope="col">([^<]*)</th>', page)
    assert "cost" in headings
    assert "reason" not in headings  # all have succeeded
    if BROWSER:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--screenshot=s.png"]
        page = Path("report-s.html").absolute().as_uri()
        subprocess.run([*command, "--window-size=1200,3000", page], check=True, capture_output=True)
        assert Path("s.png").stat().st_size > 50_000  # an empty page has 10 kB
    sweep("report", "s", code=64)
    assert "already exists" in sweep.notes
    assert sweep("report", "s", "--force", "--json")["sweep"] == "s"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or not AXE.exists(), reason="optional: `make axe`, Chromium")
def test_axe_has_no_serious_finding_on_a_sweep(searched, sweep):
    sweep("report", "s", "-o", "page.html")
    for shape in ({"width": 1200}, {"width": 1200, "scheme": "dark"}, {"width": 390}):
        found = findings(Path("page.html"), **shape)
        assert found["passed"] > 10
        assert (found["lines"], found["wider"]) == ([], 0)


def test_repeated_trials_are_set_beside_the_best(write, sweep):
    write(trials=2, parallel=2, repeat=2, repeat_as=json.dumps(SEED))
    sweep("start", "--sweep", "s")
    sweep("report")
    found = checked("report-s.html").text
    assert "compared with the best" in found
    assert "may be as good" in found
    assert "Parameter importance requires" not in found  # one parameter has no importance


def test_a_sweep_of_which_little_is_known(write, sweep, toy):
    write(sampler="grid", parameters="{do: {choice: ['raise ValueError']}}")
    sweep("start", "--sweep", "s", code=1)
    sweep("report", "-o", "one.html")
    found = checked("one.html")
    assert "No trial has succeeded." in found.text
    assert "user_code_error" in found.text
    assert found.all("svg") == []


def test_texts_of_a_script_are_no_markup(write, sweep, toy, capsys):
    parameters = json.dumps({"n": {"choice": [EVIL.replace("\x1b", ""), "b"]}})
    write(sampler="grid", parameters=parameters, objective="{metric: '<b>loss'}")
    sweep("start", "--sweep", "s", code=1)
    sweep("report", "-o", "one.html")
    assert "<script>alert(1)" in checked("one.html").text


def test_a_line_passes_below_an_axis_on_which_it_has_no_value():
    axes = [Axis("a", [(0, "x")]), Axis("<b>", []), Axis("c", [])]
    line = charts.Polyline("t<", [0.0, None, 1.0], "best")
    drawn = charts.draw_coordinates(axes, [line], "it")
    assert "&lt;b&gt;" in drawn
    assert drawn.count('class="line best-trial"') == 1
    assert drawn.count("M") == 1 + 3  # a line in one piece, three axes
    assert drawn.count(">none</text>") == 1
    assert (
        charts.draw_coordinates(axes[:1], [line], "it")
        == charts.draw_coordinates(axes, [], "it")
        == ""
    )
    assert not render.macros("report/charts.html.j2").bars([]).strip()


@pytest.mark.slow
def test_watch_shows_what_runs_and_what_has_ended(write, sweep, toy):
    write(sampler="grid", parameters=SLEEP, parallel=2)
    with deploykit("start", "--sweep", "s") as controller:
        wait_for((paths.run_folder("s-0") / "starts").exists)
        wait_for(lambda: sweep("status", "--json")["counts"] == {"running": 1, "succeeded": 1})
        found = sweep("watch", "s", "--json")
        (going,) = found["going"]
        assert (going["trial"], going["run"], going["state"]) == (0, "s-0", "running")
        assert (going["progress"]["step"], going["progress"]["total"]) == (3, 3)
        shown = sweep("watch", "--once")
        done = f"{'━' * 20}{'─' * 20} 50%"
        assert f"s: running\n  done    {done}\n  trials  2 of 2: 1 running, 1 succe" in shown
        assert "\n0      running  ━━━━━━ 3/3" in shown
        assert "\nended  state      loss" in shown
        words = ("sweep", "watch", "s", "--interval", "1s")
        live = OnTerminal(*words, PYTHONPATH=os.environ["PYTHONPATH"])
        live.until("q quit; the sweep continues")
        live.until(" 3/3")
        live.type("l")
        live.until("s-0: log of rank 0")
        live.type("q")
        (paths.state() / "runs/go").touch()
        live.until("s: finished")
        assert live.end() == 0
        assert controller.wait() == 0
    assert cli.main(["sweep", "watch", "nope"]) == 66
