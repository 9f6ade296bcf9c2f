"""Write the reference in docs/reference/ from the code: `make docs`.

`tests/docs/test_docs.py` holds the files on disk to what this makes.
"""

# ruff: noqa: INP001

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import man
import python_api
import sagemaker_oracle
import words

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker import rules as oracle
from deploykit.bundle import node_plane, source_tree
from deploykit.cli import diagnose, doctor
from deploykit.cli import main as cli
from deploykit.doctor.infra import Answers
from deploykit.job import schema
from deploykit.job.decode import (
    DURATION,
    NOT_EMPTY,
    SIZE,
    Bounds,
    Help,
    Pattern,
    Quantity,
    hints,
    is_required,
    split,
)
from deploykit.job.model import JobSpec, State
from deploykit.lib import errors
from deploykit.sweep.model import Sweep

HERE = Path(__file__).resolve().parent
BUILT_IN = ("local", "slurm", "sagemaker")
sys.path.insert(0, str(HERE.parent / "entrypoints"))
from deploykit_node import cluster, nccl, records, supervisor  # noqa: E402

JSON_TYPES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    dict[str, int]: "object",
    dict[str, str]: "object",
    dict[str, records.RankUsage]: "object",
    list[str]: "list",
    records.FilesRecord: "object",
}


def pages() -> dict[str, str]:
    """Each file of docs/reference by its name."""
    return {
        "job-file.md": job_file(),
        "job.schema.json": job_schema(),
        "sweep-file.md": sweep_file(),
        "commands.md": commands(),
        "deploykit.1": man.page(verb_parsers(), error_codes(), spelled),
        "exit-codes.md": exit_codes(),
        "node.md": node(),
        "sagemaker-oracle.md": oracle_page(),
        "infra.md": infra(),
        "python-api.md": python_api.text(page, table),
    }


def main() -> None:
    for name, text in pages().items():
        (HERE / "reference" / name).write_text(text, encoding="utf-8")


def page(title: str, *parts: str) -> str:
    return "\n\n".join([words.MADE, f"# {title}", *(part.strip("\n") for part in parts)]) + "\n"


def table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    cells = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def names(of: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in of)


# The job file


def options() -> dict[str, type[Any]]:
    return {name: backend.find(name).Options for name in BUILT_IN}


def job_schema() -> str:
    return json.dumps(schema.json_schema(options()), indent=2) + "\n"


def job_file() -> str:
    tables = ["## The job", *sections(JobSpec, "")]
    for name, cls in options().items():
        tables += [f"## Section `{name}`", doc(cls), *sections(cls, f"{name}.")]
    hidden = [pattern for pattern in source_tree.SECRETS if not pattern.startswith("!")]
    let_through = [pattern[1:] for pattern in source_tree.SECRETS if pattern.startswith("!")]
    travels = words.part("travels").format(
        secrets=names(hidden),
        let_through=names(let_through),
        clutter=names(source_tree._CLUTTER),  # noqa: SLF001
    )
    return page("The job file", words.part("job-file"), *tables, words.part("secrets"), travels)


def sweep_file() -> str:
    return page("The sweep file", words.part("sweep-file"), "## Keys", *sections(Sweep, ""))


def sections(cls: Any, path: str) -> Iterator[str]:
    """The table of a dataclass, then those of the sections in it."""
    yield table(
        ["key", "takes", "default", "meaning"], (row(cls, field, path) for field in fields(cls))
    )
    for field in fields(cls):
        kind, section = inner(split(hints(cls)[field.name])[0], f"{path}{field.name}")
        if dataclasses.is_dataclass(kind):
            yield f"### Section `{section}`"
            yield doc(kind)
            yield from sections(kind, f"{section}.")


def inner(kind: Any, section: str) -> tuple[Any, str]:
    """The class of a section, and its path; of one in a list or under names, that of each."""
    if get_origin(kind) is tuple:
        return split(get_args(kind)[0])[0], f"{section}[]"
    if get_args(kind) and get_origin(kind) is not Literal:
        return split(get_args(kind)[1])[0], f"{section}.NAME"
    return kind, section


def fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def doc(cls: Any) -> str:
    return " ".join((cls.__doc__ or "").split())


def row(cls: Any, field: dataclasses.Field[Any], path: str) -> list[str]:
    kind, metadata, _ = split(hints(cls)[field.name])
    text = next(note for note in metadata if isinstance(note, Help))
    usual, example = default(field, metadata), f"`{text.example}`"
    said = "" if text.example is None or example == usual else f" Example: {example}."
    return [f"`{path}{field.name.rstrip('_')}`", takes(kind, metadata), usual, f"{text.text}{said}"]


def takes(kind: Any, metadata: Sequence[Any]) -> str:
    """What a key takes, in words."""
    quantity = next((note.meaning for note in metadata if isinstance(note, Quantity)), None)
    if quantity:
        return quantity + limits(metadata, shown=False)
    if dataclasses.is_dataclass(kind):
        return "text or section" if hasattr(kind, "SHORT") else "section"
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of: {of(get_args(kind)[0])}"
    if get_args(kind):
        return f"names ({of(get_args(kind)[0])}) with values ({of(get_args(kind)[1])})"
    plain = {str: "text", int: "whole number", bool: "`true` or `false`", Any: "any value"}[kind]
    patterns = (note for note in metadata if isinstance(note, Pattern) and note is not NOT_EMPTY)
    return next((note.meaning for note in patterns), plain) + limits(metadata)


def of(hint: Any) -> str:
    kind, metadata, _ = split(hint)
    return takes(kind, metadata)


def limits(metadata: Sequence[Any], *, shown: bool = True) -> str:
    """The bounds in words; a quantity's least value is in its own unit and not shown."""
    bounds = next((note for note in metadata if isinstance(note, Bounds)), None)
    if bounds is None or not shown:
        return ""
    return f", at least {bounds.low}" if bounds.high is None else f", {bounds.low} to {bounds.high}"


def default(field: dataclasses.Field[Any], metadata: Sequence[Any]) -> str:
    if is_required(field):
        return "**required**"
    value = field.default
    if value in (None, (), dataclasses.MISSING):
        return ""
    if value == 0 and DURATION in metadata:
        return ""
    if SIZE in metadata:
        return f"`{value // 1024**2}MiB`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# The answers for `infra`


def infra() -> str:
    return page(
        "Answers for deploykit infra", words.part("infra"), "## Keys", *sections(Answers, "")
    )


# What SageMaker does with a job


def oracle_page() -> str:
    headings = ["a job with", f"SDK {words.SDK_VERSION}", "verdict", "why", "nearest that works"]
    parts = [words.part("oracle")]
    for heading, rules in oracle.rules().items():
        parts += [f"## {heading}", table(headings, sagemaker_oracle.rows(rules, words.TODAY))]
    patches = table(["PyTorch", "patches until", "chosen by"], sagemaker_oracle.patches())
    parts += [
        "## Images and their patches",
        words.part("patches"),
        patches,
        words.part("oracle-end"),
    ]
    return page("What SageMaker does with a job", *parts)


# The commands


def commands() -> str:
    verbs = verb_parsers()
    listing = table(
        ["command", "purpose"],
        ([f"[`{name}`](#deploykit-{name})", text] for name, text in cli.VERBS.items()),
    )
    described = [part for name, sub in verbs.items() for part in command(name, sub)]
    states = table(
        ["state", "meaning"], ([f"`{state.value}`", words.STATES[state.value]] for state in State)
    )
    return page(
        "Commands",
        words.part("commands").format(),
        listing,
        *described,
        "## States of a run",
        states,
    )


def verb_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each verb, complete."""
    top = cli.parser(list(cli.VERBS))
    kinds = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    return next(kinds).choices


def command(name: str, sub: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in sub._actions if action.dest != "help"]  # noqa: SLF001
    actions.sort(key=lambda action: bool(action.option_strings))  # as --help: options last
    yield f"## deploykit {name}"
    yield f"    deploykit {name} {' '.join(usage(action) for action in actions)}".rstrip()
    text = re.sub(r"(?m)^(\w+): +(deploykit .*)$", r"* \1: `\2`", sub.description or "")
    yield re.sub(r"(?m)^deploykit ", "    deploykit ", text)
    if actions:
        yield table(
            ["argument", "meaning"], ([spelled(action), action.help or ""] for action in actions)
        )


def usage(action: argparse.Action) -> str:
    text = " ".join(filter(None, [*action.option_strings[:1], placeholder(action)]))
    return text if action.required and action.nargs not in {"?", "*"} else f"[{text}]"


def spelled(action: argparse.Action) -> str:
    value = placeholder(action)
    forms = [f"{form} {value}".strip() for form in action.option_strings] or [value]
    return ", ".join(f"`{form}`" for form in forms)


def placeholder(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return f"{action.metavar or action.dest}{' ...' if action.nargs in {'*', '+'} else ''}"


# Exit codes and the node


def error_codes() -> list[tuple[str, str]]:
    kinds = [errors.DeploykitError, *errors.DeploykitError.__subclasses__()]
    found = {kind.exit_code: kind.meaning for kind in kinds} | {
        0: "success; for `wait` and `submit --wait`: the run succeeded",
        cli._INTERRUPTED: "interrupted with ^C; a submitted run continues",  # noqa: SLF001
        cli._PIPE_CLOSED: "the reader of the output closed the pipe",  # noqa: SLF001
        diagnose.CAUSE_FOUND: "`diagnose` found a cause",
        diagnose.CAUSE_UNKNOWN: "`diagnose` found a failure but no cause",
        diagnose.UNFINISHED: "`diagnose`: the run has not ended, and shows no failure so far",
        doctor.FAULT_FOUND: "`doctor` found something that will block the job, or lacked the "
        "permission to check",
        143: "`wait`, `submit --wait`: the run was cancelled",
    }
    rows = [(str(code), found[code]) for code in sorted(found)]
    return [*rows, ("any other", "`wait`, `submit --wait`: the run failed with this code")]


def exit_codes() -> str:
    launcher = {getattr(cluster, name).exit_code: text for name, text in words.LAUNCHER.items()}
    more = "\n".join(f"| {code} | {launcher[code]} |" for code in sorted(launcher))
    passed_on = words.part("passed-on").format(launcher=more)
    return page(
        "Exit codes",
        words.part("exit-codes"),
        table(["code", "meaning"], iter(error_codes())),
        passed_on,
    )


def node() -> str:
    intro = words.part("node").format(
        files=names(node_plane.NODE_PLANE),
        launchers=", ".join(
            f"`{next(iter(variables.values()))}`"
            for variables in cluster.NODES.values()
            if variables
        ),
        grace=f"{supervisor.GRACE:g}",
        stopped=records.STOPPED,
        argument=request.ARGUMENT,
    )
    return page(
        "On the node",
        intro,
        variables(words.VARIABLES),
        words.part("node-rest"),
        variables(words.INTERNAL),
        words.part("settings"),
        table(["variable", "value", "reason", "where"], set_for_nccl()),
        words.part("run-folder"),
        words.part("exit-records"),
        table(["file", "", "fields"], exit_record_files()),
        table(["field", "type", ""], exit_record_fields()),
    )


def exit_record_files() -> Iterator[list[str]]:
    """The files of `exit_records/`, each with its fields."""
    for name, kind in records.SCHEMA.items():
        yield [f"`{name}`", words.EXIT_RECORD_FILES[name], names(kind.__annotations__)]


def exit_record_fields() -> Iterator[list[str]]:
    """The fields of all records by name, each with its types in JSON."""
    types: dict[str, set[str]] = {}
    for kind in records.SCHEMA.values():
        for name, annotation in get_type_hints(kind).items():
            members = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
            types.setdefault(name, set()).update(JSON_TYPES[member] for member in members)
    for name, kinds in sorted(types.items()):
        either = " or ".join(sorted(kinds, reverse=True))
        yield [f"`{name}`", either, words.EXIT_RECORD_FIELDS[name]]


def set_for_nccl() -> Iterator[list[str]]:
    """The settings of a node, by what makes them due."""
    gpus, debug = {"DEPLOYKIT_RUN_DIR": "RUN"}, {"DEPLOYKIT_RUN_DIR": "RUN", nccl.VARIABLE: "1"}
    here = nccl.Machine(gpus=True, efa=False, torch=(2, 9))
    machines = {
        "there are GPUs": (here, gpus),
        "there is EFA": (nccl.Machine(gpus=False, efa=True, torch=(2, 9)), gpus),
        "`debug`": (here, debug),
    }
    seen = set()
    for where, (machine, env) in machines.items():
        for setting in nccl.choose(machine, env, {}):
            if setting not in seen:
                yield [f"`{setting.name}`", f"`{setting.value}`", setting.why, where]
            seen.add(setting)


def variables(described: Mapping[str, str]) -> str:
    return table(["variable", "meaning"], ([f"`{name}`", text] for name, text in described.items()))


if __name__ == "__main__":
    main()
