"""Answers to vary."""

from __future__ import annotations

import pytest
import yaml

from tests.doctor.infra.infra_answers import GIVEN


@pytest.fixture
def answers(tmp_path):
    """Write the repository's own answers with some changed (``cluster.efa``); the file's path."""

    def write(changes=()):
        tree = yaml.safe_load(GIVEN.read_text())
        for key, value in dict(changes).items():
            *parents, last = key.split(".")
            place = tree
            for name in parents:
                place = place[name]
            place[last] = value
        path = tmp_path / "answers.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write
