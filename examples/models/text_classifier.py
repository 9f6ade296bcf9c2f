"""BERT, built from its configuration, separates code from prose in Python's help topics.

    train.py --task text_classifier:task --strategy fsdp-tp --tensor-parallel 2 ...

Lines differ in length, so each batch is padded to its longest line, and a mask marks the padding.
Pipeline stages exchange hidden states of a fixed shape, so a pipeline pads all batches alike.
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence
from trainer.task import Task
from transformers import BertConfig, BertForSequenceClassification

LONGEST, PADDING = 64, 0


def samples():
    """Each line without its indentation, as bytes, and whether it was indented like code."""
    for name in sorted(topics):
        for line in topics[name].splitlines():
            if text := line.strip().encode()[:LONGEST]:
                indented = line.startswith("    ")
                yield {"input_ids": torch.tensor(list(text)), "labels": int(indented)}


def collate(lines, length=0):
    """Lines as a batch (samples, longest line), or of a fixed length."""
    ids = pad_sequence([line["input_ids"] for line in lines], batch_first=True)
    ids = torch.nn.functional.pad(ids, (0, max(0, length - ids.shape[1])), value=PADDING)
    labels = torch.tensor([line["labels"] for line in lines])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def tensor_parallel(_model):
    """The plan: heads of attention and rows of the MLP are divided over the ranks."""
    layer = "bert.encoder.layer.*"
    return {
        f"{layer}.attention.self.query": ColwiseParallel(),
        f"{layer}.attention.self.key": ColwiseParallel(),
        f"{layer}.attention.self.value": ColwiseParallel(),
        f"{layer}.attention.output.dense": RowwiseParallel(),
        f"{layer}.intermediate.dense": ColwiseParallel(),
        f"{layer}.output.dense": RowwiseParallel(),
    }


def task(options):
    dropout = float(options.task_options.get("dropout", 0.1))
    config = BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        vocab_size=256, max_position_embeddings=LONGEST, pad_token_id=PADDING,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip

    def build():
        return BertForSequenceClassification(config)

    with torch.device("meta"):
        init = build()._init_weights

    lines = list(samples())[:4096]
    return Task(
        build,
        training=lines[:3584],
        validation=lines[3584:],
        collate=partial(collate, length=LONGEST) if "pp" in options.strategy else collate,
        tensor_parallel=tensor_parallel,
        init=init,
    )
