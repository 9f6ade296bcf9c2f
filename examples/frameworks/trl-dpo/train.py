"""TRL, preference optimization (DPO): each prompt has a preferred and a rejected answer."""

import copy
import gc

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


def tokenizer():
    """One token for each byte, and one for the end. Yours: AutoTokenizer.from_pretrained(NAME)."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def network(end):
    """A tiny GPT-2. Yours: AutoModelForCausalLM.from_pretrained(NAME)."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257,
        n_positions=64,
        n_embd=48,
        n_layer=1,
        n_head=4,
        bos_token_id=end,
        eos_token_id=end,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def preferences():
    """200 questions; the short answer is preferred. Every fifth is for evaluation."""
    items = [
        {
            "prompt": f"Is {number} even?",
            "chosen": " yes" if number % 2 == 0 else " no",
            "rejected": " that depends on what you mean",
        }
        for number in range(200)
    ]
    test = items[::5]
    del items[::5]
    return Dataset.from_list(items), Dataset.from_list(test)


def main():
    words = tokenizer()
    model = network(words.eos_token_id)
    arguments = DPOConfig(
        output_dir="output",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
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
    training, test = preferences()
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),  # the weights from which the model may not stray far
        args=arguments,
        train_dataset=training,
        eval_dataset=test,
        processing_class=words,
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    if trainer.is_world_process_zero():
        print(f"final accuracy {accuracy:.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
