"""LoRA (peft) on a Llama that answers generated instructions: only the adapters are trained.

    train.py --task fine_tuning:task --task-option base=FOLDER --strategy fsdp ...

`base` is a folder that `save_pretrained` wrote; without it, the model has fresh weights. Prompts do
not count in the loss, and batches are padded.
"""

import random

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence
from trainer.task import IGNORE_INDEX, Task
from transformers import AutoModelForCausalLM, LlamaConfig

LONGEST, END = 48, 0
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    vocab_size=256, tie_word_embeddings=False,
)  # fmt: skip


def instructions(count, seed):
    """Prompts with their answers, such as "Add 12 and 30." and "42", as tokens and targets."""
    chosen = random.Random(seed)  # noqa: S311 - no secrets
    for _ in range(count):
        one, two = chosen.randrange(100), chosen.randrange(100)
        prompt, answer = chosen.choice(
            [
                (f"Add {one} and {two}.", one + two),
                (f"Which is larger, {one} or {two}?", max(one, two)),
                (f"Write {one} twice.", f"{one} {one}"),
            ]
        )
        asked, answered = list(f"{prompt} ".encode()), [*str(answer).encode(), END]
        tokens, targets = asked + answered, [IGNORE_INDEX] * len(asked) + answered
        yield torch.tensor(tokens[:-1]), torch.tensor(targets[1:])


def collate(samples):
    """Tokens and targets (samples, LONGEST), padded behind the end, where no target counts."""
    tokens, targets = zip(*samples, strict=True)
    tokens = pad_sequence([torch.zeros(LONGEST, dtype=torch.long), *tokens], True, END)[1:]
    targets = pad_sequence([tokens[0], *targets], True, IGNORE_INDEX)[1:]
    return {"input_ids": tokens, "labels": targets}


def tensor_parallel(_model):
    """Llama's own plan, for the layers inside the adapters too: of B's outputs, or A's inputs."""
    layers = "base_model.model.model.layers.*.*"
    columns = [f"{layers}.{name}.{part}" for name in COLUMNS for part in ("base_layer", "lora_B.*")]
    rows = [f"{layers}.{name}.{part}" for name in ROWS for part in ("base_layer", "lora_A.*")]
    return dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())


def task(options):
    base = options.task_options.get("base")
    lora = LoraConfig(r=8, target_modules=[*COLUMNS, *ROWS], lora_dropout=0.0)

    def build():
        load = AutoModelForCausalLM.from_pretrained if base else AutoModelForCausalLM.from_config
        return get_peft_model(load(base or TINY), lora)

    return Task(
        build,
        training=list(instructions(4096, seed=0)),
        validation=list(instructions(256, seed=1)),
        collate=collate,
        tensor_parallel=tensor_parallel,
        unit="tokens",
    )
