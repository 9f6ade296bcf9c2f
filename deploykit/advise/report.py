"""A recommendation in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from deploykit.advise import gpus
from deploykit.advise.chooser import WIDE_SHARDING, Advice, Candidate, layer_memory
from deploykit.advise.memory import Memory
from deploykit.advise.models import Model, gpt
from deploykit.advise.speed import peak
from deploykit.advise.strategies import STRATEGIES, Cluster, ParallelConfig, Training
from deploykit.job.model import Problem
from deploykit.lib.errors import UsageError

_GIB = 1024**3
_SCALES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "sgd-momentum": "SGD with momentum"}
_LINKS = {"nvlink": "NVLink", "pcie": "PCIe"}
_FABRICS = {"tcp": "TCP", "efa": "EFA", "infiniband": "InfiniBand"}
_SAME = 0.97
"""Times within this ratio are called about equal."""
_WITHOUT_SPLIT_LAYERS = ("ddp", "zero1", "zero2", "zero3", "hsdp")
"""Strategies that split neither layers nor the sequence of layers."""


def gib(size: float) -> str:
    """Format bytes as GiB; below 0.1 GiB as MiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 1024**2:.1f} MiB"


def number(count: float) -> str:
    """Format a count with three digits: 7B, 350M, 12."""
    for scale, letter in _SCALES:
        if count >= scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.0f}"


def time(seconds: float) -> str:
    """Format a duration: 1,234 s, 1.5 s, 20 ms."""
    if seconds >= 100:  # noqa: PLR2004 - three digits
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def subject(advice: Advice) -> Iterator[str]:
    """Describe the model, the training and the cluster, in two lines."""
    yield f"{_model(advice.model)}; {_training(advice.training)}"
    yield _cluster(advice.cluster)


def _model(model: Model) -> str:
    about = "" if model.exact else "about "
    shape = f"{model.layers} layers of width {model.width}, {model.heads} heads"
    return f"{about}{number(model.parameters)} parameters ({shape})"


def _training(training: Training) -> str:
    batch = f"{training.batch} x {training.sequence} tokens a step"
    return f"{batch}, {training.precision}, {_OPTIMIZERS[training.optimizer]}"


def _cluster(cluster: Cluster) -> str:
    each = f"{cluster.gpus_per_node} x {cluster.gpu.label} with {gib(cluster.gpu.memory)}"
    inside = f" linked by {_LINKS[cluster.link]}" if cluster.gpus_per_node > 1 else ""
    if cluster.nodes == 1:
        return f"one node with {each}{inside}"
    return f"{cluster.nodes} nodes, each with {each}{inside}; {_network(cluster)} between the nodes"


def _network(cluster: Cluster) -> str:
    return f"{_FABRICS[cluster.fabric]} at {cluster.bandwidth * 8 / 10**9:.0f} Gb/s"


def case(advice: Advice) -> str:
    """Say which of the three cases applies."""
    capacity = gib(advice.cluster.gpu.memory)
    whole_model = ("single", "ddp")
    replicated = next(each for each in advice.candidates[::-1] if each.strategy in whole_model)
    need = gib(replicated.memory.total)
    if replicated.config.lora:
        return (
            "Case 2: training all weights does not fit on one GPU; with adapters it takes "
            f"{need} of {capacity}."
        )
    if advice.case == "each":
        return f"Case 1: the whole model fits on each GPU ({need} of {capacity})."
    if advice.case == "layer":
        needed = gib(layer_memory(advice.model, advice.training))
        return f"Case 3: not even one layer fits on a GPU ({needed} of {capacity})."
    return (
        f"Case 2: the whole model does not fit on one GPU ({need} of {capacity}), but it "
        f"{'fits' if advice.best else 'can fit'} when it is split."
    )


def recommendation(advice: Advice) -> Iterator[str]:
    """Yield what to do, then why, one sentence each."""
    best = advice.best
    if best is None:
        yield from _nothing_fits(advice)
        return
    yield f"Use {best.strategy}: {STRATEGIES[best.strategy]}."
    degrees = _degrees(best)
    configuration = f"Configuration: {degrees}. " if degrees else ""
    yield configuration + _cost(advice, best)
    yield from _why(advice, best)
    if advice.second is not None:
        yield _runner_up(advice, best, advice.second)


def _degrees(each: Candidate) -> str:
    """Degrees and switches of a configuration, or ''."""
    config = each.config
    parts = []
    if config.tensor > 1:
        parts.append(f"tensor parallelism over {config.tensor} GPUs")
    if config.pipeline > 1:
        parts.append(f"{config.pipeline} pipeline stages, schedule 1f1b")
    if config.shards > 1:
        parts.append(f"states sharded over {config.shards} GPUs")
    if config.micro_batches > 1:
        parts.append(f"{config.micro_batches} micro-batches")
    if config.checkpointing:
        parts.append("activations recomputed")
    if config.selective:
        parts.append("cheap activations recomputed (selective checkpointing)")
    if config.compress:
        parts.append(f"gradients sent in {config.compress}")
    if config.lora:
        parts.append("LoRA: the given weights stay as they are, adapters are trained")
    if config.offload:
        parts.append("states in host memory")
    return ", ".join(parts)


def _cost(advice: Advice, best: Candidate) -> str:
    total, capacity = best.memory.total, advice.cluster.gpu.memory
    tight = ", which is tight" if best.tight else ""
    count = advice.training.tokens
    unit = "tokens" if advice.training.sequence > 1 else "samples"
    speed = count / best.step.seconds
    return (
        f"It needs {gib(total)} of {gib(capacity)} per GPU{tight}, and takes about "
        f"{time(best.step.seconds)} per step ({number(speed)} {unit}/s, "
        f"MFU {mfu(advice, best):.0%})."
    )


def mfu(advice: Advice, each: Candidate) -> float:
    """Model FLOPs utilization: the model's own operations, without repetitions, as a share of what
    the GPUs could do at their peak (https://arxiv.org/abs/2204.02311, appendix B).
    """
    training = advice.training
    work = advice.model.flops(training.tokens, training.sequence)
    if advice.model.sample is not None:
        work = advice.model.sample.flops * training.batch
    work *= 2 / 3 if each.config.lora else 1  # no gradients of the frozen weights
    return work / (each.step.seconds * each.config.world * peak(training, advice.cluster.gpu))


def _why(advice: Advice, best: Candidate) -> Iterator[str]:
    """Why simpler strategies are worse, and what limits this one."""
    simpler = _simpler(advice, best)
    too_large = [each for each in simpler if not each.fits]
    if too_large:
        yield f"Simpler strategies do not fit: {'; '.join(_need(each) for each in too_large)}."
    yield from _because(advice, best)
    tight = [each for each in simpler if each.fits and each.tight and not best.tight]
    if tight:
        capacity = advice.cluster.gpu.memory
        sizes = ", ".join(f"{each.strategy} {_filled(each, capacity)}" for each in tight)
        yield f"Simpler strategies that fit leave little memory free: {sizes}."
    slower = [each for each in simpler if each.fits and each not in tight]
    if slower:
        times = ", ".join(f"{each.strategy} {time(each.step.seconds)}" for each in slower)
        last = slower[-1]
        yield (
            f"Simpler strategies that fit are slower: {times} per step; {last.strategy} "
            f"{_delay(last)}."
        )
    yield _breakdown(best)


def _because(advice: Advice, best: Candidate) -> Iterator[str]:
    """What decided for a choice that changes more than the layout."""
    if best.config.lora:
        yield (
            "Training all weights fits only on more or larger GPUs, or with states in host memory "
            "(--offload auto)."
        )
    if best.strategy == "sharded-table":
        table, model = advice.model.embedding.size(), advice.model
        yield (
            f"{number(table)} of {number(model.parameters)} parameters are the table, of which a "
            f"step looks up {number(advice.training.tokens)} rows: only those are sent."
        )
    wide = advice.of("fsdp-tp")
    if best.strategy == "pp-fsdp-tp" and wide and wide.fits and wide.reach > WIDE_SHARDING:
        yield (
            f"fsdp-tp shards over {wide.reach} nodes, and each layer waits for the slowest of "
            f"them; here over {best.reach}."
        )
    if best.config.compress:
        yield (
            f"TCP is slow: gradients in {best.config.compress} are half as large; powersgd sends "
            "far less, but is lossy."
        )


def _simpler(advice: Advice, best: Candidate) -> list[Candidate]:
    """Simpler strategies that use all GPUs and split no layers."""
    names = list(STRATEGIES)
    return [
        each
        for each in advice.candidates
        if each.strategy in _WITHOUT_SPLIT_LAYERS
        and names.index(each.strategy) < names.index(best.strategy)
    ]


def _need(each: Candidate) -> str:
    return f"{each.strategy} needs {gib(each.memory.total)} ({_largest(each.memory)})"


def _largest(memory: Memory) -> str:
    """The two largest parts of the memory."""
    top = sorted(parts(memory), key=lambda part: part[1], reverse=True)[:2]
    return " and ".join(f"{name} {gib(size)}" for name, size in top)


def parts(memory: Memory) -> list[tuple[str, int]]:
    """The parts of a GPU's memory, each with its bytes."""
    return [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer),
        ("activations", memory.activations),
        ("logits", memory.logits),
        *memory.buffers,
        ("reserve", memory.reserve),
    ]


def _delay(each: Candidate) -> str:
    """What takes more time than the work itself."""
    recomputing = each.step.compute / 4 if each.config.checkpointing else 0
    if recomputing > each.step.exposed + each.step.bubble:
        return "recomputes activations"
    return f"waits for {_bottleneck(each)}"


def _bottleneck(each: Candidate) -> str:
    """What takes most time apart from compute."""
    if each.step.bubble > each.step.exposed:
        return "other pipeline stages"
    slowest = max(each.step.transfers, key=lambda transfer: transfer.seconds, default=None)
    if slowest is None:
        return "nothing"
    where = "between the nodes" if slowest.across else "inside a node"
    return f"{slowest.name} {where}, {gib(slowest.sent)} from each GPU"


def _breakdown(best: Candidate) -> str:
    """How a step's time splits into compute and waiting."""
    step = best.step
    waiting = step.exposed + step.bubble
    if waiting < 0.05 * step.seconds:
        return "Communication is almost fully overlapped with compute."
    text = f"Of each step, {time(step.compute)} is compute"
    if step.bubble:
        text += f", {time(step.bubble)} pipeline bubble"
    if step.exposed:
        text += f", {time(step.exposed)} waiting for {_bottleneck(best)}"
    return f"{text}."


def _filled(each: Candidate, capacity: int) -> str:
    return f"{gib(each.memory.total)} of {gib(capacity)}"


def _runner_up(advice: Advice, best: Candidate, second: Candidate) -> str:
    """The next best strategy, and why it is only the next best."""
    because = "; ".join(_drawbacks(advice, best, second))
    return (
        f"Next best: {second.strategy}, {time(second.step.seconds)} per step with "
        f"{gib(second.memory.total)} ({STRATEGIES[second.strategy]}). It is only next because "
        f"{because}."
    )


def _drawbacks(advice: Advice, best: Candidate, second: Candidate) -> Iterator[str]:
    """What speaks against the second, by the rules of the order; says what speaks for it too."""
    ratio = second.step.seconds / best.step.seconds
    gain = f", though it is {1 - ratio:.0%} faster by estimate" if ratio < _SAME else ""
    if second.tight and not best.tight:
        yield f"it fills {_filled(second, advice.cluster.gpu.memory)}{gain}"
    elif second.splits and not best.splits:
        little = f"only {1 - ratio:.0%} faster" if gain else "no faster"
        yield f"it splits the model, which needs a plan for its layers, and is {little} by estimate"
    elif second.reach > WIDE_SHARDING >= best.reach:
        yield f"it shards over {second.reach} nodes{gain}"
    elif ratio > 1 / _SAME:
        yield f"it is {ratio - 1:.0%} slower by estimate"
    else:
        yield f"it is more complex than {best.strategy} and about as fast"


def _nothing_fits(advice: Advice) -> Iterator[str]:
    """What to change if nothing fits."""
    least = min(advice.candidates, key=lambda each: each.memory.total)
    yield (
        f"No strategy fits. {least.strategy} comes closest: {gib(least.memory.total)} "
        f"({_largest(least.memory)})."
    )
    if advice.enough is not None:
        yield f"The model fits on {advice.enough} such nodes."
    changes = list(_changes(advice.training))
    if changes:
        yield f"Or try {', '.join(changes)}."


def _changes(training: Training) -> Iterator[str]:
    if training.checkpointing is False:
        yield "--checkpoint-activations on"
    if training.precision == "fp32":
        yield "--precision bf16"
    if training.offload is False:
        yield "--offload auto"
    if training.optimizer == "adamw":
        yield "an optimizer with fewer states"
    yield "a shorter sequence"


def not_yet(missing: list[str], runs: Advice) -> str:
    """What the reference trainer has no option for, and what it can do instead."""
    instead = "none of its strategies fits"
    if runs.best is not None:
        degrees = _degrees(runs.best)
        best = runs.best.strategy + (f" ({degrees})" if degrees else "")
        seconds, size = time(runs.best.step.seconds), gib(runs.best.memory.total)
        instead = f"its best strategy, which --write writes: {best}, {seconds}, {size}"
    files = " and ".join(f"examples/models/{EXAMPLES[name]}" for name in missing)
    what = " and ".join(missing)
    return f"In the reference trainer, {what} is part of a task: see {files}; {instead}."


def notes(advice: Advice) -> Iterator[str]:
    """Yield assumptions and caveats."""
    cluster, training, model = advice.cluster, advice.training, advice.model
    if not model.exact:
        yield "The shape was derived from the size; set --layers, --width and --heads to yours."
    if cluster.world > 1 and advice.of("ddp") is None:
        yield (
            f"A batch of {training.batch} cannot be split over {cluster.world} GPUs: strategies "
            "that require it are omitted."
        )
    if model.sample is None and not (model.width and model.layers):
        yield (
            "The model is not a known transformer, so its activations are not included: give the "
            "shape of a sample, as in --input 3x224x224."
        )
    if cluster.gpu.name not in gpus.known():
        yield f"{cluster.gpu.label} is unknown: the speed of an A100 is assumed."
    if training.precision in {"bf16", "pure-bf16"} and not cluster.gpu.flops["bf16"]:
        yield f"{cluster.gpu.label} does not support bf16: --precision fp16 is much faster."
    if cluster.nodes > 1:
        yield f"Between nodes: {_network(cluster)} per node (set it with --bandwidth)."
    gpu = cluster.gpu
    yield (
        f"Times: matrix products at {gpu.matmul:.0%} and attention at {gpu.attention:.0%} of the "
        f"GPU's peak, all else at the speed of its memory. Memory includes a reserve for the CUDA "
        "context and fragmentation."
    )


_PRECISIONS = {"fp32", "bf16", "fp16"}
"""Precisions that the trainer supports."""
_TRAINER_OPTIMIZERS = {"adamw": "adamw", "sgd-momentum": "sgd"}
"""Names of optimizers here and in the trainer, whose SGD has momentum."""
EXAMPLES = {"sharded tables": "recommender.py", "LoRA": "fine_tuning.py"}
"""Tasks in `examples/models` that do what no option of the trainer does."""
_VOCABULARY = 256
_LINE_WIDTH = 96


def lacking(config: ParallelConfig) -> list[str]:
    """What no option of the reference trainer does: it is a part of a task, `EXAMPLES` has one."""
    wanted = {"sharded tables": config.strategy == "sharded-table", "LoRA": config.lora}
    return [name for name in EXAMPLES if wanted[name]]


def can_run(config: ParallelConfig) -> bool:
    """Whether the reference trainer's options can do all of this configuration."""
    return not lacking(config)


def job_file(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> str:
    """The text of a job.yaml, for the folder that holds ``entrypoints``.

    Raises UsageError if the trainer does not support the precision or the optimizer.
    """
    problems = list(_unsupported(training))
    if problems:
        raise UsageError("not supported by the reference trainer", problems=problems)
    nodes = 1 if config.world < cluster.world else cluster.nodes
    processes = _processes(cluster, config)
    module = f" and {model.task.partition(':')[0]}" if model.task else ""
    return f"""\
# Written by `deploykit advise` for {nodes} x {cluster.gpus_per_node} {cluster.gpu.label}.
name: advised-{config.strategy}
source: entrypoints         # the folder with train.py{module}

entrypoint:
  script: train.py
  args:
{_flow(trainer_options(model, training, config))}

resources:
  nodes: {nodes}
  processes_per_node: {processes}
  gpus_per_node: {0 if cluster.gpu.is_cpu else min(config.world, cluster.gpus_per_node)}
  time_limit: 1h            # adjust: the job is stopped after this time
"""


def _unsupported(training: Training) -> Iterator[Problem]:
    if training.precision not in _PRECISIONS:
        hint = "bf16 keeps weights in fp32 and computes in 16 bits"
        yield Problem("--precision", f"{training.precision} is not supported", hint)
    if training.optimizer not in _TRAINER_OPTIMIZERS:
        yield Problem("--optimizer", "SGD without momentum is not supported", "use sgd-momentum")


def difference(model: Model, training: Training) -> str | None:
    """How the trainer's model differs from `model`, in one sentence; None if it does not."""
    if model.task:
        return None
    trainers = gpt(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        vocabulary=_VOCABULARY,
        positions=training.sequence,
    )
    if trainers.parameters == model.parameters:
        return None
    return (
        f"The trainer's GPT reads bytes (a vocabulary of {_VOCABULARY}) and its MLP is four "
        f"times as wide as the model: {trainers.parameters / 10**9:.2f}B parameters."
    )


def _flow(words: Iterable[str]) -> str:
    """A YAML list, wrapped over several lines."""
    indent = " " * 4
    return textwrap.fill(
        f"[{', '.join(words)}]",
        _LINE_WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent} ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _processes(cluster: Cluster, config: ParallelConfig) -> int:
    """Processes per node: one per GPU, but one for all GPUs with nn.DataParallel."""
    return 1 if config.strategy == "dp" else min(config.world, cluster.gpus_per_node)


def trainer_options(model: Model, training: Training, config: ParallelConfig) -> Iterator[str]:
    """Arguments of the reference trainer for this configuration."""
    yield from ("--task", model.task or "text", "--strategy", config.strategy)
    for name, value, default in (
        ("tensor-parallel", config.tensor, 1),
        ("pipeline-parallel", config.pipeline, 1),
        ("shard-ranks", config.shards if config.strategy == "hsdp" else 1, 1),
        ("micro-batches", config.micro_batches, 1),
    ):
        if value != default:
            yield from (f"--{name}", str(value))
    if config.pipeline > 1:
        yield from ("--schedule", "1f1b")
    if config.tensor > 1 and not model.task:  # a task's own plan says how it is split
        yield from ("--sequence-parallel", "--loss-parallel")
    yield from ("--precision", training.precision)
    yield from _switch_options(training, config)
    yield from ("--batch-size", str(training.batch))
    if not model.task:
        yield from ("--sequence", str(training.sequence), "--layers", str(model.layers))
        yield from ("--width", str(model.width), "--heads", str(model.heads))
    yield from ("--optimizer", _TRAINER_OPTIMIZERS[training.optimizer])


def _switch_options(training: Training, config: ParallelConfig) -> Iterator[str]:
    """Options that save memory, traffic or time."""
    if config.checkpointing:
        yield "--checkpoint-activations"
    if config.selective:
        yield from ("--checkpoint-activations", "selective")
    if config.offload:
        yield "--offload"
    if config.compress:
        yield from ("--compress", config.compress)
    if training.compiled:
        yield "--compile"
