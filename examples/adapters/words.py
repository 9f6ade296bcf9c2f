"""What train.py and evaluate.py share: the model to start from, and the sums that it learns."""

import json
import os
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PROMPT = "{} plus {} is"


def tokenizer():
    """One token for each byte, and one for the end. Yours: AutoTokenizer.from_pretrained(NAME)."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def network(end):
    """A tiny Llama. Yours: AutoModelForCausalLM.from_pretrained(NAME)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    # saved with the model: without it, the server's pipeline would sample, at a temperature of 0.7
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=4, eos_token_id=end, pad_token_id=end
    )
    return model


def load(folder):
    """Model and tokenizer of a folder of `save_pretrained`; new ones without a folder."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    words = tokenizer()
    return network(words.eos_token_id), words


def sums(split):
    """Sums of two digits: 80 to train on, and 20 that no training sees."""
    pairs = [(one, other) for one in range(10) for other in range(10)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:80] if split == "train" else pairs[80:]
    return [
        {"prompt": PROMPT.format(one, other), "completion": f" {one + other}"}
        for one, other in chosen
    ]


def answers():
    """Collected answers: one JSON object a line, as collect.py writes them."""
    path = os.environ.get("DEPLOYKIT_DATA_ANSWERS")
    if not path:
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def examples():
    """The training split, with the collected answers repeated until they are a quarter of it all.

    Trained on the answers alone, a model forgets most of what it knew.
    """
    collected = answers()
    corrected = {example["prompt"] for example in collected}
    known = [example for example in sums("train") if example["prompt"] not in corrected]
    repeats = max(1, len(known) // (3 * len(collected))) if collected else 0
    return known + collected * repeats
