"""Whether ranks that gather the weights of layers together run the same layers.

`fully_shard` gathers a layer when it is called. Where a branch depends on the samples, ranks gather
different layers: silently if these are of equal size. So in some forward passes, before a layer is
gathered, ranks compare which one it is, and at the end, which parameters will get gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from trainer.errors import UnequalRanksError
from trainer.setup import Setup

FIRST, INTERVAL = 20, 100
"""Ranks compare in so many steps at the start, and in every so many after that."""
_ADVICE = (
    "A branch that depends on the samples does that, as in a mixture of experts or with LayerDrop: "
    "call the same layers on every rank, if need be with a result times 0, or use --strategy ddp "
    "--find-unused-parameters"
)


def watch(model: nn.Module, layers: Sequence[str], setup: Setup) -> None:
    """Compare the calls of these layers of `model`, which are gathered one by one."""
    if setup.layout.token_shard.num_shards > 1:
        _Watch(model, ["", *layers], setup)


class _Watch:
    """Hooks of a model and its layers; the model itself has the number 0."""

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
            what = f"rank {ranks[0]} came to {where[0]} and rank {ranks[1]} to {where[1]}"
        else:
            differ = sorted(set(parts) ^ set(others))
            only = ranks[0] if differ[0] in parts else ranks[1]
            what = f"only rank {only} has gradients of {', '.join(differ[:3])}"
        raise UnequalRanksError(
            f"--strategy {self._strategy} requires the same layers on every rank, and {what}. "
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
