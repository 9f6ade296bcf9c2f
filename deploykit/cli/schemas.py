"""JSON Schemas of each verb's `--json` output, against which tests validate every document.

`deploykit schema VERB` prints a schema. All keys are required, except those in `optional`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deploykit.backends.deployment import Phase
from deploykit.cli.output import SCHEMA_VERSION
from deploykit.diagnose.endings import Ending
from deploykit.job.model import State

Schema = Mapping[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"

# Words for schemas

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}
EPOCH: Schema = {"type": "number", "description": "seconds since 1970, UTC"}
VALUE: Schema = {
    "description": "a number; nan, inf and -inf are strings",
    "anyOf": [NUMBER, {"enum": ["nan", "inf", "-inf"]}],
}
OPEN: Schema = {"type": "object"}


def _enum(*values: str) -> Schema:
    return {"enum": list(values)}


def _nullable(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _by_name(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _record(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


def _document(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """A record at the top of what is printed."""
    return _record({"schema_version": {"const": SCHEMA_VERSION}, **fields}, optional)


def _any(*schemas: Schema) -> Schema:
    each = ([schema] if set(schema) != {"anyOf"} else schema["anyOf"] for schema in schemas)
    return {"anyOf": list(itertools.chain.from_iterable(each))}


# Parts that several documents have

_STATE = _enum(*(state.value for state in State))
_RUN: Mapping[str, Schema] = {
    "run": TEXT,
    "name": TEXT,
    "backend": TEXT,
    "handle": _nullable(TEXT),
    "state": _STATE,
    "native": {"type": "string", "description": "the state as the target names it"},
    "reason": TEXT,
    "exit_code": _nullable(INTEGER),
    "final": BOOLEAN,
    "created": TIME,
    "started": _nullable(TIME),
    "finished": _nullable(TIME),
    "queue_seconds": _nullable(NUMBER),
    "duration_seconds": _nullable(NUMBER),
    "folder": TEXT,
    "output": TEXT,
    "bundle": TEXT,
    "commit": _nullable(TEXT),
    "cost": _nullable(_ref("spent")),
    "written": _nullable(
        _record(
            {name: _ref("files") for name in ("output", "checkpoints", "working_folder")},
        )
    ),
    "checkpoints": _nullable(_record({"location": TEXT, "newest": TEXT, "error": TEXT})),
}
_FILE = _record({"path": TEXT, "bytes": COUNT})
_MONEY = _record({"amount": NUMBER, "currency": TEXT})
_CASES = {case: _nullable(NUMBER) for case in ("low", "likely", "worst")}
_ESTIMATE: Mapping[str, Schema] = {
    **_CASES,
    "currency": _nullable(TEXT),
    "charges": _list(_record({"what": TEXT, "hourly": TEXT, **_CASES})),
    "unknown": _list(TEXT),
    "free": _nullable(TEXT),
    "source": _nullable(TEXT),
    "notes": _list(TEXT),
    "warnings": _list(TEXT),
}
_MACHINES = _list(
    _record({"instance_type": TEXT, "instances": COUNT, "most": COUNT, "memory": COUNT})
)
_THREADS = _list(
    _record(
        {
            "name": TEXT,
            "frames": _list(OPEN),
        }
    )
)
_PROCESS: Mapping[str, Schema] = {"pid": INTEGER, "name": TEXT, "threads": _THREADS}
_TRIAL: Mapping[str, Schema] = {
    "trial": COUNT,
    "state": _enum("running", "succeeded", "pruned", "failed"),
    "parameters": _by_name(TEXT),
    "value": _nullable(NUMBER),
    "reason": TEXT,
    "spread": _nullable(
        _record(
            {
                "values": _list(NUMBER),
                **dict.fromkeys(("mean", "sd", "low", "high"), NUMBER),
            }
        )
    ),
    "cost": _nullable(_MONEY),
    "runs": _list(_record({"run": TEXT, "state": _STATE})),
}
_SWEEP: Mapping[str, Schema] = {
    "sweep": TEXT,
    "state": _enum("running", "stopping", "stopped", "finished", "capped", "interrupted"),
    "reason": TEXT,
    "backend": TEXT,
    "metric": TEXT,
    "direction": _enum("minimize", "maximize"),
    "total": COUNT,
    "counts": _by_name(COUNT),
    "best": _nullable(_ref("trial")),
    "not_clearly_worse": _list(COUNT),
    "cost": _nullable(_MONEY),
    "max_cost": _nullable(TEXT),
    "folder": TEXT,
    "trials": _list(_ref("trial")),
}
_ENDPOINT: Mapping[str, Schema] = {
    **dict.fromkeys(("name", "config", "backend", "target", "account"), TEXT),
    "mode": _enum("real-time", "serverless", "asynchronous", "batch"),
    **dict.fromkeys(("run", "model", "package", "archive"), TEXT),
    "created": EPOCH,
    "activated": EPOCH,
    "phase": _enum(*(phase.value for phase in Phase)),
    "native": TEXT,
    "reason": TEXT,
    "ended": _nullable(EPOCH),
    "machines": _MACHINES,
}
_REQUESTS = _list(
    _record({"service": TEXT, "operation": TEXT, "request": OPEN}, {"when": _enum("in service")})
)
_DEFS: Mapping[str, Schema] = {
    "run": _document(_RUN),
    "trial": _record(_TRIAL),
    "spent": _record(
        {
            "amount": NUMBER,
            "currency": TEXT,
            "billed_seconds": NUMBER,
            "hourly": TEXT,
            "source": TEXT,
        }
    ),
    "files": _record({"folder": TEXT, "count": COUNT, "bytes": COUNT, "largest": _list(_FILE)}),
    "estimate": _record(_ESTIMATE),
    "progress": _record(
        {
            "step": _nullable(INTEGER),
            "total": _nullable(INTEGER),
            "epoch": _nullable(NUMBER),
            "epochs": _nullable(NUMBER),
            "loss": _nullable(VALUE),
            "steps_per_second": _nullable(NUMBER),
            "throughput": _nullable(_record({"name": TEXT, "value": VALUE})),
            "seconds_left": _nullable(NUMBER),
            "sources": _by_name(TEXT),
        }
    ),
    "problem": _record(
        {
            "path": {"type": "string", "description": "the key, such as resources.nodes"},
            "message": TEXT,
            "hint": _nullable(TEXT),
            "line": _nullable(COUNT),
            "severity": _enum("error", "warning"),
            "source": _nullable(TEXT),
            "argument": _nullable(TEXT),
            "rule": {"type": ["string", "null"], "description": "an id for `deploykit explain`"},
        }
    ),
    "log_line": _document(
        {
            "text": TEXT,
            "node": _nullable(COUNT),
            "rank": _nullable(COUNT),
            "time": _nullable(TEXT),
            "task": _nullable(COUNT),
            "bar": BOOLEAN,
        }
    ),
    "error": _document(
        {
            "error": _record(
                {
                    "message": TEXT,
                    "hint": _nullable(TEXT),
                    "exit_code": INTEGER,
                    "transient": BOOLEAN,
                    "problems": _list(_ref("problem")),
                }
            )
        }
    ),
    "plan": _document(
        {
            "run": TEXT,
            "backend": TEXT,
            "target": TEXT,
            "language": TEXT,
            "text": TEXT,
            "bundle": _record(
                {
                    "hash": TEXT,
                    "bytes": COUNT,
                    "commit": _nullable(TEXT),
                    "files": _list(TEXT),
                    "kept_back": _list(TEXT),
                }
            ),
            "data": _list(
                _record(
                    {
                        "channel": TEXT,
                        "source": TEXT,
                        "target": TEXT,
                        "bytes": COUNT,
                        "files": _list(_FILE),
                        "price": _nullable(TEXT),
                    }
                )
            ),
            "cost": _nullable(_ref("estimate")),
            "warnings": _list(_ref("problem")),
        }
    ),
}

# The verbs

_SENT = _any(_ref("run"), _ref("plan"))
"""A run, or with --dry-run its plan."""


def _advise() -> Schema:
    gpu = _document(
        {
            **dict.fromkeys(("name", "label"), TEXT),
            "memory": COUNT,
            "flops": _by_name(NUMBER),
            **dict.fromkeys(("matmul", "attention", "bandwidth", "nvlink", "pcie"), NUMBER),
            "prices": TEXT,
            "source": TEXT,
        }
    )
    seconds = ("total", "compute", "bubble", "communication", "exposed")
    candidate = {
        "strategy": TEXT,
        "fits": BOOLEAN,
        "verdict": TEXT,
        "config": OPEN,
        "bytes": _by_name(NUMBER),
        "host_bytes": NUMBER,
        "seconds": _record(dict.fromkeys(seconds, NUMBER)),
        "mfu": NUMBER,
        "sends": _by_name(NUMBER),
    }
    advice = {
        "case": TEXT,
        "best": _nullable(TEXT),
        "second": _nullable(TEXT),
        "enough_nodes": _nullable(COUNT),
        "trainer": _record({"best": _nullable(TEXT), "lacks": _list(TEXT)}),
        "why": _list(TEXT),
        "notes": _list(TEXT),
        "parameters": COUNT,
        "candidates": _list(_record(candidate)),
    }
    return _any(_document(advice), _list(gpu))


def _backends() -> Schema:
    row = {
        "name": TEXT,
        "summary": TEXT,
        "usable": BOOLEAN,
        "here": TEXT,
        "missing": _list(TEXT),
        "how": _list(TEXT),
        "offers": _list(TEXT),
    }
    profile = {"schema_version": {"const": SCHEMA_VERSION}, "profile": TEXT}
    probed = {"type": "object", "properties": profile, "required": list(profile)}
    return _any(_list(_document(row)), probed)


def _compare() -> Schema:
    values = _record({"name": TEXT, "values": _by_name(_nullable(TEXT))})
    metric = {
        "name": TEXT,
        "better": _nullable(_enum("less", "more")),
        "last": _by_name(_nullable(VALUE)),
        "best": _by_name(_nullable(VALUE)),
        "best_runs": _list(TEXT),
        "sources": _by_name(TEXT),
    }
    return _document(
        {
            "runs": _list(_record({**_RUN, "restarts": COUNT, "problems": _list(TEXT)})),
            "settings": _list(values),
            "same_settings": COUNT,
            "packages": _list(values),
            "metrics": _list(_record(metric)),
        }
    )


def _config() -> Schema:
    sources = ("flag", "job file", "environment", "config file", "default")
    setting = {"key": TEXT, "value": _nullable(TEXT), "source": _enum(*sources), "where": TEXT}
    shown = {"file": TEXT, "exists": BOOLEAN, "settings": _list(_record(setting))}
    return _any(_document(shown), _document({"path": TEXT}))


def _cost() -> Schema:
    budget = {
        **dict.fromkeys(("budget", "name", "currency"), TEXT),
        **dict.fromkeys(("spent", "reserved", "left"), NUMBER),
        **dict.fromkeys(("runs", "endpoints", "overdue"), COUNT),
    }
    one = {
        "backend": TEXT,
        **_ESTIMATE,
        "others": _by_name(_record(_CASES)),
        "max_cost": _nullable(TEXT),
        "budget": _nullable(_record(budget)),
    }
    return _any(_document(one), _document({"backends": _list(_record(one))}))


def _deploy() -> Schema:
    plan = {
        **dict.fromkeys(("name", "backend", "target", "account", "mode", "run", "archive"), TEXT),
        "machines": _MACHINES,
        "cost": _ref("estimate"),
        "until": _nullable(EPOCH),
        "requests": _REQUESTS,
    }
    here = _document({"package": TEXT, "command": _list(TEXT)})
    return _any(_document(_ENDPOINT), _document(plan), here)


def _diagnose() -> Schema:
    proof = {
        "file": TEXT,
        "line": COUNT,
        "text": TEXT,
        "rank": _nullable(COUNT),
        "at": _nullable(TEXT),
    }
    cause = {
        "cause": {"type": "string", "description": "an id for `deploykit explain`"},
        "also": _list(TEXT),
        "confidence": NUMBER,
        "evidence": _list(_record(proof)),
        "first_rank": _nullable(COUNT),
        "fix": TEXT,
    }
    return _document(
        {
            "causes": _list(_record(cause)),
            "ending": _enum(*(ending.value for ending in Ending)),
            "ended": _nullable(TEXT),
            "last": _list(TEXT),
        }
    )


def _disk() -> Schema:
    run = {
        "run": TEXT,
        "state": _STATE,
        "created": TIME,
        "bytes": COUNT,
        "parts": _by_name(COUNT),
    }
    kind = _record({"count": _nullable(COUNT), "bytes": COUNT}, {"parts": _by_name(COUNT)})
    return _document(
        {
            "folder": TEXT,
            "bytes": COUNT,
            "free": _nullable(COUNT),
            "kinds": _by_name(kind),
            "runs": _list(_record(run)),
        }
    )


def _doctor() -> Schema:
    fix = {"summary": TEXT, "cli": TEXT, "terraform": TEXT, "settings": _by_name(TEXT)}
    finding = {
        "backend": TEXT,
        "code": TEXT,
        "severity": _enum("error", "unchecked", "warning", "note"),
        "message": TEXT,
        "evidence": _list(TEXT),
        "fix": _record(fix),
    }
    return _document({"findings": _list(_record(finding))})


def _dump() -> Schema:
    called = _record({"file": TEXT, "line": COUNT, "text": TEXT})
    group = {
        "ranks": _list(COUNT),
        "function": _nullable(TEXT),
        "called_at": _nullable(called),
        "state": _nullable(TEXT),
    }
    rank = {
        "rank": COUNT,
        "host": TEXT,
        "tool": _nullable(TEXT),
        "problem": _nullable(TEXT),
        **_PROCESS,
        "children": _list(_record(_PROCESS)),
    }
    return _document(
        {
            "run": TEXT,
            "kept": BOOLEAN,
            "time": _nullable(TIME),
            "folder": TEXT,
            "summary": TEXT,
            "groups": _list(_record(group)),
            "ranks": _list(_record(rank)),
            "absent": _list(COUNT),
            "flight_recorder": _list(TEXT),
            "warnings": _list(TEXT),
        }
    )


def _endpoint() -> Schema:
    names = ("config", "model", "run", "package", "phase", "created", "activated")
    history = _record({name: _ENDPOINT[name] for name in names})
    return _any(
        _list(_document({**_ENDPOINT, "history": _list(history)})),
        _list(_document({**_ENDPOINT, "left": _list(TEXT)})),
        _document(_ENDPOINT),
        _document({"content_type": TEXT, "body": TEXT}),
        _ref("log_line"),
    )


def _exec() -> Schema:
    result = {"exit_code": INTEGER, "stdout": TEXT, "stderr": TEXT}
    return _document({"run": TEXT, "rank": COUNT, **result})


def _explain() -> Schema:
    page = _document(
        {
            "id": TEXT,
            "kind": _enum("cause", "rule", "finding", "exit code"),
            "meaning": TEXT,
            "details": _list(_record({"label": TEXT, "text": TEXT})),
        }
    )
    return _any(page, _list(page))


def _export() -> Schema:
    texts = dict.fromkeys(("run", "checkpoint", "to", "python"), TEXT)
    return _document({**texts, "files": _list(_FILE)})


def _fetch() -> Schema:
    copied = {
        "run": TEXT,
        "to": TEXT,
        "files": _list(_FILE),
        "bytes": COUNT,
        "unchanged": COUNT,
        "price": _nullable(TEXT),
    }
    here = {"run": TEXT, "on_this_machine": _by_name(TEXT)}
    return _any(_document(copied), _document(here))


def _guide() -> Schema:
    one = _document({"guide": TEXT, "markdown": TEXT})
    return _any(one, _list(_document({"name": TEXT, "symptom": TEXT})))


def _infra() -> Schema:
    files: Schema = {"files": _list(TEXT)}
    written = _document({"folder": TEXT, **files, "next": _list(TEXT)})
    return _any(written, _document({**files, "linted": BOOLEAN}))


def _init() -> Schema:
    script = {"script": TEXT, "new": _list(TEXT)}
    ranks = dict.fromkeys(("processes_per_node", "gpus_per_node"), COUNT)
    return _document({"path": TEXT}, {**script, **ranks})


def _list_verb() -> Schema:
    billed = {
        **dict.fromkeys(("name", "target", "account", "run", "native"), TEXT),
        "created": EPOCH,
        "machines": _MACHINES,
        "hourly": _nullable(TEXT),
        "currency": TEXT,
        "used": _nullable(EPOCH),
        "used_days": _nullable(COUNT),
        "until": _nullable(EPOCH),
        "until_known": BOOLEAN,
        "cost": _nullable(NUMBER),
    }
    return _any(_list(_ref("run")), _list(_document(billed)))


def _metrics() -> Schema:
    point = {
        "name": TEXT,
        "value": VALUE,
        "step": _nullable(INTEGER),
        "epoch": _nullable(NUMBER),
        "time": _nullable(EPOCH),
        "attempt": _nullable(COUNT),
        "source": TEXT,
        "rank": _nullable(COUNT),
    }
    head = {"run": TEXT, "state": _STATE, "progress": _ref("progress")}
    return _document({**head, "points": _list(_record(point))})


def _nodes() -> Schema:
    node = {
        **dict.fromkeys(("target", "node", "reason"), TEXT),
        "failed_check": BOOLEAN,
        "runs": _list(TEXT),
        "until": EPOCH,
    }
    report = _document({**node, "page": _list(TEXT)})
    return _any(_list(_document({**node, "left_out": BOOLEAN})), _list(report))


def _profile() -> Schema:
    parts = ("computing", "communicating", "waiting", "idle")
    rank = {
        "rank": COUNT,
        "file": TEXT,
        "on_gpu": BOOLEAN,
        "seconds": NUMBER,
        **{f"{part}_seconds": NUMBER for part in parts},
    }
    return _document(
        {
            "ranks": _list(_record(rank)),
            "slowest_rank": _nullable(COUNT),
            "operators": _list(_record({"name": TEXT, "calls": COUNT, "seconds": NUMBER})),
            "files": _list(_record({"file": TEXT, "how": TEXT})),
        }
    )


def _prune() -> Schema:
    removal = _record(
        {"kind": TEXT, "name": TEXT, "state": TEXT, "bytes": COUNT, "time": TIME},
    )
    return _document({"found": _list(removal), "removed": _list(removal)})


def _register() -> Schema:
    texts = ("registry", "name", "version", "approval", "address")
    version = _record({**dict.fromkeys(texts, TEXT), "is_new": BOOLEAN})
    planned = _record(
        {"registry": TEXT, "requests": _any(_list(OPEN), OPEN)},  # MLflow's by their paths
        dict.fromkeys(("tracker", "target", "package"), TEXT),
    )
    return _any(
        _document({"versions": _list(version)}),
        _document({"registries": _list(planned)}),
    )


_SAVED: Mapping[str, Schema] = {"file": TEXT, "uri": TEXT, "bytes": COUNT}


def _report() -> Schema:
    return _document({"runs": _list(TEXT), **_SAVED, "problems": _list(TEXT)})


def _rm() -> Schema:
    left = _record({"location": TEXT, "command": _nullable(TEXT)})
    run = _document({"run": TEXT, "bytes": COUNT, "left": _list(left)})
    return _list(_any(run, _document({"sweep": TEXT})))


def _shell() -> Schema:
    here = _document({"run": TEXT, "rank": COUNT, "command": _list(TEXT)})
    editor = {
        "type": "object",
        "description": "with --debugger: a VS Code configuration",
        "required": ["name", "type", "request", "connect"],
    }
    return _any(here, editor)


def _status() -> Schema:
    task = {
        "task": COUNT,
        "state": _STATE,
        "exit_code": _nullable(INTEGER),
        "reason": TEXT,
        "files": _nullable(COUNT),
    }
    return _list(_document(_RUN, {"tasks": _list(_record(task))}))


def _sweep() -> Schema:
    plan = {
        **dict.fromkeys(("sweep", "backend"), TEXT),
        **dict.fromkeys(("trials", "parallel"), COUNT),
        "cost": _nullable(OPEN),
        **dict.fromkeys(("run", "text"), TEXT),
        "warnings": _list(_ref("problem")),
    }
    going = {"trial": COUNT, "run": TEXT, "state": _STATE, "progress": _ref("progress")}
    return _any(
        _document(_SWEEP),
        _document({**_SWEEP, "going": _list(_record(going))}),
        _list(_document({**_SWEEP, "trials": COUNT})),
        _document({"sweep": TEXT, "run": _nullable(TEXT), **_TRIAL}),
        _document({"sweep": TEXT, **_SAVED}),
        _document({"sweep": TEXT, "log": TEXT}),
        _document(plan),
    )


def _notify() -> Schema:
    """A record for each receiver to which a message was sent."""
    return _list(_document({"run": TEXT, "receiver": TEXT, "error": _nullable(TEXT)}))


def _sync() -> Schema:
    sent = {"tracker": TEXT, "url": TEXT, "values": COUNT, "error": _nullable(TEXT)}
    return _document({"run": TEXT, "trackers": _list(_record(sent))})


def _watch() -> Schema:
    line = {
        **dict.fromkeys(("rank", "node", "task"), _nullable(COUNT)),
        "text": TEXT,
    }
    names = ("cpu_percent", "memory_bytes", "gpu_percent", "gpu_memory_bytes", "gpu_size_bytes")
    usage = {"rank": COUNT, "node": _nullable(COUNT), **dict.fromkeys(names, _nullable(NUMBER))}
    inside = {
        "progress": _ref("progress"),
        "loss_curve": _list(_nullable(VALUE)),
        "attempt": _nullable(COUNT),
        "restarts": _list(TEXT),
        "error": _list(_record(line)),
        "ranks": _list(_record(usage)),
        "slowest": _nullable(TEXT),
        "cause": _nullable(TEXT),
        "problems": _list(TEXT),
    }
    return _list(_document({**_RUN, **inside}))


def _when() -> Schema:
    start = {
        "where": TEXT,
        "possible": BOOLEAN,
        "start": _nullable(TIME),
        "seconds": _nullable(COUNT),
        "reason": TEXT,
        "settings": _by_name(TEXT),
        "cost": _nullable(_ref("estimate")),
    }
    one = {"backend": TEXT, "starts": _list(_record(start))}
    return _any(_document(one), _document({"backends": _list(_record(one))}))


def _run_or_runs() -> Schema:
    return _any(_ref("run"), _list(_ref("run")))


_VERBS: Mapping[str, Callable[[], Schema]] = {
    "advise": _advise,
    "attach": lambda: _ref("run"),
    "backends": _backends,
    "cancel": _run_or_runs,
    "check": lambda: _document({"backends": _list(TEXT), "warnings": _list(_ref("problem"))}),
    "compare": _compare,
    "config": _config,
    "cost": _cost,
    "deploy": _deploy,
    "diagnose": _diagnose,
    "disk": _disk,
    "doctor": _doctor,
    "dump": _dump,
    "endpoint": _endpoint,
    "evaluate": lambda: _SENT,
    "exec": _exec,
    "explain": _explain,
    "export": _export,
    "fetch": _fetch,
    "guide": _guide,
    "infra": _infra,
    "init": _init,
    "list": _list_verb,
    "logs": lambda: _ref("log_line"),
    "metrics": _metrics,
    "nodes": _nodes,
    "notify": _notify,
    "open": lambda: _list(_document({"run": TEXT, "page": TEXT, "address": TEXT})),
    "profile": _profile,
    "prune": _prune,
    "register": _register,
    "report": _report,
    "reproduce": lambda: _SENT,
    "rerun": lambda: _any(_SENT, _document(_SWEEP)),
    "rm": _rm,
    "schema": lambda: {"$ref": _DIALECT},
    "shell": _shell,
    "status": _status,
    "submit": lambda: _SENT,
    "sweep": _sweep,
    "sync": _sync,
    "wait": _run_or_runs,
    "watch": _watch,
    "when": _when,
}
VERBS = tuple(_VERBS)


def schema(verb: str) -> dict[str, Any]:
    """The schema of every document that a verb prints with `--json`, errors included."""
    printed = _printed(verb)
    head = {"$schema": _DIALECT, "title": f"deploykit {verb} --json"}
    return {**head, **printed, "$defs": dict(sorted(_used(printed).items()))}


def every() -> dict[str, Any]:
    """One schema with a definition for each verb."""
    verbs = {verb: _printed(verb) for verb in _VERBS}
    return {"$schema": _DIALECT, "title": "deploykit --json", "$defs": {**_DEFS, **verbs}}


def _printed(verb: str) -> Schema:
    return _any(_VERBS[verb](), _ref("error"))


def _used(part: Schema) -> dict[str, Schema]:
    """The definitions that a schema refers to, and those that they do."""
    used: dict[str, Schema] = {}
    todo = list(_names(part))
    while todo:
        name = todo.pop()
        if name not in used:
            used[name] = _DEFS[name]
            todo += _names(_DEFS[name])
    return used


def _names(part: Schema) -> Iterator[str]:
    yield from re.findall(r'"#/\$defs/(\w+)"', json.dumps(part))
