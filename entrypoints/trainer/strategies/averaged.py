"""What every data-parallel strategy shares: own samples on each rank, gradients averaged."""

from __future__ import annotations

import argparse

from trainer.data import Share
from trainer.group import Place
from trainer.strategies.single import Single


class Averaged(Single):
    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        super().__init__(options, place)
        self.share = Share(place.rank, place.world)
        self.averaged = place.world

    def check(self) -> None:
        """It can do whatever one process can."""
