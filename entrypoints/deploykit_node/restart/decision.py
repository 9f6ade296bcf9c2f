"""Whether failed ranks start again: by the cause of the failure, and by those before it.

With ``restarts: {policy: cause}``, the default, a *transient* failure (a lost peer, the network,
storage) is tried again. A *deterministic* one is not: the next attempt would fail in the same way.
An *unknown* one is tried again, until the same failure returns without a new checkpoint. Each
decision is recorded with its reason, which `deploykit status` and the report show.

`retries` and, on Slurm, `slurm.restarts` limit how often.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deploykit_node import records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.records import DecisionRecord, ErrorRecord, NodeExit, RankRecord
from deploykit_node.restart import failure
from deploykit_node.restart.failure import DETERMINISTIC, TRANSIENT, UNKNOWN, Failure

VARIABLE = "DEPLOYKIT_RESTART_POLICY"
"""JSON: `policy` and `back_off` in seconds, where the job file sets them."""
BACK_OFF = 10.0
"""Seconds before the second restart in a row without a new checkpoint; then twice as long."""
LONGEST = 300.0
"""Seconds that a restart waits at most: other nodes wait for ten minutes."""
IN_VAIN = 3
"""The same transient failure so many times in a row, without a new checkpoint, is not transient."""
_PATIENCE = 5.0
"""Seconds to wait for a rank of another node to say why it failed, if ours only lost its peer."""
_PAUSE = 0.05
_VICTIM = 2
"""From here on in `_order`, ranks have failed because of another one."""


def record_failure(env: Environ, ranks: Path, rank: RankRecord, last: tuple[str, str, str]) -> None:
    """Record why a rank failed, by its `last` output: errors, output, output of another rank."""
    error: ErrorRecord = {
        "rank": rank["rank"],
        "local_world_size": rank["local_world_size"],
        "attempt": rank["attempt"],
        "stopped": rank["stopped"],
        "finished": now(),
        **failure.read(rank["exit_code"], *last)._asdict(),  # type: ignore[typeddict-item]
    }
    records.record_error(env, ranks, error, is_root=_order(error) < _VICTIM)


def root(env: Environ, ranks: Path, *, alone: bool) -> ErrorRecord | None:
    """Why the last round ended: the first rank that is no victim of another one.

    Of several nodes, another one may know: `alone` says that there is none. None if that is so, or
    if no rank failed.
    """
    number, deadline = records.last_round(ranks), time.monotonic() + _PATIENCE
    own = sorted(records.errors(env, ranks), key=_order)
    while (error := records.shared_error(env, number)) is None:
        if own and (alone or _order(own[0]) < _VICTIM):
            return own[0]
        if alone or time.monotonic() > deadline:
            first = records.first_failure(env, ranks)
            return next((one for one in own if first and one["rank"] == first["rank"]), None)
        time.sleep(_PAUSE)
    return error


def _order(error: ErrorRecord) -> int:
    """Ranks that failed by themselves first, then those that ended while they were stopped."""
    if error["label"] in failure.SYMPTOMS:
        return _VICTIM
    if not error["stopped"]:
        return 0
    return _VICTIM + 1 if error["root"].startswith("SIG") else 1


def policy(env: Environ) -> tuple[str, float]:
    """The policy, and the back-off in seconds."""
    values = json.loads(env.get(VARIABLE) or "{}")
    return values.get("policy", "cause"), float(values.get("back_off", BACK_OFF))


class Decision(NamedTuple):
    """Whether the ranks start again, what kind of failure it was, and why."""

    restart: bool
    kind: str
    why: str
    wait: float = 0.0
    """Seconds until they do."""


def after_failure(env: Environ, error: ErrorRecord, saved: str) -> Decision:
    """Decide, and record it, whether the ranks start again after a failure.

    `saved` is the newest checkpoint that was written since the decision before, if there is one.
    """
    decided = decide(_failure(error), saved, records.decisions(env), policy(env)[1])
    _keep(
        env,
        {
            **_record(env, decided, saved),
            "cause": error["label"],
            "error": error["error"],
            "root": error["root"],
            "step": error["step"],
            "steps": error["steps"],
        },
    )
    return decided


def after_event(env: Environ, why: str, saved: str) -> None:
    """Record that the job starts again for a reason that no rank has: a preemption, a lost node."""
    decided = Decision(True, TRANSIENT, f"restarting after {why.replace('_', ' ')}")
    _keep(env, {**_record(env, decided, saved), "cause": why})


def _record(env: Environ, decided: Decision, saved: str) -> DecisionRecord:
    number = records.attempt(env)
    return {
        **decided._asdict(),  # type: ignore[typeddict-item]
        "attempt": number,
        "round": sum(one["attempt"] == number for one in records.decisions(env)),
        "cause": "",
        "error": "",
        "root": "",
        "step": None,
        "steps": False,
        "saved": saved,
        "host": os.uname().nodename,
        "at": time.time(),
    }


def _keep(env: Environ, record: DecisionRecord) -> None:
    """Write a decision, if the run has a folder."""
    shared = records.folder(env)
    if shared is not None:
        records.write(shared / records.of_round(env, "decision", record["round"]), record)


def last(env: Environ) -> DecisionRecord | None:
    """The last decision of this attempt."""
    mine = [one for one in records.decisions(env) if one["attempt"] == records.attempt(env)]
    return mine[-1] if mine else None


def of_exit(env: Environ, end: NodeExit) -> ErrorRecord:
    """The failure of a node of which no rank has told why."""
    how = records.how(end.code)
    failure = Failure(error=end.reason, root=how)
    return {
        "rank": end.rank or 0,
        "local_world_size": 1,
        "attempt": records.attempt(env),
        "stopped": end.stopped,
        "finished": now(),
        **failure._asdict(),  # type: ignore[typeddict-item]
    }


def _failure(error: ErrorRecord) -> Failure:
    return Failure(**{name: error[name] for name in Failure._fields})  # type: ignore[literal-required]


def decide(
    failure: Failure, saved: str, earlier: Sequence[DecisionRecord], back_off: float = BACK_OFF
) -> Decision:
    """What follows a failure, after the `earlier` decisions and the checkpoint `saved` since."""
    before, saved_since = _last_failure(earlier, saved)
    again = before is not None and bool(failure.root) and before["root"] == failure.root
    in_vain = _in_vain(earlier, saved)
    wait = min(LONGEST, back_off * 2 ** (in_vain - 1)) if in_vain else 0.0
    what = failure.error or failure.root
    named = f"{failure.label}: {what}" if failure.label else what
    no_progress = f"a retry would make no progress ({named})"
    if failure.retry == DETERMINISTIC and not (
        failure.at_start and _progressed(failure, saved, earlier)
    ):
        return Decision(False, DETERMINISTIC, f"not restarted: {no_progress}")
    if failure.retry == TRANSIENT:
        if again and _in_vain(earlier, saved, failure.root) >= IN_VAIN - 1:
            why = f"the same failure {IN_VAIN} times in a row without a new checkpoint"
            return Decision(False, TRANSIENT, f"not restarted: {why} ({named})")
        return Decision(True, TRANSIENT, f"restarting after a transient failure ({named})", wait)
    if again and before and failure.step is not None and before["step"] == failure.step:
        why = f"the same failure at step {failure.step} twice, so {no_progress}"
        return Decision(False, DETERMINISTIC, f"not restarted: {why}")
    if again and not saved_since:
        why = "the same failure again, with no new checkpoint in between"
        return Decision(False, UNKNOWN, f"not restarted: {why} ({named})")
    return Decision(True, UNKNOWN, f"restarting after an unrecognized failure ({named})", wait)


def _last_failure(
    earlier: Sequence[DecisionRecord], saved: str
) -> tuple[DecisionRecord | None, bool]:
    """The last failure of a rank, and whether a checkpoint was written since."""
    saved_since = bool(saved)
    for one in reversed(earlier):
        if one["root"]:
            return one, saved_since
        saved_since = saved_since or bool(one["saved"])
    return None, saved_since


def _in_vain(earlier: Sequence[DecisionRecord], saved: str, root: str = "") -> int:
    """How many failures before, in a row, no new checkpoint followed; with `root`, the same one."""
    count, since = 0, bool(saved)
    for one in reversed(earlier):
        if since or (root and one["root"] not in ("", root)):
            break
        count, since = count + bool(one["root"]), bool(one["saved"])
    return count


def _progressed(failure: Failure, saved: str, earlier: Sequence[DecisionRecord]) -> bool:
    """Whether the program has made steps, in this attempt or before."""
    return bool(saved) or failure.steps or any(one["saved"] or one["steps"] for one in earlier)
