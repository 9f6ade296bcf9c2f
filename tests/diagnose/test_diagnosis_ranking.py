"""Ranking: how lines become evidence, and which of several causes comes first."""

from __future__ import annotations

import pytest

from deploykit.diagnose import cause_rules, ranking
from deploykit.diagnose.ranking import SHOWN, Diagnosis
from deploykit.diagnose.scan import RawLine

RULES = r"""
[[harmless]]
match = 'banner'
spans = 2
[[harmless]]
match = 'is fine'
[[mild]]
match = 'warning'
[[success]]
match = 'job done'
[[cause]]
label = 'first'
means = 'm'
fix = '{file|FILE} {rank|RANK} {host|HOST} {port|PORT} {run|RUN}'
match = 'broken (?P<port>\d+)|broken'
literals = ['broken']
also = ['other', 'first']
unless = 'repaired'
[[cause]]
label = 'second'
means = 'm'
fix = 'f'
match = ['broken', 'jammed']
[[cause]]
label = 'later'
means = 'm'
fix = 'f'
kind = 'late'
match = 'timeout'
yields = ['after']
[[cause]]
label = 'after'
means = 'm'
fix = 'f'
kind = 'symptom'
match = 'exited'
[[cause]]
label = 'linked'
means = 'm'
fix = 'f'
match = 'link down'
after = 'link up'
[[cause]]
label = 'joined'
means = 'm'
fix = 'f'
match = 'disk.*full'
literals = ['disk']
[[cause]]
label = 'library'
means = 'm'
fix = 'f'
match = 'Trouble: no answer'
raised_in = '/netlib/.* ask'
[[cause]]
label = 'unwell'
means = 'm'
fix = 'f'
match = 'heat is high'
least = 2
until = 'heat is low'
[[cause]]
label = 'user_code_error'
means = 'm'
fix = 'f'
match = 'raised Error'
after = ['Traceback', '", line ']
[[cause]]
label = 'numbered'
means = 'm'
fix = 'f'
match = 'status 7'
"""
SUMMARY = "  rank      : 3 (local_rank: 3)"


@pytest.fixture
def diagnose(tmp_path):
    """The causes of logs, each given as the lines that hold a literal, numbered from 1."""
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    rules = cause_rules._read(path)

    def causes(*logs, values=None, rank=None):
        diagnosis = Diagnosis(rules, values)
        for number, log in enumerate(logs):
            rows = log.items() if isinstance(log, dict) else enumerate(log, 1)
            lines = [RawLine(at, text.lstrip("~").encode(), text[0] != "~") for at, text in rows]
            diagnosis.read(f"{number}.log", lines, rank)
        return diagnosis.causes()

    return causes


def labels(causes):
    return [cause.rule.label for cause in causes]


def lines(cause):
    return [(evidence.file, evidence.line) for evidence in cause.evidence]


def test_a_line_belongs_to_the_first_rule_that_matches(diagnose):
    assert labels(diagnose(["jammed", "broken 7"])) == ["first", "second"]
    assert labels(diagnose(["broken 7", "jammed"])) == ["first"]  # which has the same first proof
    assert labels(diagnose(["broken 7"], ["jammed"])) == ["first"]


def test_a_rule_that_is_ruled_out_leaves_the_line_to_the_next(diagnose):
    assert labels(diagnose(["broken 7", "repaired"])) == ["second"]
    assert labels(diagnose(["broken 7"], ["repaired"])) == ["second"]


def test_a_late_cause_counts_without_a_root_and_a_symptom_without_both(diagnose):
    assert labels(diagnose(["exited", "timeout", "jammed"])) == ["second"]
    assert labels(diagnose(["timeout", "exited"])) == ["later"]
    assert labels(diagnose(["exited"])) == ["after"]
    assert diagnose(["nothing"]) == []


def test_a_cause_that_is_yielded_to_comes_first_if_it_was_seen_earlier(diagnose):
    assert labels(diagnose(["exited", "timeout"])) == ["after", "later"]


def test_evidence_is_limited_and_in_order(diagnose):
    (cause,) = diagnose([f"jammed at step{'x' * number}" for number in range(SHOWN + 2)])
    assert lines(cause) == [("0.log", number) for number in (1, 2, 3)]
    later = "2026-01-02T00:00:09 jammed b"
    earlier = "2026-01-02T00:00:01 jammed a"
    (cause,) = diagnose([later], [earlier])
    assert lines(cause) == [("1.log", 1), ("0.log", 1)]
    assert cause.order == ("2026-01-02T00:00:01", 2, 1)
    (cause,) = diagnose([later, later.replace("09 jammed b", "10 jammed c")], [earlier])
    assert lines(cause) == [("1.log", 1), ("0.log", 1), ("0.log", 2)]


def test_a_firm_line_replaces_mild_ones(diagnose):
    assert diagnose(["warning: jammed"]) == []
    (cause,) = diagnose(["warning: jammed", "jammed", "warning: jammed again"])
    assert lines(cause) == [("0.log", 2)]


def test_success_discards_only_the_failures_of_its_own_log(diagnose):
    assert diagnose(["jammed", "job done"]) == []
    assert labels(diagnose(["jammed"], ["job done"])) == ["second"]
    assert labels(diagnose(["job done", "jammed"])) == ["second"]


def test_lines_after_a_harmless_one_are_skipped(diagnose):
    assert diagnose(["banner", "jammed", "jammed"]) == []
    (cause,) = diagnose(["banner", "jammed", "jammed", "jammed"])
    assert lines(cause) == [("0.log", 4)]


def test_only_lines_after_a_harmless_one_are_skipped(diagnose):
    (cause,) = diagnose(["nothing", "banner", "jammed", "jammed", "jammed"])
    assert lines(cause) == [("0.log", 5)]
    (cause,) = diagnose(["it is fine\rjammed"])
    assert lines(cause) == [("0.log", 1)]


@pytest.mark.parametrize(("line", "found"), [(2, ["linked"]), (401, ["linked"]), (402, [])])
def test_after_holds_for_400_lines(line, found, diagnose):
    assert labels(diagnose({1: "link up", line: "link down"})) == found


def test_a_message_that_is_broken_over_lines_is_joined(diagnose):
    assert labels(diagnose(["the disk", "~is full"])) == ["joined"]
    assert labels(diagnose(["the disk", "~is full", "nothing"])) == ["joined"]
    assert diagnose(["the disk", "nothing", "~is full"]) == []


def test_a_log_is_read_on_after_a_continuation(diagnose):
    assert labels(diagnose(["nothing", "~more of it", "jammed"])) == ["second"]


def test_a_line_without_a_literal_counts_only_as_a_continuation(diagnose):
    assert diagnose(["nothing", "~jammed"]) == []


def test_the_same_line_counts_again_only_in_another_place(diagnose):
    (cause,) = diagnose(["jammed", "jammed"], ["jammed"])
    assert lines(cause) == [("0.log", 1), ("0.log", 2), ("1.log", 1)]
    (cause,) = diagnose(["jammed\rjammed"])
    assert lines(cause) == [("0.log", 1)]
    (cause,) = diagnose(["jammed", "jammed\rjammed"])
    assert lines(cause) == [("0.log", 1), ("0.log", 2)]


def test_a_line_that_proves_nothing_is_remembered_by_itself(diagnose):
    """Another line with other digits, or the rest of a progress bar's line, may prove something."""
    assert labels(diagnose(["status 6", "status 7"])) == ["numbered"]
    (cause,) = diagnose(["50%\rjammed", "60%\rjammed"])
    assert lines(cause) == [("0.log", 1), ("0.log", 2)]


def test_only_so_many_lines_are_remembered(diagnose, monkeypatch):
    """A log of a million different lines must not fill the memory."""
    monkeypatch.setattr(ranking, "_MAX_IDLE", 3)
    kept = []
    read = Diagnosis.read
    monkeypatch.setattr(
        Diagnosis, "read", lambda self, *rest: (kept.append(self._idle), read(self, *rest))
    )
    assert diagnose([f"nothing {'x' * number}" for number in range(9)]) == []
    assert len(kept[0]) == 3


def test_evidence_is_short(diagnose):
    (cause,) = diagnose([f"jammed {'x' * 1000}"])
    assert cause.evidence[0].text == "jammed " + 233 * "x" + "..."
    (cause,) = diagnose([f"{'x' * 1000} jammed {'y' * 1000}"])
    assert cause.evidence[0].text == f"...{'x' * 59} jammed {'y' * 173}..."


def test_the_rank_comes_from_the_summary_of_torchrun(diagnose):
    (cause,) = diagnose([SUMMARY, "  exitcode  : 1 jammed"])
    assert (cause.evidence[0].rank, cause.first_rank) == (3, 3)
    (cause,) = diagnose(["jammed", SUMMARY, "nothing"])
    assert (cause.evidence[0].rank, cause.first_rank) == (None, 3)


def test_a_fix_has_the_values_of_the_line_and_of_the_run(diagnose):
    (cause,) = diagnose(["[rank3]: broken 7"], values={"run": "one-1"}, rank=5)
    assert cause.fix == "0.log 3 HOST 7 one-1"
    assert cause.first_rank == 3
    (cause,) = diagnose(["broken 7"], rank=5)
    assert cause.first_rank == 5
    assert cause.also == ["other"]


def test_a_harmless_line_proves_nothing(diagnose):
    assert diagnose(["jammed is fine"]) == []


def test_a_rule_with_after_needs_a_line_before(diagnose):
    assert diagnose(["link down"]) == []
    assert labels(diagnose(["link down", "link up", "link down"])) == ["linked"]
    assert labels(diagnose(["link down, disk full"])) == ["joined"]


def test_the_values_of_the_first_line_stay(diagnose):
    (cause,) = diagnose(["broken 7", "broken 8"])
    assert cause.fix == "0.log RANK HOST 7 RUN"
    (cause,) = diagnose(["broken 7"], ["broken 8"])
    assert cause.fix == "0.log RANK HOST 7 RUN"


def test_other_causes_are_named_and_each_label_once(diagnose):
    (cause,) = diagnose(["jammed", "timeout", "warning: broken"])
    assert labels([cause]) == ["second"]
    assert cause.also == ["first", "later"]


TRACEBACK = [
    "Traceback (most recent call last)",
    '  File "train.py", line 3, in main',
    '  File "/env/netlib/call.py", line 9, in ask',
    "~    return answer()",
    "~           ^^^^^^^^",
]


def test_where_an_exception_was_raised_decides(diagnose):
    assert labels(diagnose([*TRACEBACK, "Trouble: no answer"])) == ["library"]
    assert diagnose(["Trouble: no answer"]) == []
    of_ranks = [f"[rank1]: {line.lstrip('~')}" for line in TRACEBACK]
    assert diagnose([*of_ranks, "[rank0]: Trouble: no answer"]) == []
    assert labels(diagnose([*of_ranks, "[rank1]: Trouble: no answer"])) == ["library"]


def test_an_exception_of_any_name_ends_a_traceback(diagnose):
    (cause,) = diagnose([*TRACEBACK, "~netlib.Refusal: not today"])
    assert labels([cause]) == ["user_code_error"]
    assert cause.evidence[0].text == "netlib.Refusal: not today"
    assert diagnose([*TRACEBACK, "~step 1 is done, without a name"]) == []
    assert diagnose([*TRACEBACK, "~SystemExit: 0"]) == []


def test_a_line_that_no_rule_matches_ends_a_traceback_too(diagnose):
    (cause,) = diagnose([*TRACEBACK, "netlib.Refusal: not today"])  # with a literal of some rule
    assert labels([cause]) == ["user_code_error"]


def test_a_frame_that_a_console_wrapped_is_one(diagnose):
    path = ['~  File "/opt/env/lib/net', 'lib/client.py", line 9, in ask', "~    raise Refusal()"]
    log = [f"~{TRACEBACK[0]}", *path, "netlib.Refusal: not tod", "~ay, nor tomorrow"]
    (cause,) = diagnose(log)
    assert cause.evidence[0].text == "netlib.Refusal: not tod"
    assert labels([cause]) == ["user_code_error"]


def test_a_proof_that_passes_is_taken_back(diagnose):
    high, low = "heat is high", "~heat is low"
    assert diagnose([high]) == []
    assert labels(diagnose([high, high])) == ["unwell"]
    assert diagnose([high, high, low]) == []
    assert labels(diagnose({1: high, 2: high, 9: low})) == ["unwell"]
    assert labels(diagnose([high, high, low, high, high])) == ["unwell"]
    assert diagnose([high, high, low, high]) == []
