"""The options of ``deploykit advise``: decoded and checked, with every problem at once."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from deploykit.advise import gpus, strategies
from deploykit.advise.models import Model, counted, gpt, gpt_of_size
from deploykit.advise.strategies import Cluster, Training
from deploykit.job.decode import Bounds, Help, Pattern, Plain, Quantity, Size, decode
from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import units
from deploykit.lib.errors import UsageError

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:[._]\d+)*)([KMBT]?)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT])(b|B)(?:/s|ps)", re.IGNORECASE)
_POWERS = {"M": 10**6, "G": 10**9, "T": 10**12}
_SAMPLES_PER_GPU = 8
"""In a step, unless --batch-size is given."""
_SEQUENCE = 2048
"""Tokens of a sample, unless --sequence or the model gives it."""
_BYTE_VOCABULARY = 256
"""Vocabulary of the reference trainer, which reads bytes."""
_DEFAULT_VOCABULARY = 32_000
"""Vocabulary of a model given only by its size."""


def _count(text: str) -> int:
    """Parse ``7B``, ``1.3B``, ``350M`` or plain digits."""
    match = _COUNT.fullmatch(text.replace(",", "").replace(" ", ""))
    if match is None:
        raise ValueError(text)
    return round(float(match[1].replace("_", "")) * _SCALES[match[2].upper()])


def _rate(text: str) -> int:
    """Parse ``25Gb/s``, ``25Gbps`` (bits) or ``3.1GB/s`` (bytes) into bytes per second."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    bits = 8 if match[3] == "b" else 1
    return round(float(match[1]) * _POWERS[match[2].upper()] / bits)


COUNT = Quantity("a number such as 7B, 350M or 124439808", _COUNT.pattern, _count)
RATE = Quantity("a speed such as 25Gb/s (bits) or 12GB/s (bytes)", _RATE.pattern, _rate)
_FUNCTION = Pattern(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function")
_MODEL = Pattern(
    r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[\w./~-]*[\w-]",
    "module:function, or a Hugging Face model such as Qwen/Qwen3-8B",
)
_POSITIVE = Bounds(1, 1_000_000)


@dataclass(frozen=True)
class AdviseOptions:
    """Options of ``deploykit advise``; the field ``batch_size`` is ``--batch-size``."""

    gpu: Annotated[str | None, Help("GPU type, or cpu; --list shows known types.")] = None
    batch_size: Annotated[
        int | None, Help("Samples per step, over all ranks. Default: 8 per GPU."), _POSITIVE
    ] = None
    sequence: Annotated[int | None, Help("Tokens per sample. Default: 2048."), _POSITIVE] = None
    parameters: Annotated[
        int | None,
        COUNT,
        Help("Number of parameters, such as 7B; the model's shape is derived unless set."),
        Bounds(1_000, 10**14),
    ] = None
    layers: Annotated[int | None, Help("Number of transformer blocks."), Bounds(1, 10_000)] = None
    width: Annotated[int | None, Help("Width (hidden size) of the model."), _POSITIVE] = None
    heads: Annotated[int | None, Help("Attention heads per block."), Bounds(1, 10_000)] = None
    vocabulary: Annotated[
        int | None,
        Help("Size of the vocabulary. Default: 256, or 32000 with --parameters."),
        Bounds(2, 10_000_000),
    ] = None
    model: Annotated[
        str | None,
        Help(
            "module:function that builds a model, or a Hugging Face model such as Qwen/Qwen3-8B; "
            "the model is built on the meta device."
        ),
        _MODEL,
    ] = None
    precision: Annotated[
        strategies.Precision,
        Help("fp32; bf16 or fp16 (fp32 weights, 16-bit compute); or pure-bf16 (all in 16 bits)."),
    ] = "bf16"
    optimizer: Annotated[strategies.Optimizer, Help("Optimizer: adamw, sgd or sgd-momentum.")] = (
        "adamw"
    )
    task: Annotated[
        str | None,
        Help("module:function as for the trainer's --task; provides a model and a data sample."),
        _FUNCTION,
    ] = None
    input: Annotated[
        str | None,
        Help("Shape of one sample for --model, such as 3x224x224, to measure its activations."),
        Pattern(r"\d+(x\d+)*", "sizes such as 3x224x224"),
    ] = None
    finetune: Annotated[
        Literal["full", "lora", "auto"] | None,
        Help("Fine-tune all weights (full), adapters (lora), or adapters if needed to fit (auto)."),
    ] = None
    compile: Annotated[Literal["on", "off"], Help("Train with torch.compile: on or off.")] = "off"
    checkpoint_activations: Annotated[
        Literal["auto", "on", "selective", "off"],
        Help("Recompute activations in the backward pass: auto, on, selective or off."),
    ] = "auto"
    offload: Annotated[
        Literal["auto", "on", "off"],
        Help("Keep zero3's sharded states in host memory: auto, on or off."),
    ] = "off"
    gpu_memory: Annotated[
        Size | None, Help("Memory of one GPU, such as 80GiB; overrides the known value."), Bounds(1)
    ] = None
    gpus_per_node: Annotated[int, Help("GPUs per node."), Bounds(1, 1024)] = 1
    nodes: Annotated[int, Help("Number of nodes."), Bounds(1, 10_000)] = 1
    link: Annotated[
        Literal["nvlink", "pcie"] | None, Help("Link between the GPUs of a node: nvlink or pcie.")
    ] = None
    fabric: Annotated[
        strategies.Fabric, Help("Network between the nodes: tcp, efa or infiniband.")
    ] = "tcp"
    bandwidth: Annotated[
        int | None, RATE, Help("Network bandwidth of one node, such as 100Gb/s."), Bounds(1)
    ] = None


def read(arguments: Mapping[str, str]) -> AdviseOptions:
    """Decode the options as typed, by field name. Raises UsageError with every problem."""
    given = {name: Plain(text) for name, text in arguments.items()}
    decoded, problems = decode(AdviseOptions, given)
    bad = {problem.path for problem in problems}
    valid = {name: text for name, text in given.items() if name not in bad}
    checked = decoded or decode(AdviseOptions, valid)[0] or AdviseOptions()
    problems = [*problems, *_problems(checked, bad)]
    if problems or decoded is None:
        renamed = [one._replace(path=f"--{one.path.replace('_', '-')}") for one in problems]
        raise UsageError(f"advise: {units.plural(len(problems), 'problem')}", problems=renamed)
    return decoded


def _problems(options: AdviseOptions, bad: set[str]) -> Iterator[Problem]:
    """Missing options and conflicts; options in `bad` have a problem already."""
    if options.input and options.model is None and "model" not in bad:
        yield Problem("input", "requires --model", "add --model, or remove --input")
    known = gpus.known()
    if options.gpu is None:
        if options.gpu_memory is None and not bad & {"gpu", "gpu_memory"}:
            choices = f"use one of {', '.join(known)}, or --gpu-memory 80GiB"
            yield Problem("gpu", "is required", choices)
    elif gpus.find(options.gpu) is None and options.gpu_memory is None:
        near = [name for name in known if name.startswith(options.gpu.lower())]
        hint = " or ".join(near) or did_you_mean(options.gpu, known)
        hint = hint or f"use one of {', '.join(known)}, or --gpu-memory for another GPU"
        yield Problem("gpu", f"unknown GPU {options.gpu!r}", hint)
    shape = options.layers is not None and options.width is not None
    if bad & {"parameters", "layers", "width", "model", "task"} or options.task:
        return
    if options.parameters is None and not shape and options.model is None:
        hint = "use --parameters 7B, --layers and --width, or --model with a function or a name"
        yield Problem("parameters", "the size of the model is required", hint)
    elif options.width and options.heads and options.width % options.heads:
        message = f"the width, {options.width}, is not divisible by {options.heads} heads"
        yield Problem("heads", message)


def workload_of(options: AdviseOptions) -> tuple[Model, Training, Cluster]:
    """Convert the options for `advise`. Raises UsageError if the model cannot be built."""
    model = _model(options)
    usual = min(_SEQUENCE, model.length or _SEQUENCE)
    if options.input or options.task:
        usual = 1 if options.input else model.length or 1
    switches = {"auto": None, "on": True, "off": False}
    recompute = options.checkpoint_activations
    adapters = {None: False, "full": False, "lora": True, "auto": None}
    gpu = gpus.find(options.gpu or "") or gpus.unknown(options.gpu or "GPU")
    if options.gpu_memory:
        gpu = dataclasses.replace(gpu, memory=options.gpu_memory)
    cluster = Cluster(
        gpu,
        gpus_per_node=options.gpus_per_node,
        nodes=options.nodes,
        link=options.link or gpu.link,
        fabric=options.fabric,
        bandwidth=options.bandwidth or strategies.FABRICS[options.fabric],
    )
    training = Training(
        options.batch_size or _SAMPLES_PER_GPU * cluster.world,
        options.sequence or usual,
        precision=options.precision,
        optimizer=options.optimizer,
        checkpointing="selective" if recompute == "selective" else switches[recompute],
        offload=switches[options.offload],
        on_cpu=options.gpu == "cpu",
        lora=adapters[options.finetune],
        compiled=options.compile == "on",
    )
    return model, training, cluster


def assumed(options: AdviseOptions, training: Training) -> str:
    """The sentence that states the defaults of --batch-size and --sequence; empty if not used."""
    values = []
    if options.batch_size is None:
        values.append(f"--batch-size {training.batch} ({_SAMPLES_PER_GPU} per GPU)")
    if options.sequence is None and not (options.input or options.task):
        values.append(f"--sequence {training.sequence}")
    return f"Assumed: {' and '.join(values)}; set the options to override." if values else ""


def _model(options: AdviseOptions) -> Model:
    if options.task is not None:
        names = ("sequence", "batch_size", "layers", "width", "heads")
        given = {name: getattr(options, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        return counted(options.task, f"task:{json.dumps(given)}", heads=options.heads)
    sequence = options.sequence or _SEQUENCE
    if options.model is not None:
        return counted(options.model, options.input or f"tokens:{sequence}", heads=options.heads)
    if options.parameters is None:
        width = options.width or 0
        return gpt(
            layers=options.layers or 0,
            width=width,
            heads=options.heads or max(1, width // 64),
            vocabulary=options.vocabulary or _BYTE_VOCABULARY,
            positions=sequence,
        )
    return gpt_of_size(
        options.parameters,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=options.vocabulary or _DEFAULT_VOCABULARY,
        positions=sequence,
    )
