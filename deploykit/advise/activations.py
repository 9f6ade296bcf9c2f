"""Bytes of activations that one rank keeps from the forward to the backward pass.

Counted tensor by tensor for the reference trainer's block, as Korthikanti et al. do for theirs
(https://arxiv.org/abs/2205.05198, section 4), with two differences: no dropout, and attention by
scaled_dot_product_attention, which keeps no scores
(https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html).
"""

from __future__ import annotations

from deploykit.advise.model_shape import Model, Sample
from deploykit.advise.workload import COMPUTE_BYTES, FULLY_SHARDED, ParallelConfig, Training

_STATISTIC = 4
"""Bytes of a mean, a standard deviation or a log-sum-exp, which stay in fp32."""
_INDEX = 8
_LOGIT = 4
_LOSS_COPIES = 3
"""Tensors as large as the logits while the loss is differentiated: the log-probabilities, their
gradient and that of the logits. torch.compile fuses the first two."""
_SPLIT_LOSS_COPIES = 4
"""The same under loss_parallel, which takes separate steps: the log-probabilities, their
exponential, the mask of the targets, and the sum of these two
(torch/distributed/tensor/parallel/loss.py)."""


def of_stage(
    model: Model, training: Training, config: ParallelConfig, blocks: int, stage: int
) -> int:
    """Bytes for `blocks` blocks on a pipeline stage, with all micro-batches in flight there.

    In the 1F1B schedule stage i of p holds up to p - i micro-batches
    (https://arxiv.org/abs/2104.04473, section 2.2). With checkpointing a block keeps only its
    input, with selective checkpointing some outputs more.
    """
    if model.sample is not None:
        return in_flight(config, stage) * _sampled(model, model.sample, training, config)
    tokens = micro_tokens(training, config)
    last = stage == config.pipeline - 1
    each = _residual if config.checkpointing else _selected if config.selective else of_block
    kept = int(in_flight(config, stage) * blocks * tokens * each(model, training, config))
    return kept + tokens * of_ends(model, training, config, first=stage == 0, last=last)


def in_flight(config: ParallelConfig, stage: int) -> int:
    """Micro-batches of a stage that are between their forward and backward passes."""
    return min(config.micro_batches, config.pipeline - stage)


def recomputed(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of a checkpointed block while its backward pass runs.

    They are what the block would keep without checkpointing, the gradient of its output, and that
    of the MLP's inner tensor.
    """
    size = COMPUTE_BYTES[training.precision]
    if model.sample is not None:
        return config.checkpointing * _sampled(model, model.sample, training, config)
    gradients = (model.width + model.feedforward) * size / config.tensor
    whole = of_block(model, training, config) + gradients
    again = config.checkpointing or config.selective
    return int(again * micro_tokens(training, config) * whole)


def micro_tokens(training: Training, config: ParallelConfig) -> int:
    """Tokens of one micro-batch on one rank, rounded up."""
    return -(-training.tokens // (config.data * config.micro_batches))


def of_block(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of one block per token, on one of `config.tensor` ranks.

    Tensors of the model's width: 2 inputs of the norms; 2 inputs of query, key and value and of
    the MLP's first layer (4 under autocast, since each Linear casts the fp32 output of a norm);
    4 for query, key, value and the attention's output. Tensors of the MLP's width: 2 around the
    GELU, or 4 of a gated MLP (both products, the activation, and what is multiplied). Tensor
    parallelism with sequence parallelism splits all but the inputs of the column-wise layers, which
    DTensor gathers and keeps whole.
    """
    width, size = model.width, COMPUTE_BYTES[training.precision]
    copies = 4 if _wide_norms(training, config) else 2
    norms = 2 * _norm_input(model, training, config)
    around = 4 if model.gated else 2
    inner = (4 * width + around * model.feedforward) * size / config.tensor
    statistics = (4 + model.heads) * _STATISTIC / config.tensor
    return int(norms + copies * width * size + inner + statistics)


def _selected(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token that a block keeps with selective checkpointing: its input and the outputs of
    attention and of every other product, as torchtitan does by operator: query, value, the MLP's
    first and last.
    """
    kept = (3 + model.kv_share) * model.width + model.feedforward
    statistics = model.heads * _STATISTIC
    rest = (kept * COMPUTE_BYTES[training.precision] + statistics) / config.tensor
    return _residual(model, training, config) + rest


def _sampled(model: Model, sample: Sample, training: Training, config: ParallelConfig) -> int:
    """Bytes that a counted model keeps of a micro-batch; with checkpointing one layer's worth."""
    share = training.batch / (config.data * config.micro_batches * config.pipeline)
    layers = max(1, model.layers) if config.checkpointing else 1
    return int(share * sample.saved * COMPUTE_BYTES[training.precision] / layers)


def casts_weights(training: Training, config: ParallelConfig) -> bool:
    """Whether torch.autocast casts the weights; fully_shard gathers them in 16 bits instead."""
    return _is_autocast(training) and config.strategy not in FULLY_SHARDED and not config.lora


def _is_autocast(training: Training) -> bool:
    return training.precision in {"bf16", "fp16"}


def _wide_norms(training: Training, config: ParallelConfig) -> bool:
    """Whether norms return fp32: under autocast on a GPU always, on a CPU if their input is fp32
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
    """
    gathered = config.strategy in FULLY_SHARDED
    return _is_autocast(training) and not (training.on_cpu and gathered)


def _norm_input(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token that a norm keeps of its input."""
    size = 4 if _wide_norms(training, config) else COMPUTE_BYTES[training.precision]
    return model.width * size / config.tensor


def _residual(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token of the residual stream, in the precision of the embedding's weights."""
    size = 4 if casts_weights(training, config) else COMPUTE_BYTES[training.precision]
    return model.width * size / config.tensor


def of_ends(
    model: Model, training: Training, config: ParallelConfig, *, first: bool, last: bool
) -> int:
    """Bytes per token of the embedding (the token's index) and of the head's norm and Linear.

    Tensor parallelism gathers the input of the head's Linear.
    """
    head = _norm_input(model, training, config) + model.width * COMPUTE_BYTES[training.precision]
    return int(first * _INDEX + last * (head + 2 * _STATISTIC + _INDEX))


def of_logits(model: Model, training: Training, config: ParallelConfig) -> int:
    """Peak bytes of the logits of one micro-batch and of their copies in the loss.

    Cross-entropy is computed in fp32, as autocast does
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). nn.DataParallel collects
    the logits of all GPUs on the first one. Tensor parallelism with `loss_parallel` splits them.
    """
    share = config.data if config.strategy == "dp" else 1
    copies: float = _LOSS_COPIES - 1 if training.compiled else _LOSS_COPIES
    if config.tensor > 1 and training.loss_parallel:
        copies = _SPLIT_LOSS_COPIES / config.tensor
    logits = share * micro_tokens(training, config) * model.vocabulary * _LOGIT
    return int(logits * copies)


def of_boundary(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of the tensor that one micro-batch passes from one layer to the next."""
    return int(micro_tokens(training, config) * _residual(model, training, config))
