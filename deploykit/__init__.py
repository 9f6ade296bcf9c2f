"""deploykit: one PyTorch trainer on a laptop, a Slurm cluster or SageMaker, unchanged.

    import deploykit

    run = deploykit.submit("job.yaml", backend="slurm", args=["--lr", 0.1])
    run.wait(check=True)

Importing this imports nothing else: each name is looked up when it is first used.
"""

__version__ = "0.2.0"

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` takes a while
if TYPE_CHECKING:
    from deploykit import errors
    from deploykit.api import attach, check, get, launch, plan, runs, submit
    from deploykit.job import Job
    from deploykit.metrics.progress import Progress
    from deploykit.model import LogLine, Problem, State, Status
    from deploykit.run import Plan, Run, Runs
    from deploykit.run_diagnosis import RunDiagnosis

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
    **dict.fromkeys(("LogLine", "Problem", "State", "Status"), "model"),
    **dict.fromkeys(("Plan", "Run", "Runs"), "run"),
    "Job": "job",
    "Progress": "metrics.progress",
    "RunDiagnosis": "run_diagnosis",
}
"""The modules of those names that are not in `api`."""


if not TYPE_CHECKING:  # to them each other name is an error

    def __getattr__(name: str) -> object:
        """Import what is used (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        if name == "errors":
            return importlib.import_module("deploykit.errors")
        value = getattr(importlib.import_module(f"deploykit.{_HOMES.get(name, 'api')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
