"""Bytes that the forward pass leaves for the backward pass, of one rank.

Counted tensor by tensor for the reference trainer's block as Korthikanti et al. do for theirs
(https://arxiv.org/abs/2205.05198, section 4), with two differences: no dropout, and attention by
scaled_dot_product_attention, which keeps no scores
(https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html).
"""

from __future__ import annotations

from deploykit.advise.plan import COMPUTE_BYTES, FULLY_SHARDED, Layout, Training
from deploykit.advise.shape import Model

_STATISTIC = 4
"""Bytes of a mean, a deviation or a log-sum, which stay in fp32."""
_INDEX = 8
_LOGIT = 4
_LOSS_COPIES = 3
"""Tensors as large as the logits while the loss is differentiated: the log-probabilities, their
gradient and that of the logits."""


def of_stage(model: Model, training: Training, layout: Layout, blocks: int, stage: int) -> int:
    """Of the blocks of a pipeline stage, with all micro-batches that are under way there.

    In the 1F1B schedule stage i of p holds up to p - i micro-batches
    (https://arxiv.org/abs/2104.04473, section 2.2). With checkpointing a block keeps its input
    only.
    """
    tokens = micro_tokens(training, layout)
    last = stage == layout.pipeline - 1
    each = _residual if layout.checkpointing else of_block
    kept = int(under_way(layout, stage) * blocks * tokens * each(model, training, layout))
    return kept + tokens * of_ends(model, training, layout, first=stage == 0, last=last)


def under_way(layout: Layout, stage: int) -> int:
    """Micro-batches between their forward and their backward pass on a stage."""
    return min(layout.micro_batches, layout.pipeline - stage)


def recomputed(model: Model, training: Training, layout: Layout) -> int:
    """Bytes of a checkpointed block while its backward pass runs: all that it keeps otherwise, the
    gradient that enters it and that of the MLP's inner tensor.
    """
    size = COMPUTE_BYTES[training.precision]
    gradients = (model.width + model.feedforward) * size / layout.tensor
    whole = of_block(model, training, layout) + gradients
    return int(layout.checkpointing * micro_tokens(training, layout) * whole)


def micro_tokens(training: Training, layout: Layout) -> int:
    """Tokens of one micro-batch of one rank, rounded up."""
    return -(-training.tokens // (layout.data * layout.micro_batches))


def of_block(model: Model, training: Training, layout: Layout) -> int:
    """Bytes of one block for one token, on one of `layout.tensor` ranks.

    Elements for each of the width: inputs of the norms 2; inputs of query, key and value and of the
    MLP's first layer 2 (under autocast 4, since each Linear casts the fp32 output of a norm for
    itself); query, key, value and the attention's output 4; around the GELU 2 for each of the MLP's
    width. Tensor parallelism with sequence parallelism splits all but the inputs of the column-wise
    layers, which DTensor gathers and keeps whole.
    """
    width, size = model.width, COMPUTE_BYTES[training.precision]
    copies = 4 if _wide_norms(training, layout) else 2
    norms = 2 * _norm_input(model, training, layout)
    inner = (4 * width + 2 * model.feedforward) * size / layout.tensor
    statistics = (4 + model.heads) * _STATISTIC / layout.tensor
    return int(norms + copies * width * size + inner + statistics)


def casts_weights(training: Training, layout: Layout) -> bool:
    """Whether torch.autocast casts weights; fully_shard gathers them in 16 bits."""
    return _is_autocast(training) and layout.strategy not in FULLY_SHARDED


def _is_autocast(training: Training) -> bool:
    return training.precision in {"bf16", "fp16"}


def _wide_norms(training: Training, layout: Layout) -> bool:
    """Whether norms give fp32: under autocast on a GPU always, on a CPU where their input is fp32
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
    """
    gathered = layout.strategy in FULLY_SHARDED
    return _is_autocast(training) and not (training.on_cpu and gathered)


def _norm_input(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that a norm keeps of its input for one token."""
    size = 4 if _wide_norms(training, layout) else COMPUTE_BYTES[training.precision]
    return model.width * size / layout.tensor


def _residual(model: Model, training: Training, layout: Layout) -> float:
    """Bytes of the residual stream for one token: as wide as the embedding's weights."""
    size = 4 if casts_weights(training, layout) else COMPUTE_BYTES[training.precision]
    return model.width * size / layout.tensor


def of_ends(model: Model, training: Training, layout: Layout, *, first: bool, last: bool) -> int:
    """Bytes for one token of the embedding (its index) and of the head's norm and Linear, which
    tensor parallelism gathers.
    """
    head = _norm_input(model, training, layout) + model.width * COMPUTE_BYTES[training.precision]
    return int(first * _INDEX + last * (head + 2 * _STATISTIC + _INDEX))


def of_logits(model: Model, training: Training, layout: Layout) -> int:
    """Bytes of the logits of one micro-batch and of their copies in the loss, at the worst moment.

    Cross-entropy is computed in fp32, as autocast does by itself
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). nn.DataParallel collects
    the logits of all GPUs on the first one.
    """
    share = layout.data if layout.strategy == "dp" else 1
    return share * micro_tokens(training, layout) * model.vocabulary * _LOGIT * _LOSS_COPIES


def of_boundary(model: Model, training: Training, layout: Layout) -> int:
    """Bytes that one micro-batch carries from one layer to the next."""
    return int(micro_tokens(training, layout) * _residual(model, training, layout))
