"""Answers to vary."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

GIVEN = Path(__file__).parents[3] / "infra/aws/infra.yaml"


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
