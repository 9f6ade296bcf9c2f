"""What ranks with different samples do with a model: hold replicas of it, or shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from trainer.errors import UnequalRanksError
from trainer.measure import timing
from trainer.parallel.layers import unchanged
from trainer.parallel.process_group import sum_over_ranks
from trainer.setup import Setup
from trainer.train_options import TrainOptions

UNCOMPRESSED_STEPS = 10
"""Steps before PowerSGD starts: the first gradients are the hardest to compress. torch's default
is 1000, with which a short run would not be compressed at all."""

_SLOW = (
    "warning: nn.DataParallel copies the model to every GPU in each step and runs in a single "
    "Python process; --strategy ddp gives the same results faster"
)


FIRST, INTERVAL = 20, 100
"""Ranks compare in so many steps at the start, and in every so many after that."""
_ADVICE = (
    "Data-dependent branches cause this, as in a mixture of experts or LayerDrop: call the same "
    "layers on every rank (multiply an unused result by 0), or use --strategy ddp "
    "--find-unused-parameters"
)


class Replica:
    """A model on this rank alone, and the interface of those that share gradients.

    `model` has the parameters; `module` computes the outputs in training.
    """

    def __init__(self, model: nn.Module, module: nn.Module | None = None) -> None:
        self.model = model
        self.module = module or model

    def set_gradient_sync(self, *, sync: bool) -> None:
        """Say whether the next backward pass reduces gradients over the ranks."""

    def finish_gradients(self) -> None:
        """Called after the backward passes of a step."""

    def reshard(self) -> None:
        """Free what has been gathered."""


def replicate(model: nn.Module, layers: Sequence[str], setup: Setup) -> Replica:
    """Replicate or shard `model` in place, as the strategy says; `layers` are names in it."""
    preset = setup.preset
    if preset.sharded:
        return _Sharded(model, layers, setup)
    if preset.data in {"ddp", "zero1"} and any(each.requires_grad for each in model.parameters()):
        return _DDP(model, setup)  # torch refuses a stage of which nothing is trained
    if preset.data == "manual":
        return _Manual(model)
    if preset.data == "dp":
        setup.context.log(_SLOW)
        return Replica(model, nn.DataParallel(model))
    return Replica(model)


class _Manual(Replica):
    """DDP written out: after the backward pass, all-reduce every gradient.

    Read it to understand DDP, but use DDP: it sends the gradients of a layer while those of earlier
    layers are still being computed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for parameter in model.parameters():
            distributed.broadcast(parameter.data, src=0)

    def finish_gradients(self) -> None:
        """Average the gradients over the ranks; a rank may have used fewer parameters."""
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        used = torch.tensor([each.grad is not None for each in parameters]).int()
        used = used.to(parameters[0].device)
        distributed.all_reduce(used, distributed.ReduceOp.MAX)
        for parameter, somewhere in zip(parameters, used.tolist(), strict=True):
            if somewhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()


class _DDP(Replica):
    """torch's DistributedDataParallel, with optional gradient compression."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        options = setup.options
        ddp = nn.parallel.DistributedDataParallel(
            model,
            process_group=(
                setup.layout.mesh.group("dp_replicate") if setup.preset.pipeline else None
            ),
            bucket_cap_mb=options.bucket_mb,
            find_unused_parameters=(
                options.find_unused_parameters or _has_unused_parameters(model, setup)
            ),
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
        )
        ddp.broadcast_buffers = False  # see `Strategy.average_buffers`
        timing.instrument_ddp(ddp, setup.timer)
        _register_compression(ddp, options.compress)
        super().__init__(model, ddp)

    def set_gradient_sync(self, *, sync: bool) -> None:
        """Reduce gradients in the next backward pass, or leave them on this rank."""
        ddp: Any = self.module
        if ddp.require_backward_grad_sync != sync:  # a module's attributes are slow to set
            ddp.require_backward_grad_sync = sync


def _has_unused_parameters(model: nn.Module, setup: Setup) -> bool:
    """Whether a parameter gets no gradient on any rank; DDP would wait for it. Collective."""
    if setup.preset.pipeline:
        return False
    objective, sample = setup.objective, setup.sample
    if setup.context_parallel is not None:
        sample = setup.context_parallel.part(sample)

    def loss() -> Tensor:
        return objective.loss(objective.outputs(model, sample.inputs), sample)

    with unchanged(model, setup.context.device):
        torch.autograd.backward(loss())
    unused = any(each.requires_grad and each.grad is None for each in model.parameters())
    model.zero_grad()
    return any(sum_over_ranks(setup.context, [unused]))


def _register_compression(ddp: nn.parallel.DistributedDataParallel, method: str | None) -> None:
    """Send gradients in 16 bits, or low-rank approximations of them (PowerSGD, lossy)."""
    if not method:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if method == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=UNCOMPRESSED_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{method}_compress_hook"))


class _Sharded(Replica):
    """ZeRO stages 2 and 3 with fully_shard: parameters, gradients and optimizer state are sharded.

    The parameters of a layer are gathered just before its forward pass. Stage 3 frees them
    afterwards and gathers them again for the backward pass. Stage 2 keeps them, which saves a third
    of the traffic at the cost of memory for all weights. HSDP shards within groups of ranks,
    ideally those of a node, and averages the gradients over the groups.
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

    Where tensor parallelism has sharded the layers, replicas of them are shards of one rank: DDP
    replaces sharded parameters by new tensors in every forward pass (torch 2.13), and then neither
    checkpoints, nor the gradient norm, nor recomputed activations find those of the optimizer.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], setup: Setup) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = setup.layout.mesh
        replicas = () if setup.layout.dims.dp_replicate == 1 else ("dp_replicate",)
        options = _fsdp_options(setup.options, pipeline=setup.preset.pipeline)
        for unit in (*map(model.get_submodule, layers), model):
            fully_shard(
                unit,
                mesh=mesh.axes(*replicas, "dp_shard"),
                reshard_after_forward=setup.preset.data != "zero2",
                **options,
            )
        if setup.layout.token_shard.num_shards > 1:
            _Watch(model, ["", *layers], setup)
        super().__init__(model)

    def set_gradient_sync(self, *, sync: bool) -> None:
        """Reduce gradients in the next backward pass, or keep whole ones on this rank."""
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(sync)

    def reshard(self) -> None:
        """Free the layers that an evaluation of stage 2 has left gathered."""
        for module in self.model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()


def _fsdp_options(options: TrainOptions, *, pipeline: bool) -> dict[str, Any]:
    """What FSDP communicates in, and where it keeps the shards.

    What computes in which precision is left to autocast. In bf16, parameters are gathered in 16
    bits, which halves the traffic, and gradients are reduced in 32, so that their sum is exact.
    Inputs are not cast, because autocast does that as in every other strategy. In fp16, parameters
    stay in 32 bits: with 16-bit parameters, gradients would be 16-bit even where autocast computes
    in 32 (normalization, embedding), and the scaled ones would overflow, so that steps would be
    skipped that no other strategy skips. Stages of a pipeline pass on hidden states in 32 bits,
    which 16-bit parameters would not fit.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    chosen: dict[str, Any] = {}
    if options.precision in {"bf16", "float8"} and not pipeline:
        chosen["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if options.offload:  # pinned memory speeds up copies to a GPU and requires one
        chosen["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return chosen


class _Watch:
    """Whether ranks that gather the weights of layers together run the same layers.

    `fully_shard` gathers a layer when it is called. Where a branch depends on the samples, ranks
    gather different layers: silently if these are of equal size. So in some forward passes, before
    a layer is gathered, ranks compare which one it is, and at the end, which parameters will get
    gradients. These are hooks of a model and its layers; the model itself has the number 0.
    """

    def __init__(self, model: nn.Module, names: list[str], setup: Setup) -> None:
        self._names = names
        self._strategy = setup.options.strategy
        self._micro_batches = setup.options.micro_batches
        self._device = setup.context.device
        self._group = setup.layout.token_shard.group
        self._passes = 0
        self._active = False
        self._parameters: dict[Tensor, str] = {}
        """Those that have been gathered in this pass, by name."""
        eager: Callable[[Any], Any] = (
            torch.compiler.disable if setup.options.compile else lambda hook: hook
        )
        for number, name in enumerate(names):
            module = model.get_submodule(name)
            before = partial(self._before, number) if number else self._begin
            module.register_forward_pre_hook(eager(before), prepend=True)
            module.register_forward_pre_hook(eager(partial(self._gathered, name)))
        model.register_forward_hook(eager(self._end))

    def _begin(self, *_: Any) -> None:
        step, self._passes = self._passes // self._micro_batches, self._passes + 1
        self._active = step < FIRST or step % INTERVAL == 0

    def _before(self, number: int, *_: Any) -> None:
        if self._active:
            self._compare(number)

    def _gathered(self, name: str, module: nn.Module, _arguments: Any) -> None:
        if self._active:
            prefix = f"{name}." if name else ""
            self._parameters |= {each: prefix + own for own, each in module.named_parameters()}

    def _end(self, _module: nn.Module, _arguments: Any, outputs: Any) -> None:
        if self._active:
            names, self._parameters = self._parameters, {}
            self._compare(0, sorted({names[each] for each in _leaves(outputs) if each in names}))

    def _compare(self, number: int, used: Sequence[str] = ()) -> None:
        """Compare the number of the next layer, or 0 at the end, and the parameters in use."""
        key = [number, zlib.crc32("\n".join(used).encode())]
        extremes = torch.tensor([*key, *(-each for each in key)], device=self._device)
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self._group)
        if extremes.tolist() != [*key, *(-each for each in key)]:
            self._refuse(number, used)
        # equal to the largest and the smallest: the same on all ranks

    def _refuse(self, number: int, used: Sequence[str]) -> NoReturn:
        """Raise UnequalRanksError, with what two of the ranks do. Collective."""
        states: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(states, (number, list(used)), group=self._group)
        two = [states[0], next(each for each in states if each != states[0])]
        (one, other), (parts, others) = zip(*two, strict=True)
        ranks = [_rank(self._group, states.index(each)) for each in two]
        if one != other:
            where = [self._names[each] or "the end of the model" for each in (one, other)]
            what = f"rank {ranks[0]} reached {where[0]} and rank {ranks[1]} reached {where[1]}"
        else:
            differ = sorted(set(parts) ^ set(others))
            only = ranks[0] if differ[0] in parts else ranks[1]
            what = f"only rank {only} has gradients of {', '.join(differ[:3])}"
        raise UnequalRanksError(
            f"--strategy {self._strategy} requires the same layers on every rank, but {what}. "
            f"{_ADVICE}",
            first=distributed.get_rank(self._group) == 0,
        )


def _rank(group: distributed.ProcessGroup | None, number: int) -> int:
    return number if group is None else distributed.get_global_rank(group, number)


def _leaves(outputs: Any) -> Iterator[Tensor]:
    """The leaves of the graph that derivatives of `outputs` reach."""
    pending = [each.grad_fn for each in _tensors(outputs) if each.grad_fn is not None]
    seen: set[Any] = set(pending)
    while pending:
        node: Any = pending.pop()
        if hasattr(node, "variable"):
            yield node.variable
        after = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= after
        pending += after


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a structure, and those that an object has as attributes."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (each for each in vars(leaf).values() if isinstance(each, Tensor))
