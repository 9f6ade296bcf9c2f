"""Models of examples/models with every strategy that takes them: the losses of one process."""

import pytest

from tests.frameworks.test_frameworks import PYTHON, ROOT
from tests.trainer import ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("frameworks"),
]

STEPS = 10
TOLERANCE = 1e-6
"""Of the loss: single precision, summed in another order."""
WHOLE = ("4 ddp", "4 zero3", "4 hsdp --shard-ranks 2", "4 zero3 --reduce-each --micro-batches 2")
STAGES = ("4 pp --micro-batches 4", "4 pp-dp --micro-batches 2", "4 pp-fsdp --micro-batches 2")
SPLIT = (
    *("4 tp", "4 tp-dp --tensor-parallel 2", "4 fsdp-tp --tensor-parallel 2 --loss-parallel"),
    *("4 pp-tp --micro-batches 2", "8 pp-fsdp-tp --micro-batches 2"),
)
TRAINED = {"llama": (*WHOLE, *STAGES, *SPLIT), "gpt2": (*WHOLE, *STAGES)}


@pytest.fixture
def train(monkeypatch):
    """Trains in the environment that has transformers; returns the losses."""
    path = f"{ROOT}/examples/models:{ranks.ENTRYPOINTS}:{ROOT}"
    environment = ranks.environment
    changed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    monkeypatch.setattr(ranks, "environment", lambda *a, **b: environment(*a, **b) | changed)
    monkeypatch.setattr(ranks.sys, "executable", str(PYTHON))

    def losses(folder, family, layout):
        world, *strategy = layout.split()
        task = ("--task", "language_model:task", "--task-option", f"family={family}")
        run = ("--steps", str(STEPS), "--epochs", "9", "--batch-size", "16", "--log-every", "1")
        given = (*task, *run, "--no-tensorboard", "--lr", "0.1", "--optimizer", "sgd")
        ranks.train_ranks(folder, int(world), *given, "--strategy", *strategy)
        return ranks.losses(folder)

    return losses


@pytest.mark.parametrize("family", TRAINED)
def test_a_model_of_hugging_face_trains_like_one_process(family, train, tmp_path):
    alone = train(tmp_path / "alone", family, "1 single")
    assert len(alone) == STEPS
    assert alone[STEPS] < alone[1]

    for layout in TRAINED[family]:
        found = train(tmp_path / layout.replace(" ", ""), family, layout)
        assert found == pytest.approx(alone, rel=0, abs=TOLERANCE), layout
