"""What a person asks, as options: decoded, checked, every problem at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from deploykit.advise import counted, gpus, plan
from deploykit.advise.gpus import Gpu
from deploykit.advise.plan import Cluster, Training
from deploykit.advise.shape import Model, gpt, guessed
from deploykit.decode import Plain, decode, did_you_mean
from deploykit.errors import UsageError
from deploykit.fields import Bounds, Help, Pattern, Quantity, Size
from deploykit.model import Problem

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:[._]\d+)*)([KMBT]?)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT])(b|B)(?:/s|ps)", re.IGNORECASE)
_POWERS = {"M": 10**6, "G": 10**9, "T": 10**12}
_BYTE_VOCABULARY = 256
"""Of the reference trainer."""
_USUAL_VOCABULARY = 32_000
"""Of a model of which only the size is given."""


def _count(text: str) -> int:
    """``7B``, ``1.3B``, ``350M`` or plain digits, in units."""
    match = _COUNT.fullmatch(text.replace(",", "").replace(" ", ""))
    if match is None:
        raise ValueError(text)
    return round(float(match[1].replace("_", "")) * _SCALES[match[2].upper()])


def _rate(text: str) -> int:
    """``25Gb/s``, ``25Gbps`` (bits) or ``3.1GB/s`` (bytes) in bytes per second."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    bits = 8 if match[3] == "b" else 1
    return round(float(match[1]) * _POWERS[match[2].upper()] / bits)


COUNT = Quantity("a number such as 7B, 350M or 124439808", _COUNT.pattern, _count)
RATE = Quantity("a speed such as 25Gb/s (bits) or 12GB/s (bytes)", _RATE.pattern, _rate)
_WHOLE = Bounds(1, 1_000_000)


@dataclass(frozen=True)
class Question:
    """The options of ``deploykit advise``; a field's name is its option's."""

    gpu: Annotated[str | None, Help("GPU type, or cpu; --list shows those that are known.")] = None
    batch_size: Annotated[int | None, Help("Samples in a step, of all ranks together."), _WHOLE] = (
        None
    )
    sequence: Annotated[int | None, Help("Tokens in a sample."), _WHOLE] = None
    parameters: Annotated[
        int | None,
        COUNT,
        Help("Size of the model, such as 7B; what else is not given is filled in."),
        Bounds(1_000, 10**14),
    ] = None
    layers: Annotated[int | None, Help("Blocks of the model."), Bounds(1, 10_000)] = None
    width: Annotated[int | None, Help("Width (hidden size) of the model."), _WHOLE] = None
    heads: Annotated[int | None, Help("Attention heads of a block."), Bounds(1, 10_000)] = None
    vocabulary: Annotated[
        int | None,
        Help("Tokens known to the model. Default: 256 bytes; with --parameters 32000."),
        Bounds(2, 10_000_000),
    ] = None
    model: Annotated[
        str | None,
        Help("module:function that builds a model; counted without memory by a child process."),
        Pattern(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function"),
    ] = None
    precision: Annotated[
        plan.Precision,
        Help("fp32, bf16 or fp16 (weights in fp32, computing in 16 bits), pure-bf16."),
    ] = "bf16"
    optimizer: Annotated[plan.Optimizer, Help("adamw, sgd or sgd-momentum.")] = "adamw"
    checkpoint_activations: Annotated[
        Literal["auto", "on", "off"],
        Help("Recompute activations instead of keeping them: auto, on or off."),
    ] = "auto"
    offload: Annotated[
        Literal["auto", "on", "off"],
        Help("Keep the states of zero3 in the host's memory: auto, on or off."),
    ] = "off"
    gpu_memory: Annotated[
        Size | None, Help("Memory of one GPU, such as 80GiB, where it is another."), Bounds(1)
    ] = None
    gpus_per_node: Annotated[int, Help("GPUs of a node."), Bounds(1, 1024)] = 1
    nodes: Annotated[int, Help("Machines."), Bounds(1, 10_000)] = 1
    link: Annotated[
        Literal["nvlink", "pcie"] | None, Help("What joins the GPUs of a node: nvlink or pcie.")
    ] = None
    fabric: Annotated[plan.Fabric, Help("What joins the nodes: tcp, efa or infiniband.")] = "tcp"
    bandwidth: Annotated[
        int | None, RATE, Help("Of one node to the others, such as 100Gb/s."), Bounds(1)
    ] = None


def read(options: Mapping[str, str]) -> Question:
    """Options as they were typed, by the names of the fields.

    Raises UsageError with every problem.
    """
    given = {name: Plain(text) for name, text in options.items()}
    question, problems = decode(Question, given)
    checked = question or _readable(given, {problem.path for problem in problems})
    problems = [*problems, *(_check(checked, {problem.path for problem in problems}))]
    if problems or question is None:
        raise _wrong(problems)
    return question


def _readable(given: Mapping[str, str], bad: set[str]) -> Question:
    """The question without the options that are wrong, so that the others can be checked."""
    question, _ = decode(Question, {name: given[name] for name in given if name not in bad})
    return question or Question()


def _wrong(problems: list[Problem]) -> UsageError:
    count = len(problems)
    told = [
        dataclasses.replace(problem, path=f"--{problem.path.replace('_', '-')}")
        for problem in problems
    ]
    return UsageError(f"advise: {count} problem{'s' if count != 1 else ''}", problems=told)


def _check(question: Question, bad: set[str]) -> Iterator[Problem]:
    """What is missing or does not go together, beside what cannot be read."""
    for name, example in (("batch_size", "64"), ("sequence", "1024")):
        if getattr(question, name) is None and name not in bad:
            yield Problem(name, "is missing", f"for example {example}")
    yield from _check_gpu(question, bad)
    yield from _check_model(question, bad)


def _check_gpu(question: Question, bad: set[str]) -> Iterator[Problem]:
    known = gpus.known()
    if question.gpu is None:
        if question.gpu_memory is None and "gpu_memory" not in bad:
            yield Problem("gpu", "is missing", f"one of {', '.join(known)}; or --gpu-memory 80GiB")
    elif gpus.find(question.gpu) is None and question.gpu_memory is None:
        near = [name for name in known if name.startswith(question.gpu.lower())]
        hint = " or ".join(near) or did_you_mean(question.gpu, known)
        hint = hint or f"one of {', '.join(known)}; give --gpu-memory for another"
        yield Problem("gpu", f"there is no GPU {question.gpu!r}", hint)


def _check_model(question: Question, bad: set[str]) -> Iterator[Problem]:
    shape = question.layers is not None and question.width is not None
    if bad & {"parameters", "layers", "width", "model"}:
        return
    if question.parameters is None and not shape and question.model is None:
        hint = "--parameters 7B, or --layers and --width, or --model module:function"
        yield Problem("parameters", "the model's size is missing", hint)
    elif question.width and question.heads and question.width % question.heads:
        yield Problem("heads", f"{question.heads} heads do not divide a width of {question.width}")


def asked(question: Question) -> tuple[Model, Training, Cluster]:
    """The question as the chooser takes it. Raises UsageError for a model that cannot be built."""
    return _model(question), _training(question), _cluster(question)


def _model(question: Question) -> Model:
    positions = question.sequence or 0
    if question.model is not None:
        return counted.count(question.model, heads=question.heads)
    if question.parameters is None:
        width = question.width or 0
        return gpt(
            layers=question.layers or 0,
            width=width,
            heads=question.heads or max(1, width // 64),
            vocabulary=question.vocabulary or _BYTE_VOCABULARY,
            positions=positions,
        )
    return guessed(
        question.parameters,
        layers=question.layers,
        width=question.width,
        heads=question.heads,
        vocabulary=question.vocabulary or _USUAL_VOCABULARY,
        positions=positions,
    )


def _training(question: Question) -> Training:
    choice = {"auto": None, "on": True, "off": False}
    return Training(
        question.batch_size or 0,
        question.sequence or 0,
        precision=question.precision,
        optimizer=question.optimizer,
        checkpointing=choice[question.checkpoint_activations],
        offload=choice[question.offload],
        on_cpu=question.gpu == "cpu",
    )


def _cluster(question: Question) -> Cluster:
    gpu = _gpu(question)
    return Cluster(
        gpu,
        gpus_per_node=question.gpus_per_node,
        nodes=question.nodes,
        link=question.link or gpu.link,
        fabric=question.fabric,
        bandwidth=question.bandwidth or plan.FABRICS[question.fabric],
    )


def _gpu(question: Question) -> Gpu:
    known = gpus.find(question.gpu or "")
    gpu = known or gpus.unknown(question.gpu or "GPU")
    return dataclasses.replace(gpu, memory=question.gpu_memory) if question.gpu_memory else gpu
