"""What could not be looked at, and what would let us."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploykit import quoting
from deploykit.doctor import fixes
from deploykit.doctor.aws import ask
from deploykit.doctor.aws.facts import Facts, failed
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding, Fix

_ACCOUNT = ("get-caller-identity", "get-role", "role-policies", "list-service-quotas")
_SAVE = ("deploykit", "doctor", "--backend", "sagemaker", "--save", "FOLDER", "--set")
_NETWORK = (*ask.OF_VPC, "describe-prefix-lists")


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    for name, answer in facts.answers.items():
        told = answer.get("Error", {})
        if told.get("Code") in ask.DENIED:
            yield _denied(needs, facts, name, told.get("Action", name))
    absent = [name for name in _asked(needs) if name not in facts.answers]
    if failed(facts.answers, "get-role") and "role-policies" in absent:
        absent.remove("role-policies")
    if absent:
        yield _not_saved(needs, absent)


def _asked(needs: Needs) -> list[str]:
    buckets = [f"get-bucket-location-{bucket}" for bucket in needs.buckets]
    network = _NETWORK if needs.subnets else ()
    return [*_ACCOUNT, *buckets, "describe-instance-types", *network]


def _denied(needs: Needs, facts: Facts, name: str, action: str) -> Finding:
    evidence = [f"{name}: denied to {facts.caller or 'you'}"]
    if name.startswith("get-bucket-location-"):
        evidence.append(f"or the bucket is not account {needs.owner}'s (sagemaker.bucket_owner)")
    return Finding(
        "not_permitted",
        "unseen",
        f"could not look: needs {action}",
        tuple(evidence),
        _permit(facts.caller, action),
    )


def _permit(caller: str | None, action: str) -> Fix:
    match = re.fullmatch(r"arn:[^:]+:(iam|sts)::\d+:(user|assumed-role)/(.+)", caller or "")
    say = f"have {action} allowed to whoever runs doctor"
    if match is None:
        return Fix(say)
    parts = match[3].split("/")
    kind = "user" if match[2] == "user" else "role"
    name = parts[-1] if kind == "user" else parts[-2]
    return fixes.make(
        "permit",
        say,
        kind=kind,
        caller=name,
        name=f"deploykit-doctor-{action.partition(':')[2]}",
        policy={
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}],
        },
    )


def _not_saved(needs: Needs, absent: list[str]) -> Finding:
    network = [name for name in absent if name in _NETWORK]
    return Finding(
        "not_saved",
        "unseen" if network else "note",
        "not looked at: the folder holds no answer to " + ", ".join(absent),
        tuple(f"{name}.json is missing" for name in absent[:3]),
        Fix(
            "save them where the credentials are",
            cli=f"{quoting.command(*_SAVE, f'sagemaker.region={needs.region}')}\n",
        ),
    )
