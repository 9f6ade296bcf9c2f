"""`advise` on cases whose answer is known from the field, each with the reason of an expert."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from deploykit.advise import Cluster, Training, advise, gpt, gpt_of_size, gpus, report
from deploykit.advise.models import from_counts
from tests.advise.published import llama
from tests.advise.test_own_models import COUNTED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/models"
M, B = 10**6, 10**9
SHARDED = {"zero2", "zero3", "hsdp"}
GIGABIT = 10**9 / 8
INFINIBAND = {"fabric": "infiniband", "bandwidth": 200e9}
EFA = {"fabric": "efa", "bandwidth": 400e9}
EFA_400 = {"fabric": "efa", "bandwidth": 50e9}
TIGHT = 0.9
WIDE = 32
COPY = "a full copy of the model fits"
NOTHING = MappingProxyType({})


class Case(NamedTuple):
    """A model on a cluster: GPUs per node x nodes, samples of a step, tokens of a sample.

    `model` may be a number of parameters. `strategies` are those that an expert would accept,
    `switches` what goes with them, `said` parts of the output, `lacking` what the reference trainer
    has no option for.
    """

    model: object
    gpu: str
    shape: tuple[int, int]
    batch: int
    sequence: int
    strategies: set[str]
    said: tuple[str, ...]
    switches: dict[str, object] = NOTHING
    training: dict[str, object] = NOTHING
    network: dict[str, object] = NOTHING
    lacking: tuple[str, ...] = ()


LLAMA_405B = llama(
    layers=126, width=16384, heads=128, kv_heads=8, feedforward=53248, vocabulary=128_256
)
LLAMA_70B = llama(
    layers=80, width=8192, heads=64, kv_heads=8, feedforward=28672, vocabulary=128_256
)
BERT_LARGE = gpt(layers=24, width=1024, heads=16, vocabulary=30_522, positions=512)

KNOWN = {
    # 112 GB of states fit on no GPU, 14 GB of them on each of eight with NVLink between them. What
    # is left is too little for all activations of a batch of 64. MosaicML trained MPT-7B so:
    # https://www.databricks.com/blog/mpt-7b
    "7B on 8 A100-40": Case(
        7 * B, "a100-40gb", (8, 1), 64, 2048, {"zero3"},
        ("does not fit on a GPU (ddp needs", "checkpointing"), {"checkpointing": True},
    ),
    # 21 GB of states on GPUs of 16 GB: sharded, 2.6 GB on each. NVLink makes the gathers cheap
    "1.3B on 8 V100": Case(
        1300 * M, "v100", (8, 1), 64, 1024, {"zero2", "zero3"},
        ("does not fit on a GPU (ddp needs", "8 shards"), {}, {"precision": "fp16"},
    ),
    # 1.1 TB of states over 64 GPUs: 17 GB each; at 400 Gb/s for each GPU gathers hide behind the
    # work, and no layer needs a plan. torchtitan ran Llama 70B on 64 GPUs so, a sample on each:
    # https://github.com/pytorch/torchtitan/blob/157a12c5/docs/performance.md
    "70B on 64 H100 with EFA": Case(
        LLAMA_70B, "h100", (8, 8), 64, 8192, {"zero3"},
        ("checkpointing", "zero2 does not fit", "fsdp-tp: splits layers"), {"checkpointing": True},
        {}, {"fabric": "efa", "bandwidth": 3200 * GIGABIT},
    ),
    # a copy fits, 5 GB of 15; gradients over TCP are the limit: send half
    "300M on 4 T4 over TCP": Case(
        300 * M, "t4", (1, 4), 32, 1024, {"ddp"},
        (COPY, "gradients in fp16"), {"compress": "fp16"},
        {"precision": "fp16"}, {"fabric": "tcp", "bandwidth": 25 * GIGABIT},
    ),
    # 5.4 GB of states, accumulated micro-batches: nothing is simpler than a copy on each
    "BERT-large on 8 V100": Case(
        BERT_LARGE, "v100", (8, 1), 256, 512, {"ddp"},
        (COPY, "micro-batches"), {"compress": ""}, {"precision": "fp16"},
    ),
    # 26M parameters: 100 MB of gradients over NVLink while the backward pass runs
    "ResNet-50 on 8 V100": Case(
        from_counts(COUNTED["resnet_50"]), "v100", (8, 1), 512, 1, {"ddp"},
        (COPY, "samples/s"), {"checkpointing": False, "selective": False},
        {"precision": "fp16", "optimizer": "sgd-momentum"},
    ),
    # 26 GB of weights and 51 of states, of which a batch needs a few rows
    "a recommender with a 6.4B table on 8 A100-40": Case(
        from_counts(COUNTED["recommender"]), "a100-40gb", (8, 1), 65_536, 26, {"sharded-table"},
        ("not even one layer fits", "ddp does not fit"), {}, {}, {},
        ("sharded tables",),
    ),
    # torchtitan's and Meta's own layout: layers split inside the nodes, stages between them, so
    # that few nodes wait for each other in each layer
    "405B on 512 H100": Case(
        LLAMA_405B, "h100", (8, 64), 256, 8192, {"pp-fsdp-tp"},
        ("8 tensor-parallel ranks", " stages", "fsdp-tp shards over 64 nodes"), {}, {},
        {"fabric": "infiniband", "bandwidth": 3200 * GIGABIT},
    ),
    # 208 GB of states on 160: adapters on 26 GB of frozen weights, or the host's memory
    "13B fine-tuned on 2 A100-80": Case(
        13 * B, "a100-80gb", (2, 1), 16, 2048, {"ddp"},
        ("LoRA", "without --offload auto"), {"lora": True}, {"lora": None}, {},
        ("LoRA",),
    ),
    # one process: 1.6 GB of states of 8 GB, and no second GPU
    "100M on a laptop": Case(
        100 * M, "cpu", (1, 1), 8, 512, {"single"},
        (COPY, "single: one process"), {}, {"on_cpu": True, "precision": "fp32"},
    ),
    # https://github.com/karpathy/nanoGPT: a copy fits on each GPU, so nothing is split
    "GPT-2 124M on 8 A100-40GB": Case(124 * M, "a100-40gb", (8, 1), 480, 1024, {"ddp"}, (COPY,)),
    "1.3B on 8 A100-80GB": Case(1300 * M, "a100-80gb", (8, 1), 512, 2048, {"ddp"}, (COPY,)),
    # https://www.databricks.com/blog/mpt-7b: FSDP alone; a tight mix with tensor parallelism is no
    # better for being a little faster on paper
    "7B on 8 A100-40GB": Case(
        7 * B, "a100-40gb", (8, 1), 64, 2048, {"zero3"}, ("is fsdp-tp: splits layers, 9% faster",)
    ),
    "7B on 55 nodes of 8 A100-40GB": Case(
        7 * B, "a100-40gb", (8, 55), 1760, 2048, SHARDED,
        ("does not fit on a GPU",), network=INFINIBAND
    ),
    # https://github.com/foundation-model-stack/fms-fsdp, 128 A100-80GB with 400 Gb/s: HSDP or FSDP
    # for every size, with two samples on each GPU
    "7B on 16 nodes of 8 A100-80GB": Case(
        7 * B, "a100-80gb", (8, 16), 256, 4096, SHARDED, ("does not fit on a GPU",), network=EFA_400
    ),
    "13B on 16 nodes of 8 A100-80GB": Case(
        13 * B, "a100-80gb", (8, 16), 256, 4096, SHARDED,
        ("does not fit on a GPU",), network=EFA_400
    ),
    "70B on 16 nodes of 8 A100-80GB": Case(
        70 * B, "a100-80gb", (8, 16), 256, 4096, {"zero3"}, ("checkpointing",), network=EFA_400
    ),
    # https://arxiv.org/abs/2410.06511, Llama 3.1 8B: FSDP on one node
    "8B on 8 H100": Case(8 * B, "h100", (8, 1), 16, 8192, SHARDED, ("8 shards",)),
    # https://huggingface.co/docs/transformers/perf_train_gpu_many: several nodes with a fast
    # network: ZeRO, which changes the model least
    "13B on 2 nodes of 8 A100-80GB": Case(
        13 * B, "a100-80gb", (8, 2), 128, 2048, SHARDED,
        ("does not fit on a GPU",), network=INFINIBAND
    ),
    # the same page: a slow network gets activations only, so a pipeline with a stage in each node
    "7B on 2 nodes of 8 A100-40GB over TCP": Case(
        7 * B, "a100-40gb", (8, 2), 128, 2048, {"pp", "pp-dp", "pp-fsdp-tp"}, ("stages",)
    ),
    # https://arxiv.org/abs/2104.04473, section 5: tensor parallelism only over NVLink
    "3B on 8 A10G without NVLink": Case(
        3 * B, "a10g", (8, 1), 64, 2048, {"zero3"}, ("splits layers",)
    ),
    "7B on 8 L40S without NVLink": Case(
        7 * B, "l40s", (8, 1), 64, 2048, {"zero3"}, ("zero2 uses over 90% of the memory",)
    ),
    # https://arxiv.org/abs/2205.05198: fewer samples than GPUs, so layers must be split
    "7B on 8 A100-80GB with a batch of 4": Case(
        7 * B, "a100-80gb", (8, 1), 4, 4096, {"tp", "tp-dp", "fsdp-tp"}, ("tensor-parallel ranks",)
    ),
    # https://arxiv.org/abs/2204.06745 (GPT-NeoX-20B): tensor parallelism over 2, 4 stages
    "20B on 12 nodes of 8 A100-40GB": Case(
        20 * B, "a100-40gb", (8, 12), 1536, 2048, {"pp-fsdp-tp"},
        ("tensor-parallel ranks, 4 stages",),
        network=INFINIBAND,
    ),
    # https://arxiv.org/abs/2410.06511, Llama 3.1 70B on 256 H100: FSDP, then tensor parallelism
    "70B on 32 nodes of 8 H100": Case(
        70 * B, "h100", (8, 32), 512, 8192, {"zero3", "hsdp"},
        ("next best is fsdp-tp",), network=EFA
    ),
    # the same paper: 405B on 512 H100 in three dimensions
    "405B on 64 nodes of 8 H100": Case(
        405 * B, "h100", (8, 64), 512, 8192, {"pp-fsdp-tp"}, ("zero3 does not fit",), network=EFA
    ),
    # https://arxiv.org/abs/2211.05100 (BLOOM): tensor parallelism over 4, pipelines
    "176B on 48 nodes of 8 A100-80GB": Case(
        176 * B, "a100-80gb", (8, 48), 2048, 2048, {"pp-fsdp-tp"}, ("4 tensor-parallel ranks, ",),
        network=INFINIBAND,
    ),
    # https://arxiv.org/abs/2101.06840 (ZeRO-Offload): states in host memory
    "10B on one V100-32GB": Case(
        10 * B, "v100-32gb", (1, 1), 8, 1024, {"zero3"}, ("CPU offload",),
        training={"precision": "fp16", "offload": None},
    ),
}  # fmt: skip


def can_run(config):
    return not report.lacking(config)


@functools.cache
def advice_on(name, allowed=lambda _: True):
    case = KNOWN[name]
    gpu = gpus.find(case.gpu)
    model = case.model
    if isinstance(model, int):
        model = gpt_of_size(model, vocabulary=32_000, positions=case.sequence)
    training = Training(case.batch, case.sequence, **{"offload": False, **case.training})
    return advise(model, training, Cluster(gpu, *case.shape, gpu.link, **case.network), allowed)


@pytest.mark.parametrize("name", KNOWN)
def test_the_answer_is_that_of_the_field_with_its_reason(name):
    case, advice = KNOWN[name], advice_on(name)
    verdicts = [f"{each.strategy} {advice.verdict(each)}" for each in advice.candidates]
    said = " ".join([report.recommendation(advice), *verdicts, *report.notes(advice)])
    assert advice.best.strategy in case.strategies, said
    config = advice.best.config
    assert {key: getattr(config, key) for key in case.switches} == dict(case.switches), said
    assert [words for words in case.said if words not in said] == [], said


@pytest.mark.parametrize("name", KNOWN)
def test_the_order_follows_its_rules(name):
    """What is better by a rule is not second: room in memory, whole layers, few nodes, time."""
    advice = advice_on(name)
    best, capacity = advice.best, advice.cluster.gpu.memory
    others = [each for each in advice.candidates if each.fits]
    for other in others:
        roomy = other.memory.total <= TIGHT * capacity
        if roomy:
            assert best.memory.total <= TIGHT * capacity
            if other.strategy not in {"dp", "manual"}:
                limit = 1.1 if other.splits == best.splits else 1.65
                limit *= 1.25 if other.reach > WIDE >= best.reach else 1
                assert best.step.seconds <= limit * other.step.seconds


@pytest.mark.parametrize("name", KNOWN)
def test_every_strategy_that_is_not_chosen_has_its_drawback(name):
    advice = advice_on(name)
    drawbacks = ("does not fit", "for teaching", "uses over 90%", "splits layers", "shards over ")
    for each in advice.candidates:
        verdict = advice.verdict(each)
        assert (verdict == "best") == (each is advice.best)
        if each is not advice.best:
            assert verdict.startswith((*drawbacks, "more complex")) or verdict.endswith(" slower")
    if advice.second is not None:
        text = f"; the next best is {advice.second.strategy}: {advice.verdict(advice.second)}."
        assert report.recommendation(advice).endswith(text)


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_trainer_cannot_do_yet_is_said_and_not_written(name):
    case, advice = KNOWN[name], advice_on(name)
    missing = report.lacking(advice.best.config)
    assert set(case.lacking) <= set(missing)
    runs = advice_on(name, can_run)
    if not missing:
        assert runs.best.config == advice.best.config
        return
    said = report.not_in_trainer(missing, runs)
    assert all(words in said for words in missing)
    assert all((EXAMPLES / report.EXAMPLES[each]).is_file() for each in missing)
    assert "no strategy of the trainer fits" in said or runs.best.strategy in said
    assert runs.best is None or can_run(runs.best.config)


def test_all_weights_of_the_13b_can_be_trained_with_the_hosts_memory():
    case = KNOWN["13B fine-tuned on 2 A100-80"]
    model = gpt_of_size(case.model, vocabulary=32_000, positions=case.sequence)
    cluster = Cluster(gpus.find(case.gpu), *case.shape)
    full = Training(case.batch, case.sequence, offload=False, lora=False)
    assert advise(model, full, cluster).best is None
    best = advise(model, dataclasses.replace(full, offload=None), cluster).best
    assert best.config.offload
