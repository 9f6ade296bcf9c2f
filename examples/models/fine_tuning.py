"""LoRA (peft) on a Llama that answers generated instructions. Only the adapters are trained.

    train.py --task fine_tuning:task --init-from FOLDER --strategy fsdp ...

FOLDER is a model saved by `save_pretrained`. Without it, the model is a tiny one with new weights.
Each rank reads only its own shard. Prompts are excluded from the loss, and batches are padded.
"""

import random

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence
from trainer.task import IGNORE_INDEX, Task
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

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


def pretrained_name(name):
    """Where a weight is in FOLDER: peft renames those of the model, and adds the adapters."""
    if ".lora_" in name:
        return None
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def task(options):
    config = AutoConfig.from_pretrained(options.init_from) if options.init_from else TINY
    lora = LoraConfig(r=8, target_modules=[*COLUMNS, *ROWS], lora_dropout=0.0)

    def build():
        model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
        for name, module in model.named_modules():
            module.adapter = name.partition(".lora_")[2][:1]  # A, B, or none
        return model

    with torch.device("meta"):
        init_llama = build().base_model.model._init_weights

    def init(module):
        if module.adapter == "B":  # so the adapters change nothing at first
            torch.nn.init.zeros_(module.weight)
        elif module.adapter == "A":
            module.reset_parameters()
        else:
            init_llama(module)

    return Task(
        build,
        init=init,
        pretrained_name=pretrained_name,
        training=list(instructions(4096, seed=0)),
        validation=list(instructions(256, seed=1)),
        collate=collate,
        tensor_parallel=tensor_parallel,
        unit="tokens",
    )
