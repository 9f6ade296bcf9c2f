"""Fixtures for every test: a state folder of its own, so that none touches the user's."""

from __future__ import annotations

import os
import signal
import textwrap
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

from tests import documents, programs
from tests.aws_server import aws, enforced, moto  # noqa: F401 - fixtures for every test
from tests.live_run import live, start  # noqa: F401
from tests.package_index import team_index, team_wheels  # noqa: F401
from tests.receivers import hook  # noqa: F401
from tests.slurm_cluster import box, cluster, needs_slurm, running_cluster  # noqa: F401

# A shell ignores SIGINT in what it starts with `&`, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With more processes than processors, OpenMP's threads would spend half of the time spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_ANY = {
    "deadline": timedelta(seconds=30),  # a reader that hangs, not one that is slow
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "derandomize": bool(os.environ.get("CI")),
}
settings.register_profile("brief", max_examples=25, **_ANY)
settings.register_profile("full", max_examples=200, **_ANY)
settings.register_profile("nightly", max_examples=10_000, **_ANY | {"derandomize": False})
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """Runs are kept below the test's folder; the user's home must not be found."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "state folder"))
    monkeypatch.setenv("HOME", str(tmp_path / "no home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture(autouse=True)
def json_conforms(monkeypatch):
    """What verbs print with `--json` conforms to the schema that deploykit publishes for it."""
    problems = documents.check_all(monkeypatch)
    yield problems
    assert not problems, "\n".join(dict.fromkeys(problems))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a job file and a script that echoes, under a name with blanks and quotes."""
    folder = tmp_path / 'it\'s a "project"'
    folder.mkdir()
    (folder / "train.py").write_text("import sys; print('hello', sys.argv[1:])\n")
    (folder / "job.yaml").write_text(
        textwrap.dedent(
            """\
            name: hello
            entrypoint:
              script: train.py
              args: [--epochs, 5]
            resources:
              time_limit: 5m
            """
        )
    )
    monkeypatch.chdir(folder)
    return folder


def pytest_collection_modifyitems(items):
    """Longer timeouts for a real cluster and for torch, which are slow on a slow machine."""
    for item in items:
        slow = item.get_closest_marker("slurm") or item.get_closest_marker("torch")
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


class FailuresAtOnce:
    """Prints the end of each failure when it happens: a run that is killed has no summary."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext[-1500:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and os.environ.get("CI"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Below the last line of pytest, name what was skipped and the packages that bring it."""
    finished = yield
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        skipped = [str(report.longrepr[2]) for report in terminal.stats.get("skipped", [])]
        if line := programs.summary(skipped):
            terminal.write_line(line)
    return finished


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI nothing real is skipped silently: a skip is a failure, unless it says `optional`."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2])
        if "optional" not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped in CI: {reason}"
    return report
