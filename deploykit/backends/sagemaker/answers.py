"""Whether an answer comes from AWS: a proxy, a captive portal or a wrong endpoint may send others.

botocore reads an HTML page with status 200 as an empty answer, and fails on JSON that is no object,
too deep, or not UTF-8, with whatever exception its code meets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.parsers import ResponseParserFactory

_REQUIRED: dict[str, dict[str, type]] = {
    "CreateTrainingJobResponse": {"TrainingJobArn": str},
    "DescribeTrainingJobResponse": {"TrainingJobArn": str, "TrainingJobStatus": str},
    "DescribeLogStreamsResponse": {"logStreams": list},
    "GetLogEventsResponse": {"events": list},
    "SearchTrainingPlanOfferingsResponse": {"TrainingPlanOfferings": list},
    "GetRoleResponse": {"Role": dict},
    "HeadObjectOutput": {"ETag": str},
    "PutObjectOutput": {"ETag": str},
}
"""Output of an operation -> the fields that each answer of AWS has, among those that are used."""
_QUOTED = 60
"""Characters of an invalid answer that a message quotes."""
_ERROR = 300
"""The lowest status of an answer that is an error or a redirect."""


class NoAnswerError(Exception):
    """What came is not an answer of AWS."""


class Parsers(ResponseParserFactory):  # type: ignore[misc] # botocore has no types
    """botocore's parsers of answers, which raise NoAnswerError for whatever they cannot read."""

    def create_parser(self, protocol_name: str) -> Any:
        """The parser of a protocol."""
        parser = super().create_parser(protocol_name)
        original = parser.parse

        def parse(response: dict[str, Any], shape: Any) -> Any:
            is_error = response["status_code"] >= _ERROR
            try:
                parsed = original(response, shape)
            except Exception as error:  # botocore's parsers raise anything
                if not is_error:
                    raise NoAnswerError(_described(response)) from error
                parsed = _error(response)
            if not is_error and not _is_valid(response, protocol_name, shape, parsed):
                raise NoAnswerError(_described(response))
            return parsed

        parser.parse = parse
        return parser


def _is_valid(response: Mapping[str, Any], protocol: str, shape: Any, parsed: Any) -> bool:
    body = response["body"]
    if protocol == "json" and body:
        stripped = body.strip()
        if not (stripped.startswith(b"{") and stripped.endswith(b"}")):
            return False
    required = _REQUIRED.get(shape.name, {}) if shape else {}
    return all(isinstance(parsed.get(name), kind) for name, kind in required.items())


def _error(response: Mapping[str, Any]) -> dict[str, Any]:
    """The error of an answer that botocore cannot read, in its form."""
    status = response["status_code"]
    return {
        "Error": {"Code": str(status), "Message": ""},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": dict(response["headers"])},
    }


def _described(response: Mapping[str, Any]) -> str:
    """Quote the beginning: ``HTTP 200, text/html: <html> ...``."""
    kind = response["headers"].get("content-type", "no content type")
    text = " ".join(response["body"].decode(errors="replace").split())
    quoted = f"{text[:_QUOTED]}..." if len(text) > _QUOTED else text or "empty"
    return f"HTTP {response['status_code']}, {kind}: {quoted}"
