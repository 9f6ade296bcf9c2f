"""What could not be checked: a permission, an answer or a saved response is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploykit.doctor import fixes
from deploykit.doctor.aws import collect
from deploykit.doctor.aws.inventory import Inventory, error_code
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib import shell
from deploykit.lib.finding import Finding, Fix

_ACCOUNT = ("get-caller-identity", "get-role", "role-policies", "list-service-quotas")
_NETWORK = (*collect.OF_VPC, "describe-prefix-lists")
_SAVE = ("deploykit", "doctor", "--backend", "sagemaker", "--save", "FOLDER", "--set")


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """One finding for each denied or failed request, and one for all that the folder lacks."""
    failed: dict[str, list[str]] = {}
    for name, answer in inventory.answers.items():
        error = answer.get("Error", {})
        if error.get("Code") in collect.DENIED:
            yield _denied(requirements, inventory, name, error.get("Action", name))
        elif error.get("Code") == collect.NOT_ANSWERED:
            text = f"not checked, since {error.get('Action', name)} failed: {error.get('Message')}"
            failed.setdefault(text, []).append(name)
    for text, names in failed.items():
        again = Fix("run doctor again; where it fails each time, check the network and the proxy")
        yield Finding("not_answered", "unchecked", text, tuple(names), again)
    missing = [name for name in _expected(requirements) if name not in inventory.answers]
    if error_code(inventory.answers, "get-role") and "role-policies" in missing:
        missing.remove("role-policies")
    if missing:
        yield _not_saved(requirements, missing)


def _expected(requirements: Requirements) -> list[str]:
    buckets = [f"get-bucket-location-{bucket}" for bucket in requirements.buckets]
    network = _NETWORK if requirements.subnets else ()
    return [*_ACCOUNT, *buckets, "describe-instance-types", *network]


def _denied(requirements: Requirements, inventory: Inventory, name: str, action: str) -> Finding:
    evidence = [f"{name}: access denied to {inventory.caller or 'you'}"]
    if name.startswith("get-bucket-location-"):
        evidence.append(
            f"or account {requirements.owner} does not own the bucket (sagemaker.bucket_owner)"
        )
    return Finding(
        "not_permitted",
        "unchecked",
        f"permission denied: the check requires {action}",
        tuple(evidence),
        _permit(inventory.caller, action),
    )


def _permit(caller: str | None, action: str) -> Fix:
    match = re.fullmatch(r"arn:[^:]+:(iam|sts)::\d+:(user|assumed-role)/(.+)", caller or "")
    summary = f"allow {action} for the identity that runs doctor"
    if match is None:
        return Fix(summary)
    parts = match[3].split("/")
    kind = "user" if match[2] == "user" else "role"
    name = parts[-1] if kind == "user" else parts[-2]
    return fixes.make(
        "iam-policy",
        summary,
        kind=kind,
        principal=name,
        name=f"deploykit-doctor-{action.partition(':')[2]}",
        policy={
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}],
        },
    )


def _not_saved(requirements: Requirements, missing: list[str]) -> Finding:
    network = [name for name in missing if name in _NETWORK]
    return Finding(
        "not_saved",
        "unchecked" if network else "note",
        f"not checked: the folder has no response to {', '.join(missing)}",
        tuple(f"{name}.json is missing" for name in missing[:3]),
        Fix(
            "save the facts on a machine with credentials",
            cli=f"{shell.command(*_SAVE, f'sagemaker.region={requirements.region}')}\n",
        ),
    )
