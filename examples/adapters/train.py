"""TRL and PEFT: fine-tune a small Llama with adapters, and save the merged model."""

import argparse
import gc
import os

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import distributed
from trl import SFTConfig, SFTTrainer
from words import examples, load


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-from", default=os.environ.get("DEPLOYKIT_DATA_INIT_FROM"))
    parser.add_argument("--output", default=os.environ.get("DEPLOYKIT_OUTPUT_DIR", "output"))
    parser.add_argument("--epochs", type=int, help="default: 150, or 30 for a trained model")
    parser.add_argument("--lr", type=float, default=3e-3)
    given = parser.parse_args()
    given.epochs = given.epochs or (30 if given.init_from else 150)
    return given


def main():
    given = arguments()
    model, words = load(given.init_from)
    settings = SFTConfig(
        output_dir=given.output,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=16,
        learning_rate=given.lr,
        max_length=64,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),  # makes the backend gloo, too
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        disable_tqdm=True,  # its carriage returns make a mess of log files
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    adapters = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        # in a new model these are random, and must be trained whole
        modules_to_save=None if given.init_from else ["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(examples()),
        processing_class=words,
        peft_config=adapters,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        trained.save_pretrained(f"{given.output}/adapter")  # alone; needs the model it started from
        folder = f"{given.output}/model"  # what `deploykit export`, `deploy` and --init-from find
        trained.merge_and_unload().save_pretrained(folder)
        words.save_pretrained(folder)
        print(f"saved {folder}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
