"""Hugging Face Trainer: a small GPT-2 from a config, trained byte by byte on Python's manual."""

import gc
import math
from pydoc_data.topics import topics

import torch
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 32


def pieces():
    """Training and test pieces of `LENGTH` bytes, as the Trainer wants them; one in ten is test."""
    text = "".join(topics[name] for name in sorted(topics)).encode()[:150_000]
    whole = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    items = [{"input_ids": piece, "labels": piece} for piece in whole]
    test = items[::10]
    del items[::10]
    return items, test


def main():
    arguments = TrainingArguments(
        output_dir="output",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=5e-3,
        warmup_steps=30,
        use_cpu=not torch.cuda.is_available(),  # makes the backend gloo, too
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        disable_tqdm=True,  # its carriage returns make a mess of log files
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=48,
        n_layer=1,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    training, test = pieces()
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=training, eval_dataset=test
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"final perplexity {math.exp(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
