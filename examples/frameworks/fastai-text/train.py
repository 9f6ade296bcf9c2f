"""fastai, text: passages of Python's manual by chapter, with `text_classifier_learner`."""

import gc
from pydoc_data.topics import topics

import torch
from fastai.distributed import DistributedDL, rank_distrib
from fastai.text.all import *  # fastai's own custom; it adds methods to its classes
from torch import distributed

CHAPTERS = ("compound", "debugger", "formatstrings", "string-methods")
WORDS = 25

if not torch.cuda.is_available():

    @patch
    def _broadcast(_: DistributedDL, values, source):
        """As fastai 2.8's own, which calls `.cuda()` on every machine."""
        values = torch.tensor(values)
        distributed.broadcast(values, source)
        return values.tolist()


def data():
    """Passages of 25 words; every fifth is for validation."""
    passages = [
        {"text": " ".join(words[start : start + WORDS]), "label": chapter}
        for chapter in CHAPTERS
        for words in [topics[chapter].split()]
        for start in range(0, len(words) - WORDS, WORDS)
    ]
    frame = pd.DataFrame(passages)
    frame["is_valid"] = frame.index % 5 == 0
    return TextDataLoaders.from_df(
        frame,
        valid_col="is_valid",
        bs=16,
    )


def main():
    set_seed(0)
    small = {**awd_lstm_clas_config, "emb_sz": 64, "n_hid": 96, "n_layers": 1}
    learner = text_classifier_learner(
        data(), AWD_LSTM, config=small, pretrained=False, drop_mult=0.3, metrics=accuracy
    )
    # batch norm over all ranks exists for GPUs only, and progress bars make a mess of log files
    gpu = torch.cuda.is_available()
    with learner.no_bar(), learner.distrib_ctx(cpu=not gpu, sync_bn=gpu):
        learner.fit_one_cycle(5, 2e-2)
    if rank_distrib() == 0:
        print(f"final accuracy {learner.recorder.values[-1][-1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
