"""fastai, tabular: scikit-learn's breast cancer data, with `tabular_learner`."""

import gc

import torch
from fastai.distributed import DistributedDL, rank_distrib
from fastai.tabular.all import *  # fastai's own custom; it adds methods to its classes
from sklearn.datasets import load_breast_cancer
from torch import distributed

if not torch.cuda.is_available():

    @patch
    def _broadcast(_: DistributedDL, values, source):
        """As fastai 2.8's own, which calls `.cuda()` on every machine."""
        values = torch.tensor(values)
        distributed.broadcast(values, source)
        return values.tolist()


def data():
    """569 patients, 30 numbers each; every fifth is for validation."""
    cancer = load_breast_cancer(as_frame=True)
    return TabularDataLoaders.from_df(
        cancer.frame,
        procs=[Normalize],
        cont_names=list(cancer.feature_names),
        y_names="target",
        y_block=CategoryBlock(),
        valid_idx=list(range(0, len(cancer.frame), 5)),
        bs=16,
    )


def main():
    set_seed(0)
    learner = tabular_learner(data(), layers=[64, 32], metrics=accuracy)
    # batch norm over all ranks exists for GPUs only, and progress bars make a mess of log files
    gpu = torch.cuda.is_available()
    with learner.no_bar(), learner.distrib_ctx(cpu=not gpu, sync_bn=gpu):
        learner.fit_one_cycle(5, 1e-2)
    if rank_distrib() == 0:
        print(f"final accuracy {learner.recorder.values[-1][-1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
