"""Built-in backends define capabilities with the signatures of `base.Capabilities`.

mypy proves that each meets `Backend`; no type can describe a module with some of the capabilities.
"""

from __future__ import annotations

import inspect
import re

import pytest

from deploykit.backends import base

CONTRACT = {name for name in vars(base.Backend) if not name.startswith("_")}
CAPABILITIES = {name for name in vars(base.Capabilities) if not name.startswith("_")} - CONTRACT
FACTS = {"UNLIMITED": bool, "PREFLIGHT": int}
TOGETHER = (
    {"bills", "cost"},
    {"refresh_prices", "alternatives"},
    {"largest_array", "submit_array", "cancel_all"},
)


def parameters(function, *, bound):
    known = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
    return [(one.name, one.kind, one.annotation) for one in known]


@pytest.mark.parametrize("backend", ["local", "slurm", "sagemaker"])
def test_what_a_backend_offers_has_the_signature_of_the_table(backend):
    engine = base.find(backend)
    offered = {member for member in CAPABILITIES if base.offers(engine, member)}
    assert offered
    for member in offered - set(FACTS):
        described = getattr(base.Capabilities, member)
        expected = parameters(described, bound=False)
        actual = parameters(getattr(engine, member), bound=True)
        for (own_name, own_kind, own_type), (name, kind, type_) in zip(
            actual, expected, strict=True
        ):
            assert own_name in {name, "_"}, member
            assert own_kind == kind, member
            assert type_ in {own_type, "Any"}, member
        returned = inspect.signature(getattr(engine, member)).return_annotation
        returned = re.sub(r"^list\b", "Sequence", re.sub(r"^dict\b", "Mapping", returned))
        assert returned == inspect.signature(described).return_annotation, member
    for member in offered & set(FACTS):
        assert type(getattr(engine, member)) is FACTS[member]
    for group in TOGETHER:
        assert offered & group in (set(), group)


def test_the_table_is_what_callers_look_up():
    assert set(base.REQUESTED) <= CAPABILITIES
    with pytest.raises(AttributeError, match="'slot'"):
        base.offers(base.find("local"), "slot")
