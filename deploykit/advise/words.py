"""An advice in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.advise import gpus
from deploykit.advise.chooser import Advice, Candidate, layer_need
from deploykit.advise.layouts import STRATEGIES
from deploykit.advise.memory import Memory
from deploykit.advise.plan import Cluster, Training
from deploykit.advise.shape import Model
from deploykit.advise.traffic import UTILISATION

_GIB = 1024**3
_SCALES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "sgd-momentum": "SGD with momentum"}
_LINKS = {"nvlink": "NVLink", "pcie": "PCIe"}
_FABRICS = {"tcp": "TCP", "efa": "EFA", "infiniband": "InfiniBand"}
_USUAL = ("ddp", "zero1", "zero2", "zero3", "hsdp")
"""Strategies that need no say in how the model is cut."""
_TIGHT = 0.9
"""Share of the memory above which a layout is called tight."""


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where they are few."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 1024**2:.1f} MiB"


def number(count: float) -> str:
    """7.0B, 350M, 12."""
    for scale, letter in _SCALES:
        if count >= scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.0f}"


def time(seconds: float) -> str:
    """A duration as a person reads it."""
    if seconds >= 100:  # noqa: PLR2004 - three digits
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def subject(advice: Advice) -> Iterator[str]:
    """What was asked, in two lines."""
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
    inside = f", {_LINKS[cluster.link]} between them" if cluster.gpus_per_node > 1 else ""
    if cluster.nodes == 1:
        return f"one node with {each}{inside}"
    return f"{cluster.nodes} nodes, each with {each}{inside}; {_network(cluster)} between the nodes"


def _network(cluster: Cluster) -> str:
    return f"{_FABRICS[cluster.fabric]} at {cluster.bandwidth * 8 / 10**9:.0f} Gb/s"


def case(advice: Advice) -> str:
    """Which of the three cases holds."""
    capacity = gib(advice.cluster.gpu.memory)
    whole = next(each for each in advice.candidates[::-1] if each.strategy in {"single", "ddp"})
    if advice.case == "each":
        return f"Case 1: a whole copy fits on each GPU ({gib(whole.memory.total)} of {capacity})."
    if advice.case == "layer":
        need = gib(layer_need(advice.model, advice.training))
        return f"Case 3: not even one layer fits on a GPU (it needs {need}, there are {capacity})."
    return (
        f"Case 2: a whole copy does not fit on one GPU (it needs {gib(whole.memory.total)}, there "
        f"are {capacity}); split over several it {'does' if advice.best else 'would'}."
    )


def recommendation(advice: Advice) -> Iterator[str]:
    """What to do, then why, a sentence each."""
    best = advice.best
    if best is None:
        yield from _nothing(advice)
        return
    yield f"Use {best.strategy}: {STRATEGIES[best.strategy]}."
    yield f"{_setting(best)}{_outcome(advice, best)}"
    yield from _why(advice, best)
    if advice.second is not None:
        yield _runner_up(advice.second)


def _setting(each: Candidate) -> str:
    """Degrees and switches of a layout."""
    layout = each.layout
    parts = []
    if layout.tensor > 1:
        parts.append(f"each layer over {layout.tensor} GPUs")
    if layout.pipeline > 1:
        parts.append(f"{layout.pipeline} stages, schedule 1f1b")
    if layout.shards > 1:
        parts.append(f"states over {layout.shards} GPUs")
    if layout.micro_batches > 1:
        parts.append(f"{layout.micro_batches} micro-batches")
    if layout.checkpointing:
        parts.append("activations recomputed")
    if layout.offload:
        parts.append("states in the host's memory")
    return f"Set up: {', '.join(parts)}. " if parts else ""


def _outcome(advice: Advice, best: Candidate) -> str:
    total, capacity = best.memory.total, advice.cluster.gpu.memory
    tight = "; that is tight" if total > _TIGHT * capacity else ""
    speed = advice.training.tokens / best.step.seconds
    return (
        f"It needs {gib(total)} of {gib(capacity)} on a GPU{tight}, and about "
        f"{time(best.step.seconds)} a step ({number(speed)} tokens/s)."
    )


def _why(advice: Advice, best: Candidate) -> Iterator[str]:
    """Why this one: what keeps the simpler ones out, and what it waits for."""
    simpler = _before(advice, best)
    out = [each for each in simpler if not each.fits]
    if out:
        yield f"What is simpler does not fit: {'; '.join(_need(each) for each in out)}."
    slower = [each for each in simpler if each.fits]
    if slower:
        told = ", ".join(f"{each.strategy} {time(each.step.seconds)}" for each in slower)
        last = slower[-1]
        yield (
            f"What is simpler and fits is slower: {told} a step; {last.strategy} waits for "
            f"{_waits(last)}."
        )
    yield _cost(best)


def _before(advice: Advice, best: Candidate) -> list[Candidate]:
    """Simpler strategies that use these machines as fully."""
    names = list(STRATEGIES)
    return [
        each
        for each in advice.candidates
        if each.strategy in _USUAL and names.index(each.strategy) < names.index(best.strategy)
    ]


def _need(each: Candidate) -> str:
    return f"{each.strategy} needs {gib(each.memory.total)} ({_largest(each.memory)})"


def _largest(memory: Memory) -> str:
    """The two largest parts of what is needed."""
    top = sorted(parts(memory), key=lambda part: part[1], reverse=True)[:2]
    return " and ".join(f"{name} {gib(size)}" for name, size in top)


def parts(memory: Memory) -> list[tuple[str, int]]:
    """What a GPU's memory holds, each part with its bytes."""
    return [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer),
        ("activations", memory.activations),
        ("logits", memory.logits),
        *memory.buffers,
        ("reserve", memory.reserve),
    ]


def _waits(each: Candidate) -> str:
    """What costs most time beside computing."""
    if each.step.bubble > each.step.exposed:
        return "other stages"
    slowest = max(each.step.transfers, key=lambda transfer: transfer.seconds, default=None)
    if slowest is None:
        return "nothing"
    where = "between the nodes" if slowest.across else "inside a node"
    return f"{slowest.what} {where}, {gib(slowest.sent)} from each GPU"


def _cost(best: Candidate) -> str:
    """What the layout pays in time."""
    step = best.step
    lost = step.exposed + step.bubble
    if lost < 0.05 * step.seconds:
        return "Communication hides behind computing almost wholly."
    said = f"Of a step, {time(step.compute)} are computing"
    if step.bubble:
        said += f", {time(step.bubble)} waiting of stages for each other"
    if step.exposed:
        said += f", {time(step.exposed)} waiting for {_waits(best)}"
    return f"{said}."


def _runner_up(second: Candidate) -> str:
    return (
        f"Next best: {second.strategy}, {time(second.step.seconds)} a step with "
        f"{gib(second.memory.total)} ({STRATEGIES[second.strategy]})."
    )


def _nothing(advice: Advice) -> Iterator[str]:
    """What to change where nothing fits."""
    least = min(advice.candidates, key=lambda each: each.memory.total)
    yield (
        f"Nothing fits. {least.strategy} comes nearest: {gib(least.memory.total)} "
        f"({_largest(least.memory)})."
    )
    if advice.enough is not None:
        yield f"It would fit on {advice.enough} of these nodes."
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


def notes(advice: Advice) -> Iterator[str]:
    """What was assumed, and what to look out for."""
    cluster, training, model = advice.cluster, advice.training, advice.model
    if not model.exact:
        yield "The shape was filled in from the size; give --layers, --width and --heads for yours."
    if cluster.world > 1 and advice.of("ddp") is None:
        yield (
            f"A batch of {training.batch} cannot be split over {cluster.world} GPUs: strategies "
            "that would have to are left out."
        )
    if not model.width:
        yield "The model has no embedding: its activations are not known and not counted."
    if cluster.gpu.name not in gpus.known():
        yield f"{cluster.gpu.label} is not known: its speed was taken to be an A100's."
    if training.precision in {"bf16", "pure-bf16"} and not cluster.gpu.flops["bf16"]:
        yield f"{cluster.gpu.label} has no bf16 units: --precision fp16 is several times faster."
    if cluster.nodes > 1:
        yield f"Between nodes: {_network(cluster)} for each node (--bandwidth sets it)."
    yield (
        f"Times are rough: {UTILISATION:.0%} of the GPU's peak. Memory includes a reserve for the "
        "CUDA context and what the allocator cannot use."
    )
