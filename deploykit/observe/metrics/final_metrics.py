"""The last values that SageMaker extracted from a job's log: ``FinalMetricDataList``.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_MetricData.html
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from deploykit.observe.metrics.points import LONGEST_NAME, Point, real

SOURCE = "SageMaker (FinalMetricDataList)"


def points(listed: object) -> Iterator[Point]:
    """A point for each metric of a response; what is no such list has none."""
    for one in listed if isinstance(listed, list) else []:
        match one:
            case {"MetricName": str(name), "Value": value, **rest}:
                number, when = real(value), rest.get("Timestamp")
                time = when.timestamp() if isinstance(when, datetime) else None
                if number is not None:
                    yield Point(name[:LONGEST_NAME], number, time=time, source=SOURCE)
