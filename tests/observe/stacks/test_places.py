"""Which ranks stand at the same place, and what the place is called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploykit.observe import stacks
from deploykit.observe.stacks import Frame
from tests.observe.stacks import samples
from tests.observe.stacks.samples import NEXT, REDUCE, SITE, SOURCE, WORKER, process, rank


def test_the_odd_one_out_comes_first():
    ranks = [rank(number, *(NEXT if number == 6 else REDUCE)) for number in range(8)]
    first, second = stacks.groups(ranks)
    assert (first.label, second.label) == ("rank 6", "ranks 0-5,7")
    assert str(first.place) == ("_LoaderIter.__next__, called at train.py:19: for batch in loader:")
    assert str(second.place) == "all_reduce, called at train.py:15: dist.all_reduce(total)"
    assert stacks.sentence([first, second]) == (
        "rank 6 is in _LoaderIter.__next__ (train.py:19), "
        "ranks 0-5,7 are in all_reduce (train.py:15)"
    )


def test_lines_within_a_library_do_not_tell_ranks_apart():
    moved = replace(REDUCE[0], line=3250)
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, moved, *REDUCE[1:])])) == 1


def test_native_calls_do_not_tell_ranks_apart():
    native = Frame("0x7f00", "/lib/libc.so.6", 0)
    other = Frame("0x7f11", "/lib/libc.so.6", 0)
    assert len(stacks.groups([rank(0, *REDUCE, native), rank(1, native, *REDUCE, other)])) == 1


def test_the_users_lines_tell_ranks_apart_and_so_does_the_way_there():
    evaluation = Frame("main", f"{SOURCE}/train.py", 30, "step(held_out)")
    other_way = (*REDUCE[:3], evaluation, REDUCE[-1])
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, *other_way)])) == 2
    other_library = (*REDUCE[:2], Frame("sync", f"{SITE}/lib.py", 1), *REDUCE[2:])
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, *other_library)])) == 2


def test_a_rank_that_was_stopped_is_apart():
    first, _ = stacks.groups([rank(0, *REDUCE), rank(1, *REDUCE, state="T"), rank(2, *REDUCE)])
    assert str(first.place).startswith("stopped by a signal, all_reduce")
    assert stacks.sentence([first]) == ("rank 1 is stopped by a signal in all_reduce (train.py:15)")


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ((), "no Python stack"),
        (REDUCE[2:], "step at train.py:15: dist.all_reduce(total)"),
        (WORKER, "_worker_loop (torch/utils/data/_utils/worker.py:334)"),
        ((samples.SELECT,), "Selector.select (selectors.py:415)"),
        (
            (Frame("<module>", "/srv/own/a.py", 3),),
            "<module> at /srv/own/a.py:3",
        ),
        (
            (Frame("wait", "<frozen importlib._bootstrap>", 3),),
            "wait (importlib._bootstrap:3)",
        ),
        ((Frame("poll", "/lib/libc.so.6", 0), *NEXT[2:3]), "_LoaderIter.__next__ (torch/utils"),
    ],
)
def test_a_place_is_named_by_a_function_that_a_reader_knows(frames, text):
    assert str(stacks.place(process(*frames))).startswith(text)


def test_a_sentence_names_three_groups():
    ranks = [rank(number, Frame("f", f"{SOURCE}/a.py", number)) for number in range(5)]
    text = stacks.sentence(stacks.groups(ranks))
    assert text.endswith("rank 2 is in f (a.py:2), 2 more ranks elsewhere")
    assert stacks.sentence(stacks.groups(ranks[:1])) == "rank 0 is in f (a.py:0)".replace(":0", "")
    same = [rank(number, *REDUCE) for number in range(3)]
    assert stacks.sentence(stacks.groups(same)) == "all 3 ranks are in all_reduce (train.py:15)"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([3, 1, 2, 9, 5, 6], "1-3,5-6,9")]
)
def test_spans(numbers, text):
    assert stacks.spans(numbers) == text
