"""Which parallel strategy to train with: memory and time of each, computed before anything runs.

`advise(model, training, cluster)` returns data; ``deploykit advise`` prints it.
"""

from deploykit.advise import gpus
from deploykit.advise.chooser import Advice, Candidate, advise
from deploykit.advise.gpus import Gpu
from deploykit.advise.models import Model, gpt, gpt_of_size
from deploykit.advise.strategies import Cluster, ParallelConfig, Training

__all__ = [
    "Advice",
    "Candidate",
    "Cluster",
    "Gpu",
    "Model",
    "ParallelConfig",
    "Training",
    "advise",
    "gpt",
    "gpt_of_size",
    "gpus",
]
