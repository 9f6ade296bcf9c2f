"""Which parallel strategy to train with: what each needs and takes, computed before anything runs.

`advise(model, training, cluster)` answers as data; ``deploykit advise`` prints it.
"""

from deploykit.advise import gpus
from deploykit.advise.chooser import Advice, Candidate, advise
from deploykit.advise.gpus import Gpu
from deploykit.advise.plan import Cluster, Layout, Training
from deploykit.advise.shape import Model, gpt, guessed

__all__ = [
    "Advice",
    "Candidate",
    "Cluster",
    "Gpu",
    "Layout",
    "Model",
    "Training",
    "advise",
    "gpt",
    "gpus",
    "guessed",
]
