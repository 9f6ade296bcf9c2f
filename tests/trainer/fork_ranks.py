"""Run a program once for each rank, as forks of one process: torch is imported once for all.

    python -m tests.trainer.fork_ranks OUTPUT... -- PROGRAM ARGS...

Each OUTPUT is the number of an open file: for what a rank prints, and a last line with its exit
code. PROGRAM is a script, or `-c` and its text. `ranks.start_ranks` sets the other variables.
"""

import os
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401 - once for all


def main():
    end = sys.argv.index("--")
    outputs = [int(number) for number in sys.argv[1:end]]
    ranks = []
    for rank, output in enumerate(outputs):
        if not (process := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(output, 1)
            os.dup2(output, 2)
            become(sys.argv[end + 1 :])
            return  # Python ends as it does after any program
        ranks.append(process)
    for process, output in zip(ranks, outputs, strict=True):
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.write(output, f"\n{code}".encode())


def become(command):
    """Run a program as `python PROGRAM ARGS...` would."""
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
