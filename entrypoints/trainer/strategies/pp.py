"""Pipeline: each rank holds some layers, and micro-batches pass from rank to rank and back."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from trainer import balance, bubble
from trainer.balance import Cut, Layer
from trainer.bubble import Bubble, TimedStage
from trainer.data import Batch, Share
from trainer.group import Place, from_first
from trainer.strategies.single import MakeOptimizer, Single

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class PP(Single):
    """Stage s is on rank s modulo the length of the pipeline; the last stage has the loss."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.ranks = options.pipeline_parallel or self.usual(place.world)
        self.order = options.schedule or "1f1b"
        self.per_rank = options.stages_per_rank or (2 if self.order == "interleaved" else 1)
        super().__init__(options, place)
        mesh = place.mesh(pp=self.ranks, dp=place.world // self.ranks)
        self.group, self.data_mesh = mesh.get_group("pp"), mesh["dp"]
        self.position = mesh.get_local_rank("pp")
        self.share = Share(mesh.get_local_rank("dp"), self.data_mesh.size())
        self.averaged = self.share.of
        self.counts = self.position == self.ranks - 1
        self.bubble = Bubble(place.device, self.group)

    @staticmethod
    def usual(world: int) -> int:
        """The length of a pipeline that no option says."""
        return world

    def check(self) -> None:
        pieces = self.options.micro_batches
        problems = [*self.misfits(), *_misfits(self.order, pieces, self.ranks, self.per_rank)]
        if problems:
            raise ValueError("; ".join(problems))

    def misfits(self) -> Iterator[str]:
        """What is wrong with the number of ranks."""
        if self.ranks != self.place.world:
            yield (
                f"--strategy pp is one pipeline over all {self.place.world} rank(s), and "
                f"--pipeline-parallel is {self.ranks}: leave it out, or use pp-dp for several"
            )

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        model = self.layered(model)
        cut = self._cut(model)
        self.place.say(self._plan(cut))
        layers = dict(model.named_children())
        mine = range(self.position, len(cut), self.ranks)
        held = [OrderedDict((layer.name, layers[layer.name]) for layer in cut[n]) for n in mine]
        self.model = nn.Sequential(OrderedDict(pair for part in held for pair in part.items()))
        self.model.to(self.place.device)
        modules = [self.spread(Stage(part, self)) for part in held]
        self.optimizer = make_optimizer(self.model.parameters())
        stages = [self._stage(*pair, cut) for pair in zip(modules, mine, strict=True)]
        self.schedule = SCHEDULES[self.order](
            stages if self.order == "interleaved" else stages[0],
            n_microbatches=self.options.micro_batches,
            loss_fn=self._piece_loss,
            scale_grads=False,  # our loss is a part of the global mean already
        )

    def spread(self, stage: nn.Module) -> nn.Module:
        """A stage, laid out over the ranks that work on it with other samples."""
        return stage

    def _cut(self, model: nn.Sequential) -> Cut:
        """Rank 0 measures, and all cut alike."""
        layers = self._measured(model) if self.place.first else None
        layers = from_first(self.place, layers)
        cut = balance.by_layers if self.options.balance == "layers" else balance.by_time
        return cut(layers, self.ranks * self.per_rank)

    def _measured(self, model: nn.Sequential) -> list[Layer]:
        piece = self.pieces(self.sample)[0]

        def forward(layer: nn.Module, value: Tensor) -> Tensor:
            with self.autocast():
                return layer(value)

        return balance.measure(model, piece.inputs, forward, lambda out: self.loss(out, piece))

    def _plan(self, cut: Cut) -> str:
        """What will be done, and how well it should work."""
        times = [sum(layer.seconds for layer in stage) for stage in cut]
        self.rank_seconds = [sum(times[rank :: self.ranks]) for rank in range(self.ranks)]
        stages = ", ".join(
            f"[{' '.join(layer.name for layer in stage)}] {seconds * 1000:.2f} ms"
            for stage, seconds in zip(cut, times, strict=True)
        )
        way, pieces = self.options.balance or "time", self.options.micro_batches
        predicted = bubble.predicted(self.rank_seconds, pieces, self.per_rank)
        ideal = bubble.ideal(self.ranks, pieces, self.per_rank)
        return (
            f"pipeline: {self.order}, {pieces} micro-batches, {len(cut)} stages by {way}: "
            f"{stages}; bubble {predicted:.1%} predicted, {ideal:.1%} if all were equal"
        )

    def _stage(self, module: nn.Module, number: int, cut: Cut) -> TimedStage:
        """Told what it receives and sends, a stage need not try out the model with real data.

        Trying it out would run DDP's hooks, after which GPipe's first backward pass fails.
        """
        sample = self.pieces(self.sample)[0].inputs
        given = cut[number - 1][-1].out.requires_grad_() if number else sample
        stage = TimedStage(
            module,
            number,
            len(cut),
            self.place.device,
            input_args=given,
            output_args=cut[number][-1].out.requires_grad_(),
            group=self.group,
        )
        stage.clock, stage.bubble = self.clock, self.bubble
        return stage

    def forward(self, inputs: Tensor) -> Tensor | None:
        return self.schedule.eval(inputs, target=inputs)  # a target is asked for, and not used

    def backward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        self._factor, self._count = self.averaged * scale, batch.count
        self._loss = torch.zeros((), dtype=torch.float64, device=self.place.device)
        with self.bubble.step():
            self.schedule.step(batch.inputs, target=batch.targets, return_outputs=False)
        return self._loss

    def _piece_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of one micro-batch, on the last stage; none in evaluation."""
        if not torch.is_grad_enabled():
            return outputs.new_zeros(())
        with self.clock("forward"), self.bubble.busy():
            part = self.loss(outputs, Batch(outputs, targets, self._count))
            self._loss += part.detach()
            return part * self._factor

    @property
    def apart(self) -> Sequence[ProcessGroup]:
        return (self.group,)

    def measures(self) -> dict[str, float]:
        found = self.bubble.latest()
        return {} if found is None else {"bubble": found}

    def summary(self) -> str:
        shares = self.bubble.shares()
        if not shares:
            return ""
        each = ", ".join(f"{share:.1%}" for share in shares)
        return f"pipeline: bubble {sum(shares) / len(shares):.1%} measured ({each} of each rank)"


class Stage(nn.Sequential):
    """Consecutive layers, in the precision that the strategy says."""

    def __init__(self, layers: OrderedDict[str, nn.Module], strategy: Single) -> None:
        super().__init__(layers)
        self._autocast = strategy.autocast

    def forward(self, value: Tensor) -> Tensor:
        with self._autocast():
            return super().forward(value)


def _misfits(schedule: str, pieces: int, ranks: int, per_rank: int) -> Iterator[str]:
    """What schedule, micro-batches and stages do not allow."""
    interleaved = schedule == "interleaved"
    if interleaved != (per_rank > 1):
        yield (
            f"--stages-per-rank {per_rank} and --schedule {schedule} exclude each other: only "
            "interleaved has several stages on a rank, and needs at least 2"
        )
    if interleaved and ranks == 1:
        yield "--schedule interleaved needs at least two ranks; use 1f1b, or start more"
    if interleaved and pieces % ranks:
        yield (
            f"--micro-batches {pieces} must be a multiple of the {ranks} ranks of a pipeline for "
            f"--schedule interleaved: {4 * ranks} is a good value"
        )
    if schedule == "1f1b" and pieces < ranks:
        yield (
            f"--micro-batches {pieces} must be at least the {ranks} stages for --schedule 1f1b, "
            f"or ranks stay idle: {4 * ranks} is a good value"
        )
