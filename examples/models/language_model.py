"""A Hugging Face language model, built from its configuration, on bytes of Python's help topics.

    train.py --task language_model:task --task-option family=llama --strategy pp-tp ...

Llama trains with any strategy: transformers provides its tensor-parallel plan, a pipeline splits it
between its blocks, and each rank creates its own shard of the weights. GPT-2 has no such plan.
"""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from trainer.task import Task
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

SEQUENCE = 64
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
FAMILIES = {
    "gpt2": lambda: GPT2Config(
        n_embd=64, n_layer=4, n_head=4, n_positions=SEQUENCE, vocab_size=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    ),
    "llama": lambda: LlamaConfig(intermediate_size=128, tie_word_embeddings=False, **SIZES),
}  # fmt: skip


class Windows(Dataset):
    """Windows of bytes; each byte is the target of those before it."""

    def __init__(self, first, last):
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.bytes = torch.tensor(list(text[first:last]))

    def __len__(self):
        return (len(self.bytes) - 1) // SEQUENCE

    def __getitem__(self, number):
        window = self.bytes[number * SEQUENCE : (number + 1) * SEQUENCE + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def task(options):
    config = FAMILIES[options.task_options.get("family", "llama")]()

    def build():
        return AutoModelForCausalLM.from_config(config)

    with torch.device("meta"):
        init = build()._init_weights

    return Task(build, Windows(0, 200_000), Windows(200_000, 220_000), init=init, unit="bytes")
