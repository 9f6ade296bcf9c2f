"""The repository's own answers."""

from pathlib import Path

GIVEN = Path(__file__).parents[2] / "infra/aws/infra.yaml"
