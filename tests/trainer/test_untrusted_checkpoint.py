"""Checkpoints of unknown origin: nothing in them runs, and the previous one is used."""

import json
import resource

import pytest

import evaluate
import export
from tests.trainer import attacks
from tests.trainer.attacks import skip_messages
from tests.trainer.ranks import FOUR_EPOCHS, call, latest, train_alone, weights

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


def ran(canary):
    """Whether the attack's program has run; it may have been started a moment ago."""
    return attacks.appears(canary, tries=20)


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_resuming_runs_no_code_and_uses_the_previous_one(
    attack, one_rank, tmp_path, canary, capsys
):
    attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    attack(latest(tmp_path), canary)
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert not ran(canary)
    log = capsys.readouterr().out
    assert len(skip_messages(log)) == 1
    assert f"resumed from {tmp_path / 'checkpoints' / 'step-00000051'} after 51 steps" in log
    assert weights(tmp_path).equal(weights(one_rank))


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_two_ranks_run_no_code_and_use_the_previous_one(attack, two_ranks, pools, tmp_path, canary):
    attacks.copied(two_ranks / "checkpoints", tmp_path / "checkpoints")
    attack(latest(tmp_path), canary)
    log, _ = pools[2].train(tmp_path, *FOUR_EPOCHS)

    assert not ran(canary)
    assert len(skip_messages(log)) == 1
    assert "after 51 steps" in log
    assert weights(tmp_path).equal(weights(two_ranks))


PROGRAMS = {evaluate: "evaluation.json", export: "model.json"}
"""To a file that each writes, with the step of the checkpoint."""
EACH_PROGRAM = pytest.mark.parametrize("program", PROGRAMS, ids=["evaluate", "export"])


@pytest.mark.parametrize("attack", attacks.ATTACKS)
@EACH_PROGRAM
def test_evaluating_and_exporting_run_no_code_and_use_the_previous_one(
    program, attack, one_rank, tmp_path, canary, capsys
):
    folder = attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    attack(latest(tmp_path), canary)
    call(program, folder, tmp_path / "out")

    assert not ran(canary)
    assert len(skip_messages(capsys.readouterr().out)) == 1
    assert json.loads((tmp_path / "out" / PROGRAMS[program]).read_text())["step"] == 51


@EACH_PROGRAM
def test_without_a_usable_checkpoint_the_program_ends_with_an_error(
    program, one_rank, tmp_path, canary
):
    folder = attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    for path in folder.iterdir():
        attacks.dotted_name(path, canary)
    with pytest.raises(SystemExit) as ended:  # Python prints it, and exits with code 1
        call(program, folder, tmp_path / "out")

    assert not ran(canary)
    why = f"{program.__name__}.py: error: none of the 2 checkpoints in {folder} can be"
    assert str(ended.value).startswith(why)


def test_a_checkpoint_of_another_model_is_skipped(one_rank, tmp_path, capsys):
    folder = attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    path = latest(tmp_path)
    table = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(table.replace(b"scores.weight", b"scores.height"))
    attacks.update_checksums(path)
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert (
        "it does not contain the tensor model.scores.weight"
        in skip_messages(capsys.readouterr().out)[0]
    )
    assert weights(tmp_path).equal(weights(one_rank))
    for path in folder.iterdir():
        (path / ".metadata").write_bytes(table.replace(b"scores.weight", b"scores.height"))
        attacks.update_checksums(path)
    with pytest.raises(
        ValueError, match=r"no checkpoint matches this model: it does not contain the tensor"
    ):
        train_alone(tmp_path, *FOUR_EPOCHS)


INVALID_PROGRESS = [
    ("best_loss", "0.1"),
    ("loss_scale", 0.0),
    ("loss_scale", -1.0),
    ("idle_epochs", None),
    ("settings", [1]),
]


@pytest.mark.parametrize(
    ("name", "value"), INVALID_PROGRESS, ids=[name for name, _ in INVALID_PROGRESS]
)
def test_invalid_progress_is_skipped(name, value, one_rank, tmp_path, capsys):
    attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    whole = json.loads((latest(tmp_path) / "whole.json").read_text())
    whole["progress"][name] = value
    attacks.write_manifest(latest(tmp_path), whole)
    train_alone(tmp_path, *FOUR_EPOCHS)

    assert f"its {name} is " in skip_messages(capsys.readouterr().out)[0]
    assert weights(tmp_path).equal(weights(one_rank))


@pytest.mark.parametrize(
    "change",
    [
        {"width": 2**40, "task": "text"},
        {"width": 2**19, "heads": 1, "task": "text"},
        {"layers": 2**20, "task": "text"},
        {"heads": 0, "task": "text"},
        {"sequence": "64", "task": "text"},
        {"task": "__class__"},
        {"text": ["/"]},
    ],
    ids=str,
)
def test_settings_of_a_huge_model_are_refused(change, one_rank, tmp_path):
    """Before memory is allocated: the limit leaves room for torch alone."""
    folder = attacks.copied(one_rank / "checkpoints", tmp_path / "checkpoints")
    path = latest(tmp_path)
    whole = json.loads((path / "whole.json").read_text())
    whole["progress"]["settings"].update(change)
    attacks.write_manifest(path, whole)

    _, _, progress = evaluate.trained_model(folder)
    assert progress["step"] == 51
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20
