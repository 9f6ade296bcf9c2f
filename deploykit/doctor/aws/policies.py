"""IAM policies, as far as a job needs them read.

Conditions are not evaluated: an Allow with one counts as perhaps, a Deny with one as nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Decision = Literal["allowed", "perhaps", "denied", "absent"]
Policy = Mapping[str, Any]

_READ = (("s3:ListBucket", ""), ("s3:GetObject", "/*"))
_WRITE = (("s3:PutObject", "/*"),)


def bucket_actions(bucket: str, *, write: bool = True) -> list[tuple[str, str]]:
    """What a job does with a bucket: action and resource."""
    arn = f"arn:aws:s3:::{bucket}"
    return [(action, arn + below) for action, below in (*_READ, *(_WRITE if write else ()))]


def allow_bucket(bucket: str, *, write: bool = True) -> dict[str, Any]:
    """The statement that allows it."""
    wanted = bucket_actions(bucket, write=write)
    arn = f"arn:aws:s3:::{bucket}"
    return {
        "Effect": "Allow",
        "Action": [action for action, _ in wanted],
        "Resource": [arn, f"{arn}/*"],
    }


def decide(policies: Iterable[Policy], action: str, resource: str | None) -> Decision:
    """What the policies together say. Without a `resource`, any that is allowed will do."""
    found: Decision = "absent"
    for statement in (one for policy in policies for one in statements(policy)):
        if denies(statement, action, resource):
            return "denied"
        if statement.get("Effect") == "Allow" and _fits(statement, action, resource):
            if not statement.get("Condition"):
                found = "allowed"
            elif found == "absent":
                found = "perhaps"
    return found


def denies(statement: Policy, action: str, resource: str | None) -> bool:
    """Whether a statement refuses without a condition; without a `resource`, all of them."""
    if statement.get("Effect") != "Deny" or statement.get("Condition"):
        return False
    if resource is None:
        return _fits(statement, action, None) and "*" in _listed(statement.get("Resource", ()))
    return _fits(statement, action, resource)


def statements(policy: Policy) -> Iterator[Policy]:
    found = policy.get("Statement", ())
    yield from [found] if isinstance(found, Mapping) else found


def trusts(policy: Policy, service: str) -> bool:
    """Whether a trust policy lets a service assume the role."""
    return any(
        one.get("Effect") == "Allow"
        and _fits(one, "sts:AssumeRole", None)
        and service in _listed(dict(one.get("Principal", {})).get("Service", ()))
        for one in statements(policy)
        if isinstance(one.get("Principal"), Mapping)
    )


def shown(statement: Policy) -> str:
    """A statement in one line."""
    return json.dumps(statement)


def _fits(statement: Policy, action: str, resource: str | None) -> bool:
    if "NotAction" in statement:
        acts = not _matches(statement["NotAction"], action.lower(), fold=True)
    else:
        acts = _matches(statement.get("Action", ()), action.lower(), fold=True)
    if not acts or resource is None:
        return acts
    if "NotResource" in statement:
        return not _matches(statement["NotResource"], resource)
    return _matches(statement.get("Resource", "*"), resource)


def _matches(patterns: Any, text: str, *, fold: bool = False) -> bool:
    return any(
        re.fullmatch(_regex(pattern.lower() if fold else pattern), text)
        for pattern in _listed(patterns)
    )


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
