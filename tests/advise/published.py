"""Published runs beside what `advise` computes for them.

`python -m tests.advise.published` prints the table of figures.md.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from pathlib import Path

from deploykit.advise import Cluster, Training, gpt, gpt_of_size, gpus
from deploykit.advise.memory import memory
from deploykit.advise.models import Layer, Model, Tensor
from deploykit.advise.speed import step
from deploykit.advise.strategies import FULLY_SHARDED, ParallelConfig

RUNS = tomllib.loads((Path(__file__).parent / "published_runs.toml").read_text(encoding="utf-8"))
ROWS = [group | run for group in RUNS["group"] for run in group["runs"]]
LIMITS = {"tokens/s": 0.20, "memory": 0.15, "states": 0.15}
"""How far an estimate may be off, as a share of the published figure."""
_GIB = 1024**3
_NODE = 8
_GIGABIT = 10**9 / 8


def llama(*, layers, width, heads, kv_heads, feedforward, vocabulary):
    """A Llama 2 or 3: RMSNorm, keys and values for fewer heads, a gated MLP, no biases
    (https://arxiv.org/abs/2407.21783, section 3.2).
    """
    narrow = width * kv_heads // heads
    block = (
        Tensor("norm1.weight", (width,)),
        Tensor("query.weight", (width, width), "column"),
        Tensor("key.weight", (narrow, width), "column"),
        Tensor("value.weight", (narrow, width), "column"),
        Tensor("out.weight", (width, width), "row"),
        Tensor("norm2.weight", (width,)),
        Tensor("gate.weight", (feedforward, width), "column"),
        Tensor("up.weight", (feedforward, width), "column"),
        Tensor("down.weight", (width, feedforward), "row"),
    )
    head = (Tensor("norm.weight", (width,)), Tensor("out.weight", (vocabulary, width), "column"))
    return Model(
        Layer("embedding", (Tensor("token.weight", (vocabulary, width), "column"),)),
        Layer("block", block),
        layers,
        Layer("head", head),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        feedforward=feedforward,
        kv_heads=kv_heads,
        gated=True,
    )


def mpt(*, layers, width, heads, vocabulary):
    """MosaicML's MPT: a GPT without biases, its head tied to its embedding."""
    plain = gpt(layers=layers, width=width, heads=heads, vocabulary=vocabulary, positions=2048)
    head = Layer("head", tuple(t for t in plain.head.tensors if t.name != "out.weight"))
    return dataclasses.replace(plain, head=head, tied=True)


def megatron(**sizes):
    """NVIDIA's GPT of 2021, with attention in separate steps."""
    return dataclasses.replace(mpt(**sizes), flash=False)


def of_size(*, parameters):
    return gpt_of_size(int(parameters), vocabulary=50_304, positions=1024)


KINDS = {"llama": llama, "mpt": mpt, "megatron": megatron, "size": of_size}


def model(name):
    sizes = dict(RUNS["models"][name])
    return KINDS[sizes.pop("kind")](**sizes)


def machine(name, world):
    """The cluster. Below its full power a GPU runs slower by the cube root: power is proportional
    to frequency times voltage squared, and voltage to frequency.
    """
    said = RUNS["machines"][name]
    gpu = gpus.find(said["gpu"])
    slower = said.get("power", 1) ** (1 / 3)
    gpu = dataclasses.replace(
        gpu,
        memory=int(said["memory"] * _GIB) if "memory" in said else gpu.memory,
        bandwidth=said.get("bandwidth", gpu.bandwidth / 10**9) * 10**9,
        flops={kind: rate * slower for kind, rate in gpu.flops.items()},
    )
    network = said["network"] * _GIGABIT
    return Cluster(gpu, _NODE, world // _NODE, gpu.link, "infiniband", network)


@functools.cache
def compared():
    """For each run its (name of a figure, computed, published)."""
    return {run["name"]: tuple(_compare(run)) for run in ROWS}


def _compare(run):
    shape, cluster = model(run["model"]), machine(run["machine"], run["world"])
    training = Training(
        run["batch"],
        run["sequence"],
        precision=run.get("precision", "bf16"),
        compiled=run.get("compiled", False),
    )
    config = _config(run)
    if "tokens" in run or "tflops" in run:
        seconds = step(shape, training, cluster, config).seconds
        yield "tokens/s", training.tokens / seconds / run["world"], _tokens(run, shape)
    need = memory(shape, training, config, cluster.gpu.memory)
    if "memory" in run:
        yield "memory", need.total / _GIB, run["memory"]
    if "states" in run:
        states = need.parameters + need.gradients + need.optimizer
        gathered = dict(need.buffers).get("gathered weights", 0) * (config.strategy == "zero2")
        yield "states", (states + gathered) / _GIB, run["states"]


def _tokens(run, shape):
    """Tokens/s of one GPU. Equation 3 of the paper: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    if "tokens" in run:
        return run["tokens"]
    layers, width, length = shape.layers, shape.width, run["sequence"]
    more = 1 + length / (6 * width) + shape.vocabulary / (16 * layers * width)
    return run["tflops"] * 10**12 / (96 * layers * width**2 * more)


def _config(run):
    layout = dict(run["layout"])
    data = run["world"] // (layout.get("tensor", 1) * layout.get("pipeline", 1))
    strategy = layout["strategy"]
    shards = _NODE if strategy == "hsdp" else data if strategy in FULLY_SHARDED else 1
    return ParallelConfig(**layout, data=data, shards=shards)


def off(name):
    """Whether a figure of the run is further from the published one than it may be."""
    return any(abs(guess / said - 1) > LIMITS[kind] for kind, guess, said in compared()[name])


def rows():
    """The table of figures.md."""
    yield "| run | source | figure | computed | published | difference |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for run in ROWS:
        for kind, guess, said in compared()[run["name"]]:
            figures = f"{guess:,.4g} | {said:,.4g} | {guess / said - 1:+.0%}"
            held = " (held out)" if run.get("held_out") else ""
            yield f"| {run['name']}{held} | {run['source']} | {kind} | {figures} |"


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)  # noqa: T201 - a table to paste
