"""Count what torch allocates for one training step of a small GPT, on each of several ranks.

    python -m tests.advise.count_bytes '[{"strategy": "ddp", "width": 64, ...}, ...]'

With torchrun's variables, rank 0 prints a line of JSON for each case with the largest figures of
all ranks; without them it is a group of one. Torch's own classes do the work: this knows nothing
of deploykit.
"""

import contextlib
import functools
import gc
import json
import os
import sys
import weakref
from collections import Counter

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.advise import tiny_gpt

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total(tensors):
    """Bytes of the local parts; what shares a storage, as FSDP2's gradients do, counts once."""
    storages = {}
    for tensor in map(local, tensors):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


class Ledger:
    """Storages that are referenced: their bytes now, and the peak."""

    def __init__(self):
        self.holders, self.bytes = Counter(), {}
        self.alive = self.most = 0

    def hold(self, storage):
        key = storage._cdata
        self.holders[key] += 1
        if self.holders[key] == 1:
            self.bytes[key] = storage.nbytes()
            self.alive += self.bytes[key]
            self.most = max(self.most, self.alive)

    def release(self, storage):
        key = storage._cdata
        self.holders[key] -= 1
        if not self.holders[key]:
            self.alive -= self.bytes.pop(key)


class Saved:
    """What autograd holds from forward to backward pass: activations, and 16-bit copies of weights.

    A copy is told by its shape, which no activation has. Parameters do not count.
    """

    def __init__(self, module):
        self.module = module
        self.shapes = {tuple(local(p).shape) for p in module.parameters() if p.ndim > 1}
        self.shapes |= {shape[::-1] for shape in self.shapes}
        self.activations, self.copies = Ledger(), Ledger()

    def pack(self, tensor):
        inner = local(tensor)
        storage = inner.untyped_storage()
        if storage._cdata in {local(p).untyped_storage()._cdata for p in self.module.parameters()}:
            return lambda: tensor
        copy = tuple(inner.shape) in self.shapes
        return Held(self.copies if copy else self.activations, tensor, storage)


class Held:
    def __init__(self, ledger, tensor, storage):
        self.ledger, self.tensor, self.storage = ledger, tensor, storage
        ledger.hold(storage)

    def __call__(self):
        return self.tensor

    def __del__(self):
        self.ledger.release(self.storage)


class Live(TorchDispatchMode):
    """All that torch's operations allocate: the bytes alive, and the peak."""

    def __init__(self, known):
        super().__init__()
        self.known, self.seen = known, {}
        self.alive = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(found)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.known and key not in self.seen:
                self.note(key, storage)
        return found

    def note(self, key, storage):
        self.alive += storage.nbytes()
        self.most = max(self.most, self.alive)
        gone = functools.partial(self.forget, key, storage.nbytes())
        self.seen[key] = weakref.ref(storage, gone)

    def forget(self, key, size, _):
        self.seen.pop(key)
        self.alive -= size


def tensor_parallel(model, mesh):
    """Tensor and sequence parallel, as torch's tutorial does for a transformer."""
    plan = {
        "0.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    }
    last = len(model) - 1
    for index in range(1, last):
        gathered = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        plan |= {
            f"{index}.norm1": SequenceParallel(),
            f"{index}.attention": PrepareModuleInput(**gathered),
            **{
                f"{index}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")
            },
            f"{index}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{index}.norm2": SequenceParallel(),
            f"{index}.mlp": PrepareModuleInput(**gathered),
            f"{index}.mlp.up": ColwiseParallel(),
            f"{index}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    plan |= {
        f"{last}.norm": SequenceParallel(),
        f"{last}.out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def sharded(model, mesh, precision, *, reshard):
    policy = MixedPrecisionPolicy(LOW.get(precision), torch.float32, cast_forward_inputs=False)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def stage_of(model, index, stages):
    """The layers of a stage: blocks distributed evenly, the first stages get the remainder."""
    blocks = list(model)[1:-1]
    each, more = divmod(len(blocks), stages)
    start = index * each + min(index, more)
    mine = blocks[start : start + each + (index < more)]
    first = [model[0]] if index == 0 else []
    last = [model[-1]] if index == stages - 1 else []
    return nn.Sequential(*first, *mine, *last)


class Stage(nn.Module):
    """A pipeline stage that casts its weights for each micro-batch."""

    def __init__(self, layers, autocast):
        super().__init__()
        self.layers, self.autocast = layers, autocast

    def forward(self, value):
        with self.autocast():
            return self.layers(value)


class Run:
    """One case: the model parallelized by a strategy, and one step of it."""

    def __init__(self, case):
        self.case = case
        self.world = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.strategy, self.precision = case["strategy"], case.get("precision", "fp32")
        self.low = LOW.get(self.precision, torch.float32)
        self.stages = case.get("pipeline", 1)
        tensor = case.get("tensor", 1)
        self.data = self.world // (self.stages * tensor)
        torch.manual_seed(0)
        names = ("layers", "width", "heads", "vocabulary", "positions")
        whole = tiny_gpt.build(**{name: case[name] for name in names})
        for block in whole[1:-1]:
            block.recompute = case.get("checkpointing", False)
        if self.precision == "pure-bf16":
            whole = whole.bfloat16()
        self.model = self.lay_out(whole, tensor)
        self.optimizer = self.optimize()

    def lay_out(self, model, tensor):
        """The model, or this rank's part of it, parallelized by the strategy."""
        if self.stages > 1:
            mesh = init_device_mesh("cpu", (self.stages, self.data), mesh_dim_names=("pp", "dp"))
            self.group, self.stage = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
            model = Stage(stage_of(model, self.stage, self.stages), self.autocast)
            return self.replicated(model, mesh["dp"]) if self.data > 1 else model
        if tensor > 1:
            mesh = init_device_mesh("cpu", (self.data, tensor), mesh_dim_names=("dp", "tp"))
            model = tensor_parallel(model, mesh["tp"])
            if self.strategy == "fsdp-tp":
                return sharded(model, mesh["dp"], self.precision, reshard=True)
            self.copies = mesh["dp"].get_group()  # DDP would put other tensors in the slices' place
            return model
        if self.strategy in {"ddp", "zero1"}:
            return self.replicated(model, None)
        if self.strategy in {"zero2", "zero3", "hsdp"}:
            shape = (2, self.world // 2) if self.strategy == "hsdp" else (self.world,)
            mesh = init_device_mesh(
                "cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]
            )
            return sharded(model, mesh, self.precision, reshard=self.strategy != "zero2")
        return model

    def replicated(self, model, mesh):
        place = {"device_mesh": mesh} if mesh else {}
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **place)

    def optimize(self):
        kind, options = OPTIMIZERS[self.case.get("optimizer", "adamw")]
        if self.strategy == "zero1":
            return ZeroRedundancyOptimizer(self.model.parameters(), kind, **options)
        return kind(self.model.parameters(), **options)

    def step(self):
        case = self.case
        shape = (case["batch"] // self.data, case["positions"])
        tokens = torch.randint(0, case["vocabulary"], shape)
        saved = Saved(self.model)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held())
        with hooks:
            self.pipelined(tokens) if self.stages > 1 else self.plain(tokens)
        return saved

    def plain(self, tokens):
        for piece in tokens.chunk(self.case.get("micro_batches", 1)):
            with self.autocast():
                loss = tiny_gpt.loss(self.model(piece), piece)
            loss.backward()
        for parameter in self.model.parameters() if self.strategy == "tp-dp" else ():
            distributed.all_reduce(local(parameter.grad), group=self.copies)

    def autocast(self):
        if self.precision not in LOW:
            return contextlib.nullcontext()
        return torch.autocast("cpu", LOW[self.precision])

    def pipelined(self, tokens):
        piece = tokens.chunk(self.case["micro_batches"])[0]
        between = torch.zeros(*piece.shape, self.case["width"], requires_grad=True)
        logits = torch.zeros(*piece.shape, self.case["vocabulary"], requires_grad=True)
        stage = PipelineStage(
            self.model,
            self.stage,
            self.stages,
            torch.device("cpu"),
            input_args=between if self.stage else piece,
            output_args=between if self.stage < self.stages - 1 else logits.to(self.low),
            group=self.group,
        )
        schedule = Schedule1F1B(stage, self.case["micro_batches"], loss_fn=tiny_gpt.loss)
        last = {"target": tokens} if self.stage == self.stages - 1 else {}
        schedule.step(*([tokens] if self.stage == 0 else []), **last)

    def counted(self):
        known = {local(p).untyped_storage()._cdata for p in self.model.parameters()}
        alone = distributed.get_world_size() == 1
        with Live(known) if alone else contextlib.nullcontext(Live(known)) as live:
            saved = self.step()
        self.optimizer.step()
        inner = self.optimizer.optim if self.strategy == "zero1" else self.optimizer
        states = [value for state in inner.state.values() for value in state.values()]
        parameters = list(self.model.parameters())
        return {
            "parameters": total(parameters),
            "gradients": total(p.grad for p in parameters),
            "optimizer": total(value for value in states if torch.is_tensor(value)),
            "activations": saved.activations.most,
            "copies": saved.copies.most,
            "peak": live.most,
        }


def join():
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def main():
    torch.set_num_threads(1)
    join()
    for case in json.loads(sys.argv[1]):
        mine = Run(case).counted()
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, mine)
        if distributed.get_rank() == 0:
            most = {name: max(one[name] for one in everyone) for name in mine}
            sys.stdout.write(json.dumps(most) + "\n")
        gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
