"""IAM policy evaluation, as far as a job requires it.

Conditions are not evaluated: an Allow with a condition counts as "perhaps", and a Deny with a
condition is ignored. `iam:SimulatePrincipalPolicy` would need a further permission, would not cover
the policy of an endpoint, and could not be answered from saved facts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Decision = Literal["allowed", "perhaps", "denied", "absent"]
Policy = Mapping[str, Any]


def bucket_actions(bucket: str, *, write: bool = True) -> list[tuple[str, str]]:
    """The actions of a job on a bucket, each with its resource."""
    arn = f"arn:aws:s3:::{bucket}"
    reads = [("s3:ListBucket", arn), ("s3:GetObject", f"{arn}/*")]
    return [*reads, ("s3:PutObject", f"{arn}/*")] if write else reads


def allow_bucket(bucket: str) -> dict[str, Any]:
    """A statement that allows the actions of a job on a bucket."""
    arn = f"arn:aws:s3:::{bucket}"
    actions = [action for action, _ in bucket_actions(bucket)]
    return {"Effect": "Allow", "Action": actions, "Resource": [arn, f"{arn}/*"]}


def document(statements: Iterable[Policy]) -> dict[str, Any]:
    """A policy of these statements."""
    return {"Version": "2012-10-17", "Statement": list(statements)}


def decide(policies: Iterable[Policy], action: str, resource: str | None) -> Decision:
    """Evaluate all policies together. If `resource` is None, any allowed resource counts."""
    decision: Decision = "absent"
    for statement in itertools.chain.from_iterable(map(statements, policies)):
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
    if resource is None and "*" not in _listed(statement.get("Resource", ())):
        return False
    return _matches_statement(statement, action, resource)


def statements(policy: Policy) -> Iterator[Policy]:
    """The statements of a policy document, which may hold one alone instead of a list."""
    listed = policy.get("Statement", ())
    yield from [listed] if isinstance(listed, Mapping) else listed


def trusts(policy: Policy, service: str) -> bool:
    """Whether a trust policy allows a service to assume the role."""
    return any(
        statement.get("Effect") == "Allow"
        and _matches_statement(statement, "sts:AssumeRole", None)
        and service in _listed(dict(statement.get("Principal", {})).get("Service", ()))
        for statement in statements(policy)
        if isinstance(statement.get("Principal"), Mapping)
    )


def shown(statement: Policy) -> str:
    """A statement as JSON on one line, for evidence."""
    return json.dumps(statement)


def _matches_statement(statement: Policy, action: str, resource: str | None) -> bool:
    if "NotAction" in statement:
        acts = not _matches(statement["NotAction"], action, flags=re.IGNORECASE)
    else:
        acts = _matches(statement.get("Action", ()), action, flags=re.IGNORECASE)
    if not acts or resource is None:
        return acts
    if "NotResource" in statement:
        return not _matches(statement["NotResource"], resource)
    return _matches(statement.get("Resource", "*"), resource)


def _matches(patterns: Any, text: str, flags: int = 0) -> bool:
    """Whether a pattern with ``*`` and ``?`` matches; `fnmatch` would also read ``[...]``."""
    regexes = (re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in _listed(patterns))
    return any(re.fullmatch(regex, text, flags) for regex in regexes)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
