"""The variables of this machine that sbatch must not see."""

from __future__ import annotations

import os
from collections.abc import Iterable

_SITE_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint")
"""Options for which a variable such as ``SBATCH_ACCOUNT`` counts, unless the script sets them."""

_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "DEPLOYKIT_HOME"}
_LAUNCHERS = ("SLURM", "SBATCH_", "SRUN_", "DEPLOYKIT_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


def clean(text: str) -> list[str]:
    """The words before sbatch that unset the `unwanted` variables, for the script `text`."""
    return ["env", *(word for name in unwanted(os.environ, text) for word in ("-u", name))]


def unwanted(environ: Iterable[str], text: str) -> list[str]:
    """Names of variables that sbatch would pass on to the job, or prefer to the script's options.

    A submit from inside another job, or from one of its ranks, inherits many.
    """
    kept = _KEPT.union(site_variables(text))
    return sorted(
        name
        for name in environ
        if (name.startswith(_LAUNCHERS) or name in _RANKS) and name not in kept
    )


def site_variables(text: str) -> list[str]:
    """The variables that set what the script `text` leaves to the site's defaults."""
    left = (name for name in _SITE_DEFAULTS if f"#SBATCH --{name}=" not in text)
    return [f"SBATCH_{name.upper()}" for name in left]
