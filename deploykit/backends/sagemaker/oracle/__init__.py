"""The oracle: what SageMaker does with a job. It runs as asked, runs as something else, is refused,
or the outcome cannot be known.

Each rule names the setting, the reason, the nearest setting that works and a source. The reference
page is generated from the rules, with examples that the tests check against the real SDK. Pure:
nothing is queried.
"""

from __future__ import annotations

import datetime as dt

from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.oracle import (
    data_rules,
    distribution_rules,
    resource_rules,
    service_rules,
)
from deploykit.backends.sagemaker.oracle.oracle_rule import (
    Case,
    Consequence,
    OracleRule,
    Verdict,
)
from deploykit.model import JobSpec

RULES: dict[str, tuple[OracleRule, ...]] = {
    "What starts the ranks": distribution_rules.LAUNCHERS,
    "The data parallel library": distribution_rules.DATA_PARALLEL,
    "The model parallel library": distribution_rules.MODEL_PARALLEL,
    "Images": resource_rules.IMAGES,
    "Instances": resource_rules.INSTANCES,
    "Time, cost and network": service_rules.SERVICE,
    "Data and secrets": data_rules.DATA,
}
"""All rules, under the headings of the reference."""


def consequences(job: JobSpec, options: Options, today: dt.date | None = None) -> list[Consequence]:
    """The consequences of every rule that applies, in the order of `RULES`.

    `today` decides which images still receive patches; the default is today's date in UTC.
    """
    case = Case(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    result: list[Consequence] = []
    for rules in RULES.values():
        for rule in rules:
            result += rule.apply(case)
    return result


__all__ = ["RULES", "Case", "Consequence", "OracleRule", "Verdict", "consequences"]
