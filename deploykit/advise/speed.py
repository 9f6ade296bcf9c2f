"""Seconds of compute on one GPU: matrix products, attention, and memory traffic.

A step's operations take turns, so their times add up. Products run at the share of the peak that
large ones reach (`matmul` in gpus.toml), attention at that of its kernel (`attention`), and all
else at the speed of the memory: norms, activations and the loss do few operations per byte
(https://arxiv.org/abs/2007.00072, table 1). That is why a narrow model, or a layer that tensor
parallelism makes narrow, reaches a smaller share of the peak: its products shrink with the square
of the width, its traffic with the width.
"""

from __future__ import annotations

from deploykit.advise.gpus import Gpu
from deploykit.advise.model_shape import Model, Sample
from deploykit.advise.workload import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    WEIGHT_BYTES,
    ParallelConfig,
    Training,
)

_STREAMED = 0.85
"""Share of the memory's bandwidth that simple kernels reach. An estimate."""
_WIDE_PASSES = {(False, False): 20, (False, True): 8, (True, False): 58, (True, True): 12}
"""Times that a tensor of the model's width is read or written in a forward pass outside of
products and attention, by whether the model is a Llama and whether operations are fused, in units
of 16 bits. Two residual sums take 3 each. A LayerNorm is one kernel with an output in 32 bits that
is cast back: 5, and 4 for positions. RMSNorm runs as six kernels in 32 bits: 20, and rotary
positions as three: 12. Fused, a norm takes 2 (with its sum 4), rotary positions 4."""
_INNER_PASSES = {(False, False): 2, (False, True): 2, (True, False): 5, (True, True): 3}
"""The same for tensors of the MLP's inner width, by whether it is gated and fused. GELU reads and
writes one; a gate reads and writes one, then the product reads two and writes one."""
_ATTENTION_PASSES = 4
"""Query, key and value are read and the output is written."""
_SCORE_PASSES = 6
"""Without a fused kernel: the scores are written, read and written by the softmax and by dropout,
and read by the second product."""
_LOGIT_BYTES = {False: 34, True: 14}
"""Bytes of traffic per logit, forward and backward, by whether operations are fused. The product
writes 2 and its two gradients read 4; then a cast to fp32, log-softmax, its gradient and a cast
back: 28, or 8 in one kernel."""
_BACKWARD = 2
"""The backward pass has two products for each one of the forward pass, and twice the traffic."""
_FLASH_BACKWARD = 2.5
"""The same for a fused attention kernel, which computes the scores again
(https://arxiv.org/abs/2307.08691, section 4.1)."""
_RECOMPUTED = 0.4
"""Share of the products that selective checkpointing repeats: torchtitan's policy keeps every
other one (https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/
activation_checkpoint.py); the share of a Llama's weights is 0.36, of a GPT's 0.42."""
_UPDATE_ACCESSES = 7
"""AdamW reads weight, gradient and two states, and writes all but the gradient."""
_CAST_BYTES = 6
"""torch.autocast reads a weight in 32 bits and writes it in 16."""


def peak(training: Training, gpu: Gpu) -> float:
    """Operations per second of the data sheet; those of fp32 if the GPU does not support bf16."""
    name = "bf16" if training.precision == "pure-bf16" else training.precision
    return gpu.flops.get(name) or gpu.flops["fp32"]


def work(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of compute of one step on one rank, without waiting; an equal share of a pipeline."""
    if model.sample is not None:
        return _sampled(model.sample, training, gpu, config) + _per_step(
            model, training, gpu, config
        )
    tokens = training.tokens / config.data
    block, head = _block(model, training, gpu, config), _head(model, training, gpu, config)
    layers = tokens * (model.layers * block + head) / config.pipeline
    return layers + _per_step(model, training, gpu, config)


def _repeats(config: ParallelConfig) -> float:
    """Products per product of the forward pass: LoRA needs no gradients of frozen weights."""
    again = 1.0 if config.checkpointing else _RECOMPUTED if config.selective else 0.0
    return 1 + again + (_BACKWARD - config.lora)


def _block(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of a block, forward and backward."""
    products = 2 * model.block.matrices() / config.tensor * _repeats(config)
    size = COMPUTE_BYTES[training.precision]
    passes = _elementwise(model, training) / config.tensor
    again = 1 if config.checkpointing or config.selective else 0
    traffic = model.block.edges(config.tensor) * _repeats(config) + passes * (3 + again)
    return (
        products / (peak(training, gpu) * gpu.matmul)
        + _attention(model, training, gpu, config)
        + _streaming(traffic * size, gpu)
    )


def _attention(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of attention: half of the scores where the kernel skips the masked half."""
    forward = 4 * model.width * training.sequence / config.tensor
    again = 1 if config.checkpointing else 0
    if model.flash:
        operations = forward / 2 * (1 + again + _FLASH_BACKWARD)
        return operations / (peak(training, gpu) * gpu.attention)
    scores = model.heads * training.sequence / config.tensor * _SCORE_PASSES
    repeats = 1 + again + _BACKWARD
    traffic = scores * COMPUTE_BYTES[training.precision] * repeats
    return forward * repeats / (peak(training, gpu) * gpu.matmul) + _streaming(traffic, gpu)


def _elementwise(model: Model, training: Training) -> float:
    """Elements per token that a block's forward pass moves outside of products."""
    kind = model.gated, training.compiled
    wide = _WIDE_PASSES[kind] + _ATTENTION_PASSES
    return wide * model.width + _INNER_PASSES[kind] * model.feedforward


def _head(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of the head and the loss."""
    products = 2 * model.head_size * (1 + _BACKWARD) / config.tensor
    split = config.tensor if training.loss_parallel else 1
    traffic = model.vocabulary * _LOGIT_BYTES[training.compiled] / split
    return products / (peak(training, gpu) * gpu.matmul) + _streaming(traffic, gpu)


def _per_step(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of what is done once a step or once a micro-batch, whatever the number of tokens."""
    weights = model.parameters / (config.tensor * config.pipeline)
    shards = config.data if config.strategy == "zero1" else config.shards
    updated = 0.0 if config.lora else weights / shards
    traffic = updated * _UPDATE_ACCESSES * WEIGHT_BYTES[training.precision]
    if training.precision in {"bf16", "fp16"} and config.strategy not in FULLY_SHARDED:
        traffic += weights * _CAST_BYTES * config.micro_batches
    return _streaming(traffic, gpu)


def _sampled(sample: Sample, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of the samples of a model whose operations were counted."""
    again = 1 + config.checkpointing / 3
    each = sample.flops * again / (peak(training, gpu) * gpu.matmul)
    each += _streaming(sample.traffic * COMPUTE_BYTES[training.precision] * again, gpu)
    share = training.batch / (config.data * config.tensor * config.pipeline)
    return share * each


def _streaming(size: float, gpu: Gpu) -> float:
    return size / (gpu.bandwidth * _STREAMED)
