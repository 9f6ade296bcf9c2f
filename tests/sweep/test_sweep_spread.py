"""The statistics of repeated runs, against published numbers."""

from __future__ import annotations

import pytest

from deploykit.sweep import summary


def test_the_interval_is_students():
    """t for 4 degrees of freedom is 2.776 (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
    found = summary.spread_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.sd) == (3, pytest.approx(1.5811388))
    half = 2.776445 * 1.5811388 / 5**0.5
    assert (found.low, found.high) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert str(found) == "95%: 1.03676 to 4.96324 (5 runs, sd 1.58)"


def test_one_value_has_none():
    assert summary.spread_of([]) is summary.spread_of([1.0]) is None


@pytest.mark.parametrize(("other", "overlaps"), [([2.9, 3.0], True), ([9.0, 9.1], False)])
def test_whether_chance_may_be_the_difference(other, overlaps):
    one, two = summary.spread_of([3.0, 3.1]), summary.spread_of(other)
    assert one.overlaps(two) == two.overlaps(one) == overlaps
