"""What a verb prints with `--json` conforms to the schema that `deploykit schema VERB` prints.

The fixture in conftest.py checks each document that a test makes in its own process.
"""

from __future__ import annotations

import functools
import json

import jsonschema

from deploykit.cli import main, output, schemas

_MOST = 100
"""Items of an array, and lines of a log, that are checked."""


@functools.cache
def _validator(verb):
    # an error of a command line that names no verb still has the form of all errors
    schema = schemas.schema(verb if verb in schemas.VERBS else "check")
    return jsonschema.Draft202012Validator(schema)


def problems(verb, document):
    """What a document has that its schema does not allow, a line each."""
    errors = _validator(verb).iter_errors(_sample(document))
    return [f"deploykit {verb} --json: {_deepest(error)}" for error in errors]


def _deepest(error):
    """The most specific error: of `anyOf`, that of the form which fits best."""
    while error.context:
        error = max(error.context, key=lambda one: len(one.absolute_path))
    where = ".".join(map(str, error.absolute_path)) or "the document"
    return f"{where}: {error.message[:500]}"


def _sample(document):
    """The document with long arrays cut to their ends, and all else in it."""
    if isinstance(document, dict):
        return {key: _sample(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        if len(document) > _MOST:
            document = [*document[: _MOST // 2], *document[-_MOST // 2 :]]
        return [_sample(value) for value in document]
    return document


def check_all(monkeypatch):
    """Check each document that a verb prints from here on; returns the problems so far."""
    problems_found, verbs, documents = [], [], []
    run, write = main._run, output._json

    def run_verb(argv):
        verbs.append(next(iter(argv), ""))
        documents.clear()
        try:
            return run(argv)
        finally:
            verbs.pop()

    def write_document(data, indent=None):
        documents.append(indent)
        if verbs and len(documents) <= _MOST:
            as_read = json.loads(json.dumps(_sample(data), default=str))
            problems_found.extend(problems(verbs[-1], as_read))
        write(data, indent)

    monkeypatch.setattr(main, "_run", run_verb)
    monkeypatch.setattr(output, "_json", write_document)
    return problems_found
