"""deploykit: one PyTorch trainer on a laptop, a Slurm cluster or SageMaker, unchanged.

    import deploykit

    run = deploykit.submit("job.yaml", backend="slurm", args=["--lr", 0.1])
    run.wait(check=True)

The import is cheap: each name is imported when it is first used.
"""

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` takes a while
if TYPE_CHECKING:
    from deploykit.api.run import Plan, Run, Runs
    from deploykit.api.submit import attach, check, get, launch, plan, runs, submit
    from deploykit.job.job import Job
    from deploykit.job.model import LogLine, Problem, State, Status
    from deploykit.lib import errors
    from deploykit.lib.version import __version__ as __version__
    from deploykit.observe.metrics.progress import Progress
    from deploykit.run.diagnosis import RunDiagnosis

__all__ = [
    "Job",
    "LogLine",
    "Plan",
    "Problem",
    "Progress",
    "Run",
    "RunDiagnosis",
    "Runs",
    "State",
    "Status",
    "attach",
    "check",
    "errors",
    "get",
    "launch",
    "plan",
    "runs",
    "submit",
]
_HOMES = {
    **dict.fromkeys(("LogLine", "Problem", "State", "Status"), "job.model"),
    **dict.fromkeys(("Plan", "Run", "Runs"), "api.run"),
    "Job": "job.job",
    "Progress": "observe.metrics.progress",
    "RunDiagnosis": "run.diagnosis",
    "__version__": "lib.version",
}
"""The modules of those names that are not in `api.submit`."""


if not TYPE_CHECKING:  # to them each other name is an error

    def __getattr__(name: str) -> object:
        """Import what is used (PEP 562)."""
        if name not in __all__ and name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        if name == "errors":
            return importlib.import_module("deploykit.errors")
        value = getattr(
            importlib.import_module(f"deploykit.{_HOMES.get(name, 'api.submit')}"), name
        )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
