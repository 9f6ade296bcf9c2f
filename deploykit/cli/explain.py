"""Explain a cause, a `check` rule, a `doctor` finding or an exit code. Works offline.

Without ID, list them all. In a fix, words in capitals stand for values of a run: `diagnose RUN`
fills them in.

deploykit explain cuda_oom
deploykit explain no-launcher
deploykit explain peers_inbound
deploykit explain 137
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.cli import exit_codes, output
from deploykit.diagnose import cause_rules, placeholders
from deploykit.diagnose.guides import BY_CAUSE
from deploykit.doctor.codes import CODES
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import UsageError

_RETRY = {
    cause_rules.TRANSIENT: "the same job may succeed if it is submitted again",
    "deterministic": "the same job would fail again",
}


_TRAIT = re.compile(r"^@([a-z,_-]+) ", re.MULTILINE)
"""Before a line of a fix that is for some runs only: a backend, or several ranks."""


class Page(NamedTuple):
    """One thing to explain: in a sentence, and in labelled lines."""

    id: str
    kind: str
    """``cause``, ``rule``, ``finding`` or ``exit code``."""
    meaning: str
    details: tuple[tuple[str, str], ...] = ()
    """Labels with texts of one or more lines; a label may be repeated."""

    def data(self) -> dict[str, Any]:
        details = [{"label": label, "text": text} for label, text in self.details]
        return {"id": self.id, "kind": self.kind, "meaning": self.meaning, "details": details}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="cause, rule, finding or exit code to explain"
    )


def run(args: argparse.Namespace) -> int:
    if args.id is None:
        _list(as_json=args.json)
        return 0
    page = _find(args.id)
    if args.json:
        output.emit(page.data())
        return 0
    output.say(f"{page.kind} {page.id}: {page.meaning}")
    for label, text in page.details:
        first, *others = text.split("\n")
        output.say(f"  {label:<9} {first}", *(f"  {'':<9} {line}" for line in others))
    return 0


def _list(*, as_json: bool) -> None:
    pages = [*_causes(), *_rules(), *_findings(), *_codes()]
    if as_json:
        output.emit([page.data() for page in pages])
        return
    output.table(["kind", "id", "meaning"], [[page.kind, page.id, page.meaning] for page in pages])


def _find(name: str) -> Page:
    """The page of an id. Raises UsageError for an unknown one, with the nearest."""
    if re.fullmatch(r"-?[0-9]{1,9}", name):
        return _code(int(name))
    pages = {page.id: page for page in (*_causes(), *_rules(), *_findings())}
    wanted = name if name in pages else name.lower().replace("-", "_")
    if wanted not in pages:
        wanted = wanted.replace("_", "-")
    if wanted not in pages:
        hint = did_you_mean(wanted, pages) or did_you_mean(wanted.replace("-", "_"), pages)
        raise UsageError(
            f"no cause, rule, finding or exit code is named {name!r}",
            hint=hint or "`deploykit explain` lists them all",
        )
    return pages[wanted]


# Causes


def _causes() -> Iterator[Page]:
    """A page for each label; a label with several rules has all of their fixes."""
    by_label: dict[str, list[cause_rules.CauseRule]] = {}
    for rule in cause_rules.load().causes:
        by_label.setdefault(rule.label, []).append(rule)
    for label, rules in sorted(by_label.items()):
        yield _cause(label, rules)


def _cause(label: str, rules: list[cause_rules.CauseRule]) -> Page:
    details: list[tuple[str, str]] = []
    for means, fix in dict.fromkeys((rule.means, rule.fix) for rule in rules):
        if len(rules) > 1:
            details.append(("means", means))
        details.append(("fix", placeholders.render(_TRAIT.sub(_for, fix.strip()), {})))
    ruled_out = dict.fromkeys(rule.probably_not for rule in rules if rule.probably_not)
    details += [("ruled out", text) for text in ruled_out]
    kinds = {rule.retry for rule in rules}
    if len(kinds) == 1 and (retry := _RETRY.get(kinds.pop())):
        details.append(("retry", retry))
    if label in BY_CAUSE:
        details.append(("guide", f"deploykit guide {BY_CAUSE[label]}"))
    meanings = "; or ".join(dict.fromkeys(rule.means for rule in rules))
    return Page(label, "cause", meanings, tuple(details))


def _for(trait: re.Match[str]) -> str:
    """``[slurm] ``, ``[several ranks] ``."""
    names = trait[1].replace(placeholders.SEVERAL, "several ranks").split(",")
    return f"[{', '.join(names)}] "


# Rules


def _rules() -> Iterator[Page]:
    """A page for each rule of each backend that has some."""
    for name in backend.names():
        try:
            engine = backend.find(name)
        except UsageError:  # one that cannot be imported hides no other
            continue
        if backend.offers(engine, "setting_rules"):
            yield from (_rule(name, rule) for rule in engine.setting_rules())


def _rule(name: str, rule: backend.SettingRule) -> Page:
    texts = (
        ("backend", name),
        ("key", _named(rule.path)),
        ("verdict", rule.verdict),
        ("instead", _named(rule.suggestion or "")),
        ("source", rule.source),
    )
    return Page(rule.id, "rule", _named(rule.reason), tuple(pair for pair in texts if pair[1]))


def _named(text: str) -> str:
    """A text of a rule, with the names of the values that a job fills in, in capitals."""
    return re.sub(r"\{(\w+)[^{}]*\}", lambda value: value[1].upper(), text)


# Findings


def _findings() -> Iterator[Page]:
    for name, code in CODES.items():
        details = (("backend", code.backend), ("effect", code.why), ("fix", code.fix))
        yield Page(name, "finding", code.meaning, details)


# Exit codes


def _codes() -> Iterator[Page]:
    yield from map(_code, sorted({*exit_codes.of_deploykit(), *exit_codes.OF_RUN}))


def _code(code: int) -> Page:
    """The page of an exit code. Raises UsageError for any other number."""
    by_origin = exit_codes.meanings(code)
    if not by_origin:
        raise UsageError(f"{code} is not an exit code", hint="exit codes range from 0 to 255")
    details = list(by_origin.items())
    classes = ", ".join(exit_codes.classes(code))
    if classes:
        details.append(("Python", f"deploykit.errors: {classes}"))
    return Page(str(code), "exit code", next(iter(by_origin.values())), tuple(details))
