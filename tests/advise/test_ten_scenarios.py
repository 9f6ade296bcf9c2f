"""Ten questions with the answer of an expert and the reason, which `deploykit advise` must give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from deploykit.advise import Cluster, Training, advise, gpt, gpt_of_size, gpus, report
from deploykit.advise.models import from_counts, llama
from tests.advise.test_own_models import COUNTED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/models"
M, B = 10**6, 10**9
GIGABIT = 10**9 / 8
NOTHING = MappingProxyType({})


class Scenario(NamedTuple):
    """What is trained on what: GPUs per node x nodes, samples of a step, tokens of a sample.

    `strategies` are those that an expert would take, `switches` what goes with them, `said` words
    of the reason in the report, `lacking` what the reference trainer cannot do of it yet.
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


def sized(parameters, sequence):
    return gpt_of_size(parameters, vocabulary=32_000, positions=sequence)


LLAMA_405B = llama(
    layers=126, width=16384, heads=128, kv_heads=8, feedforward=53248, vocabulary=128_256
)
LLAMA_70B = llama(
    layers=80, width=8192, heads=64, kv_heads=8, feedforward=28672, vocabulary=128_256
)
BERT_LARGE = gpt(layers=24, width=1024, heads=16, vocabulary=30_522, positions=512)

SCENARIOS = {
    # 112 GB of states fit on no GPU, 14 GB of them on each of eight with NVLink between them. What
    # is left is too little for all activations of a batch of 64. MosaicML trained MPT-7B so:
    # https://www.databricks.com/blog/mpt-7b
    "7B on 8 A100-40": Scenario(
        sized(7 * B, 2048), "a100-40gb", (8, 1), 64, 2048, {"zero3"},
        ("does not fit on a GPU (ddp needs", "checkpointing"), {"checkpointing": True},
    ),
    # 21 GB of states on GPUs of 16 GB: sharded, 2.6 GB on each. NVLink makes the gathers cheap
    "1.3B on 8 V100": Scenario(
        sized(1300 * M, 1024), "v100", (8, 1), 64, 1024, {"zero2", "zero3"},
        ("does not fit on a GPU (ddp needs", "8 shards"), {}, {"precision": "fp16"},
    ),
    # 1.1 TB of states over 64 GPUs: 17 GB each; at 400 Gb/s for each GPU gathers hide behind the
    # work, and no layer needs a plan. torchtitan ran Llama 70B on 64 GPUs so, a sample on each:
    # https://github.com/pytorch/torchtitan/blob/157a12c5/docs/performance.md
    "70B on 64 H100 with EFA": Scenario(
        LLAMA_70B, "h100", (8, 8), 64, 8192, {"zero3"},
        ("checkpointing", "zero2 does not fit", "fsdp-tp: splits layers"), {"checkpointing": True},
        {}, {"fabric": "efa", "bandwidth": 3200 * GIGABIT},
    ),
    # a copy fits, 5 GB of 15; gradients over TCP are the limit: send half
    "300M on 4 T4 over TCP": Scenario(
        sized(300 * M, 1024), "t4", (1, 4), 32, 1024, {"ddp"},
        ("a whole copy fits", "gradients in fp16"), {"compress": "fp16"},
        {"precision": "fp16"}, {"fabric": "tcp", "bandwidth": 25 * GIGABIT},
    ),
    # 5.4 GB of states, accumulated micro-batches: nothing is simpler than a copy on each
    "BERT-large on 8 V100": Scenario(
        BERT_LARGE, "v100", (8, 1), 256, 512, {"ddp"},
        ("a whole copy fits", "micro-batches"), {"compress": ""}, {"precision": "fp16"},
    ),
    # 26M parameters: 100 MB of gradients over NVLink while the backward pass runs
    "ResNet-50 on 8 V100": Scenario(
        from_counts(COUNTED["resnet_50"]), "v100", (8, 1), 512, 1, {"ddp"},
        ("a whole copy fits", "samples/s"), {"checkpointing": False, "selective": False},
        {"precision": "fp16", "optimizer": "sgd-momentum"},
    ),
    # 26 GB of weights and 51 of states, of which a batch needs a few rows
    "a recommender with a 6.4B table on 8 A100-40": Scenario(
        from_counts(COUNTED["recommender"]), "a100-40gb", (8, 1), 65_536, 26, {"sharded-table"},
        ("not even one layer fits", "ddp does not fit"), {}, {}, {},
        ("sharded tables",),
    ),
    # torchtitan's and Meta's own layout: layers split inside the nodes, stages between them, so
    # that few nodes wait for each other in each layer
    "405B on 512 H100": Scenario(
        LLAMA_405B, "h100", (8, 64), 256, 8192, {"pp-fsdp-tp"},
        ("8 tensor-parallel ranks", " stages", "fsdp-tp shards over 64 nodes"), {}, {},
        {"fabric": "infiniband", "bandwidth": 3200 * GIGABIT},
    ),
    # 208 GB of states on 160: adapters on 26 GB of frozen weights, or the host's memory
    "13B fine-tuned on 2 A100-80": Scenario(
        sized(13 * B, 2048), "a100-80gb", (2, 1), 16, 2048, {"ddp"},
        ("LoRA", "without --offload auto"), {"lora": True}, {"lora": None}, {},
        ("LoRA",),
    ),
    # one process: 1.6 GB of states of 8 GB, and no second GPU
    "100M on a laptop": Scenario(
        sized(100 * M, 512), "cpu", (1, 1), 8, 512, {"single"},
        ("a whole copy fits", "single: one process"), {}, {"on_cpu": True, "precision": "fp32"},
    ),
}  # fmt: skip


def asked(name, allowed=lambda _: True):
    case = SCENARIOS[name]
    gpu = gpus.find(case.gpu)
    training = Training(case.batch, case.sequence, **{"offload": False, **case.training})
    cluster = Cluster(gpu, *case.shape, gpu.link, **case.network)
    return advise(case.model, training, cluster, allowed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_recommendation_is_what_an_expert_takes_with_the_reason(name):
    case, advice = SCENARIOS[name], asked(name)
    verdicts = [f"{each.strategy} {advice.verdict(each)}" for each in advice.candidates]
    said = " ".join([report.recommendation(advice), *verdicts, *report.notes(advice)])
    assert advice.best.strategy in case.strategies, said
    config = advice.best.config
    assert {key: getattr(config, key) for key in case.switches} == dict(case.switches), said
    assert [words for words in case.said if words not in said] == [], said


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_the_trainer_cannot_do_yet_is_said_and_not_written(name):
    case, advice = SCENARIOS[name], asked(name)
    missing = report.lacking(advice.best.config)
    assert set(case.lacking) <= set(missing)
    runs = asked(name, report.can_run)
    if not missing:
        assert runs.best.config == advice.best.config
        return
    said = report.not_in_trainer(missing, runs)
    assert all(words in said for words in missing)
    assert all((EXAMPLES / report.EXAMPLES[each]).is_file() for each in missing)
    assert "none of its strategies fits" in said or runs.best.strategy in said
    assert runs.best is None or report.can_run(runs.best.config)


def test_all_weights_of_the_13b_can_be_trained_with_the_hosts_memory():
    case = SCENARIOS["13B fine-tuned on 2 A100-80"]
    cluster = Cluster(gpus.find(case.gpu), *case.shape)
    full = Training(case.batch, case.sequence, offload=False, lora=False)
    assert advise(case.model, full, cluster).best is None
    best = advise(case.model, dataclasses.replace(full, offload=None), cluster).best
    assert best.config.offload
