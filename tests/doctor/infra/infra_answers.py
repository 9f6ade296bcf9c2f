"""The repository's own answers."""

from pathlib import Path

GIVEN = Path(__file__).parents[3] / "infra/aws/infra.yaml"
