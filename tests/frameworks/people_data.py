"""Small data for the scripts of people.toml, in the formats that they read: KIND FOLDER.

Runs with the Python of .venv-frameworks.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import struct
import sys
from pathlib import Path


def text(folder: Path) -> None:
    """Python's manual, a tokenizer of bytes, and a tiny model that has learned nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    topics = sorted(pydoc_data.topics.topics.items())
    (folder / "text").mkdir()
    (folder / "text/train.txt").write_text("\n".join(page for _, page in topics[:6]))
    (folder / "text/valid.txt").write_text("\n".join(page for _, page in topics[6:8]))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: at for at, letter in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder / "tokenizer")
    end = fast.eos_token_id
    shape = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=300, bos_token_id=end, eos_token_id=end
    )
    GPT2LMHeadModel(shape).save_pretrained(folder / "tiny")
    fast.save_pretrained(folder / "tiny")


def wikitext(folder: Path) -> None:
    """The file of Lightning's demo, where it looks for it before it downloads one."""
    chosen = random.Random(0)
    words = [chosen.choice("abcdefgh") for _ in range(35 * 4100)]
    (folder / "data").mkdir()
    (folder / "data/wikitext-2.txt").write_text(" ".join(words))


def images(folder: Path) -> None:
    """Two classes of images in folders, as ImageNet is kept."""
    from PIL import Image

    for part, count in (("train", 8), ("val", 8)):
        for name, color in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
            place = folder / "images" / part / name
            place.mkdir(parents=True)
            for at in range(count):
                Image.new("RGB", (256, 256), color).save(place / f"{at}.png")


def mnist(folder: Path) -> None:
    """MNIST's four files, with few images."""
    chosen = random.Random(0)
    raw = folder / "mnist/MNIST/raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 80), ("t10k", 20)):
        pixels = chosen.randbytes(count * 28 * 28)
        labels = bytes(chosen.randrange(10) for _ in range(count))
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)


if __name__ == "__main__":
    {"text": text, "wikitext": wikitext, "images": images, "mnist": mnist}[sys.argv[1]](
        Path(sys.argv[2])
    )
