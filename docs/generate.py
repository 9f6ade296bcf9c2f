"""Write the reference in docs/reference/ and docs/extra/ from the code: `make docs`.

`tests/docs/test_docs.py` holds the files on disk to what this makes.
"""

# ruff: noqa: INP001

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import agents
import man
import python_api
import sagemaker_oracle
import words

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker import rules as oracle
from deploykit.bundle import node_plane, source_tree
from deploykit.cli import exit_codes as codes
from deploykit.cli import main as cli
from deploykit.doctor.infra import Answers
from deploykit.job import checks, schema
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
    key_of,
    split,
)
from deploykit.job.model import JobSpec, State
from deploykit.sweep.model import Sweep

HERE = Path(__file__).resolve().parent
BUILT_IN = ("local", "slurm", "sagemaker")
COMMON = 3
"""Commands that have an argument, from which on it is described once."""
sys.path.insert(0, str(HERE.parent / "entrypoints"))
from deploykit_node import cluster, nccl, records, supervisor  # noqa: E402


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


def for_agents() -> dict[str, str]:
    """Each file of docs/extra, which the site has at its top, by its name."""
    return {"SKILL.md": agents.skill(error_codes()), "llms.txt": agents.llms()}


def main() -> None:
    _write("reference", pages())
    _write("extra", for_agents())  # which quotes the pages of the reference


def _write(folder: str, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (HERE / folder / name).write_text(text, encoding="utf-8")


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
    tables = ["## The job", keys(JobSpec)]
    for name, cls in options().items():
        sources = [doc(cls)] if "https://" in doc(cls) else []
        tables += [f"## Section `{name}`", *sources, keys(cls, f"{name}.")]
    hidden = [pattern for pattern in source_tree.SECRETS if not pattern.startswith("!")]
    let_through = [pattern[1:] for pattern in source_tree.SECRETS if pattern.startswith("!")]
    travels = words.part("travels").format(
        secrets=names(hidden),
        let_through=names(let_through),
        clutter=names(source_tree._CLUTTER),  # noqa: SLF001
    )
    return page("The job file", words.part("job-file"), *tables, words.part("secrets"), travels)


def sweep_file() -> str:
    return page("The sweep file", words.part("sweep-file"), keys(Sweep))


def keys(cls: Any, path: str = "") -> str:
    """The table of a dataclass, with the keys of each section in it below the section."""
    return table(["key", "takes", "default", "meaning"], rows(cls, path))


def rows(cls: Any, path: str) -> Iterator[list[str]]:
    for field in fields(cls):
        cells = row(cls, field, path)
        kind, section = inner(split(hints(cls)[field.name])[0], f"{path}{key_of(field.name)}")
        if not dataclasses.is_dataclass(kind):
            yield cells
            continue
        source = re.search(r"https://\S+\w", doc(kind))
        yield [*cells[:-1], f"{cells[-1]} See <{source[0]}>." if source else cells[-1]]
        yield from rows(kind, f"{section}.")


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
    return [f"`{path}{key_of(field.name)}`", takes(kind, metadata), usual, f"{text.text}{said}"]


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
    return page("Answers for deploykit infra", words.part("infra"), keys(Answers))


# What SageMaker does with a job


def oracle_page() -> str:
    headings = ["a job with", "what happens", "why", "nearest that works"]
    rules = [rule for group in oracle.rules().values() for rule in group]
    return page(
        "What SageMaker does with a job",
        words.part("oracle").format(version=words.SDK_VERSION),
        table(headings, sagemaker_oracle.differences(rules, words.TODAY)),
        "## Images and their patches",
        words.part("patches"),
        table(["PyTorch", "patches until", "chosen by"], sagemaker_oracle.patches()),
    )


# The commands


def commands() -> str:
    verbs = verb_parsers()
    groups = (
        f"* {title}: {', '.join(f'[{name}](#deploykit-{name})' for name in group)}"
        for title, group in cli.GROUPS.items()
    )
    listing = "\n".join(textwrap.fill(one, words.WIDTH, subsequent_indent="  ") for one in groups)
    common = common_arguments(verbs.values())
    described = [part for name, sub in verbs.items() for part in command(name, sub, common)]
    states = table(
        ["state", "meaning"], ([f"`{state.value}`", words.STATES[state.value]] for state in State)
    )
    return page(
        "Commands",
        words.part("commands").format(),
        listing,
        "## Common arguments",
        words.part("common-arguments"),
        table(["argument", "meaning"], iter(common)),
        *described,
        "## States of a run",
        states,
    )


def verb_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each verb, complete."""
    top = cli.parser(list(cli.VERBS))
    kinds = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    return next(kinds).choices


Described = tuple[str, str]
"""An argument as it is spelled, and its meaning."""


def arguments(sub: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = [action for action in sub._actions if action.dest != "help"]  # noqa: SLF001
    return sorted(actions, key=lambda action: bool(action.option_strings))  # as --help


def described(action: argparse.Action) -> Described:
    return spelled(action), action.help or ""


def common_arguments(parsers: Iterable[argparse.ArgumentParser]) -> list[Described]:
    """The arguments that at least three commands have, with the same meaning."""
    counted = Counter(described(action) for sub in parsers for action in arguments(sub))
    return [one for one, count in counted.items() if count >= COMMON]


def command(name: str, sub: argparse.ArgumentParser, common: Sequence[Described]) -> Iterator[str]:
    actions = arguments(sub)
    yield f"## deploykit {name}"
    yield f"    deploykit {name} {' '.join(usage(action) for action in actions)}".rstrip()
    first, *_ = (sub.description or "").partition("\n\n")
    if name in words.GUIDES:
        guide = words.GUIDES[name]
        first += f" Guide: [{words.title(guide)}](../{guide})."
    yield textwrap.fill(first, words.WIDTH)
    own = [one for one in map(described, actions) if one not in common]
    if own:
        yield table(["argument", "meaning"], iter(own))


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
    rows = [(str(code), meaning) for code, meaning in codes.of_deploykit().items()]
    return [*rows, ("any other", codes.OTHER)]


def error_classes(code: str) -> str:
    """The classes of errors with this exit code."""
    return names(codes.classes(int(code))) if code.isdecimal() else ""


def exit_codes() -> str:
    of_run = "\n".join(f"| {code} | {codes.OF_RUN[code]} |" for code in codes.OF_RUN)
    passed_on = words.part("passed-on").format(codes=of_run)
    return page(
        "Exit codes",
        words.part("exit-codes"),
        table(
            ["code", "meaning", "class in Python"],
            ([code, meaning, error_classes(code)] for code, meaning in error_codes()),
        ),
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
        variables(
            {name: words.INTERNAL[name] for name in sorted(checks._SETTABLE)}  # noqa: SLF001
        ),
        words.part("settings"),
        table(["variable", "value", "reason", "where"], set_for_nccl()),
        words.part("run-folder"),
        words.part("exit-records"),
    )


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
