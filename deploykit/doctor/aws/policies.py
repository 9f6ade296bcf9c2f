"""IAM policy evaluation, as far as a job requires it.

Conditions are not evaluated: an Allow with a condition counts as "perhaps", and a Deny with a
condition is ignored.
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
    """The actions of a job on a bucket, each with its resource."""
    arn = f"arn:aws:s3:::{bucket}"
    return [(action, arn + below) for action, below in (*_READ, *(_WRITE if write else ()))]


def allow_bucket(bucket: str, *, write: bool = True) -> dict[str, Any]:
    """A statement that allows the actions of a job on a bucket."""
    actions = bucket_actions(bucket, write=write)
    arn = f"arn:aws:s3:::{bucket}"
    return {
        "Effect": "Allow",
        "Action": [action for action, _ in actions],
        "Resource": [arn, f"{arn}/*"],
    }


def decide(policies: Iterable[Policy], action: str, resource: str | None) -> Decision:
    """Evaluate all policies together. If `resource` is None, any allowed resource counts."""
    decision: Decision = "absent"
    for statement in (one for policy in policies for one in statements(policy)):
        if denies(statement, action, resource):
            return "denied"
        if statement.get("Effect") == "Allow" and _matches_statement(statement, action, resource):
            if not statement.get("Condition"):
                decision = "allowed"
            elif decision == "absent":
                decision = "perhaps"
    return decision


def denies(statement: Policy, action: str, resource: str | None) -> bool:
    """Whether a statement denies unconditionally; if `resource` is None, on every resource."""
    if statement.get("Effect") != "Deny" or statement.get("Condition"):
        return False
    if resource is None:
        return _matches_statement(statement, action, None) and "*" in _listed(
            statement.get("Resource", ())
        )
    return _matches_statement(statement, action, resource)


def statements(policy: Policy) -> Iterator[Policy]:
    """The statements of a policy document, which may hold one alone instead of a list."""
    listed = policy.get("Statement", ())
    yield from [listed] if isinstance(listed, Mapping) else listed


def trusts(policy: Policy, service: str) -> bool:
    """Whether a trust policy allows a service to assume the role."""
    return any(
        one.get("Effect") == "Allow"
        and _matches_statement(one, "sts:AssumeRole", None)
        and service in _listed(dict(one.get("Principal", {})).get("Service", ()))
        for one in statements(policy)
        if isinstance(one.get("Principal"), Mapping)
    )


def shown(statement: Policy) -> str:
    """A statement as JSON on one line, for evidence."""
    return json.dumps(statement)


def _matches_statement(statement: Policy, action: str, resource: str | None) -> bool:
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
