"""Find every problem in a job file, without network, credentials or a cluster.

Without --backend, covers the file's `backend` and every backend with a section in it, else the
default backend.

deploykit check -b slurm -b sagemaker
deploykit check exp.yaml --set resources.nodes=2 --strict
"""

from __future__ import annotations

import argparse

from deploykit.cli import output
from deploykit.run import lifecycle

SHARED = ("job", "backends", "strict")


def run(args: argparse.Namespace) -> int:
    file = lifecycle.load(args.job, args.set, args.backend or (), args.arguments)
    names = list(file.sections)
    warnings = lifecycle.check_all(file)
    if args.strict:
        lifecycle.refuse(args.job, warnings)
    if args.json:
        output.emit({"backends": names, "warnings": [problem._asdict() for problem in warnings]})
        return 0
    output.warnings(warnings)
    output.say(f"{args.job}: no errors for {', '.join(names)}")
    return 0
