"""Evaluate a trained model on the test split, and on collected answers; writes evaluation.json."""

import json
import math
import os

import torch
from words import answers, load, sums


def judged(model, words, example):
    """An answer as the server gives it, the expected one, and the loss of its tokens."""
    prompt = words(example["prompt"], return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    expected = words(example["completion"])["input_ids"] + [words.eos_token_id]
    tokens = torch.cat([prompt["input_ids"], torch.tensor([expected])], dim=1)
    labels = tokens.clone()
    labels[:, :length] = -100
    drawn = model.generate(**prompt)  # decoded as generation_config.json says
    return {
        "prompt": example["prompt"],
        "predicted": words.decode(drawn[0, length:], skip_special_tokens=True).strip(),
        "expected": example["completion"].strip(),
        "loss": model(tokens, labels=labels).loss.item(),
        "tokens": len(expected),
    }


def accuracy(rows):
    return sum(row["predicted"] == row["expected"] for row in rows) / len(rows)


def main():
    # several ranks would each do all of it
    if os.environ.get("RANK", "0") != "0":
        return
    model, words = load(os.environ["DEPLOYKIT_DATA_EVALUATED"])
    collected = answers()
    trained = {example["prompt"] for example in collected}  # and thus no test
    test = [example for example in sums("test") if example["prompt"] not in trained]
    with torch.no_grad():
        rows = [judged(model.eval(), words, example) for example in test]
        corrected = [judged(model, words, example) for example in collected]
    tokens = sum(row["tokens"] for row in rows)
    loss = sum(row["loss"] * row["tokens"] for row in rows) / tokens
    order = sorted(range(len(rows)), key=lambda at: -rows[at]["loss"])
    shown = ("prompt", "predicted", "expected", "loss")
    result = {
        "evaluated": len(rows),
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": accuracy(rows),
        "worst": [{"index": at, **{key: rows[at][key] for key in shown}} for at in order[:10]],
    }
    if corrected:
        result["answers_accuracy"] = accuracy(corrected)
    with open(os.path.join(os.environ["DEPLOYKIT_OUTPUT_DIR"], "evaluation.json"), "w") as file:
        json.dump(result, file, indent=1)
    print(", ".join(f"{name} {result[name]:.4g}" for name in result if name != "worst"), flush=True)


if __name__ == "__main__":
    main()
