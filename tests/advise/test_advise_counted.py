"""The formulas compared with what torch allocates, on every rank of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advise.counting import ALL, count, predict, rows

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("advise")]

FIGURES = Path(__file__).with_name("figures.md")
SCALARS = 1024
"""Bytes: AdamW keeps a step counter for each tensor, the loss a few single numbers."""


def within(guess, found, share):
    return abs(guess - found) <= share * found + SCALARS


@pytest.fixture(params=ALL)
def case(request):
    world, each = ALL[request.param]
    return each, predict(world, each), count(world)[request.param]


def test_states_are_within_five_percent(case):
    _, guess, found = case
    for part in ("parameters", "gradients", "optimizer"):
        assert within(guess[part], found[part], 0.05), (part, guess, found)


def test_activations_are_within_twenty_percent(case):
    _, guess, found = case
    assert within(guess["activations"], found["activations"], 0.2), (guess, found)
    assert found["activations"] > SCALARS


def test_casts_are_within_five_percent(case):
    each, guess, found = case
    if not each.get("checkpointing"):  # autograd holds no copies then, only autocast does
        assert within(guess["copies"], found["copies"], 0.05)


def test_the_peak_of_a_step_is_reached_and_not_passed(case):
    """The peak of a step, temporary tensors included."""
    _, guess, found = case
    if found["peak"]:  # counted where there is one process
        assert 0.98 * found["peak"] <= guess["peak"] <= 1.25 * found["peak"]


def test_the_table_shows_these_figures():
    page = FIGURES.read_text(encoding="utf-8")
    assert "\n".join(rows()) in page
