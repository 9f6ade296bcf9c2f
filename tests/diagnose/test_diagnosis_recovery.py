"""A training that goes on after an error has overcome it, wherever the log says so."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli

CAUGHT = """\
epoch 1 | loss 2.3107
Traceback (most recent call last):
  File "/home/ada/job/train.py", line 80, in main
    image = Image.open(path)
PIL.UnidentifiedImageError: cannot identify image file '/data/birds/0412.jpg'
skipped 1 file
"""
STEPS = "epoch 2 | loss 2.1043\nepoch 3 | loss 2.0071\n"
BARS = (
    "\repoch:  10%|#   | 2/20 [22:41<3:24, 680.75s/it]\nbatch:  52%|##  | 230/445 [04:18<04:01]\n"
)


MOVING = "".join(f"\rbatch:  52%|##  | {n}/445 [04:18<04:01, 1.90it/s]" for n in range(230, 245))
REDRAWN = "batch:  52%|##  | 230/445 [04:18<04:01, 1.90it/s]\n" * 15
NAMES = [f"{first}{second}" for first in "ghijklmnopqrst" for second in "ghijklmnopqr"]
OTHER = "".join(f"reads the table {name}\n" for name in NAMES)


def diagnosed(capsys, *paths):
    """The label of the first cause."""
    cli.main(["diagnose", *map(str, paths), "--json"])
    causes = json.loads(capsys.readouterr().out)["causes"]
    return causes[0]["cause"] if causes else None


@pytest.mark.parametrize(
    ("after", "label"),
    [
        (STEPS, None),
        ("", "data_corrupt"),
        ("epoch 2 | loss 2.1043\n", "data_corrupt"),
        ("epoch 2 | loss 2.1043\nSaved checkpoint_2.pt to /scratch/ada\n", None),
        ("top-1 accuracy 71.3\nTraining finished\n", None),
        ("Job finished\nSaved checkpoint_2.pt to /scratch/ada\n", "data_corrupt"),
        ("100%|###| 20/20 [22:41<0:00, 6.75s/it, loss=1.9]\nweights saved\n", None),
        ("\r 90%|## | 18/20 [22:41<0:00, 6.75s/it, loss=1.9]\nweights saved\n", "data_corrupt"),
        (STEPS.splitlines(keepends=True)[0] * 2, "data_corrupt"),
        (BARS, "data_corrupt"),
        (MOVING, None),
        ("loss:\x1b[1m\x1b[31m2.10\x1b[0m | n 1\nloss:\x1b[1m\x1b[31m2.00\x1b[0m | n 2\n", None),
        (REDRAWN, "data_corrupt"),
        (OTHER, None),
        (OTHER.replace("reads the table m", "fails to read the table m"), "data_corrupt"),
        ("".join(f"reads the table {n}\n" for n in range(200)), "data_corrupt"),
        (
            "wandb: epoch 3\nwandb: loss 2.0071\nwandb: step 4, 0.1\nwandb: step 5, 0.2\n",
            "data_corrupt",
        ),
        ("> wandb: step 4, loss 2.1\n> wandb: step 5, loss 2.0\n", "data_corrupt"),
        (f"{STEPS}srun: error: n7: task 1: Exited with exit code 1\n", "data_corrupt"),
        (
            "srun: Terminating job step 471839.1\nsrun: Force Terminated job step 471839.1\n",
            "data_corrupt",
        ),
    ],
    ids=[
        "steps",
        "end",
        "one-step",
        "one-step-and-saved",
        "a-metric-and-finished",
        "no-step",
        "whole-bar-and-saved",
        "part-of-a-bar-and-saved",
        "one-step-twice",
        "bars",
        "a-bar-that-moves-on",
        "colors",
        "a-bar-drawn-again",
        "for-long",
        "for-long-but-fails",
        "one-line-for-long",
        "wandb",
        "wandb-quoted",
        "failed-later",
        "steps-of-slurm",
    ],
)
def test_an_error_after_which_training_goes_on_is_no_cause(after, label, tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text(CAUGHT + after)
    assert diagnosed(capsys, log) == label


def test_steps_of_another_rank_do_not_overcome_an_error(tmp_path, capsys):
    failed, other = tmp_path / "rank_0.log", tmp_path / "rank_1.log"
    failed.write_text(CAUGHT)
    other.write_text(STEPS * 3)
    assert diagnosed(capsys, failed, other) == "data_corrupt"


def test_the_last_of_many_equal_errors_counts(tmp_path, capsys):
    log = tmp_path / "job.log"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    log.write_text(error * 50 + STEPS + error * 50)
    assert diagnosed(capsys, log) == "cuda_oom"
    log.write_text(error * 100 + STEPS)
    assert diagnosed(capsys, log) is None


def test_a_loss_that_stays_nan_is_not_overcome_by_its_own_steps(tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text("".join(f"step {n} | loss nan | lr 0.0{n}\n" for n in range(1, 9)))
    assert diagnosed(capsys, log) == "nan_loss"


def test_a_loss_that_is_finite_again_was_nan_once(tmp_path, capsys):
    log = tmp_path / "job.log"
    steps = "".join(f"step {n} | loss 2.0{n}\n" for n in range(6, 9))
    log.write_text(f"step 1 | loss nan\nsample 4\nsample 5\nsample 6\n{steps}")
    assert diagnosed(capsys, log) is None
    log.write_text("step 1 | loss nan\nsample 4\nsample 5\nepoch 2 of 3\nlr 0.01, step 3\n")
    assert diagnosed(capsys, log) == "nan_loss"


def test_steps_do_not_overcome_what_a_training_goes_on_with(tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text(f"NCCL INFO NET/OFI Selected Provider is tcp\n{STEPS}{OTHER}")
    assert diagnosed(capsys, log) == "efa_not_used"


@pytest.mark.parametrize(("steps", "label"), [(40, "slurm_cancelled"), (60, None)])
def test_many_steps_are_of_another_run_than_the_one_that_was_cancelled(
    steps, label, tmp_path, capsys
):
    log = tmp_path / "nohup.out"
    cancelled = "slurmstepd: error: *** STEP 2179.0 ON n4 CANCELLED AT 2026-03-02T11:35:50 ***\n"
    log.write_text(cancelled + "".join(f"epoch 1 | loss 2.1{n:02}\n" for n in range(steps)))
    assert diagnosed(capsys, log) == label


def test_a_bar_shows_that_the_script_has_overcome_its_start(tmp_path, capsys):
    log = tmp_path / "job.log"
    start = "IMPORTANT: You may need to close and restart your shell after running 'conda init'.\n"
    log.write_text(start)
    assert diagnosed(capsys, log) == "environment_setup"
    log.write_text(f"{start}{BARS}")
    assert diagnosed(capsys, log) is None


@pytest.mark.parametrize("end", ["", '  File "train.py", line 80, in main\n    fit()\n'])
def test_a_traceback_without_its_end_is_a_failure_of_unknown_cause(end, tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text(f"{STEPS}Traceback (most recent call last):\n{end}")
    cli.main(["diagnose", str(log)])
    assert capsys.readouterr().out.startswith("unknown: ")


BEGINNING = "Loaded module: python3/3.11.2\nLoaded module: cuda/12.1\nMon Mar {} 10:00:00 2026\n"
FAILED = """\
Traceback (most recent call last):
  File "/home/ada/job/train.py", line 80, in main
    image = Image.open(path)
PIL.UnidentifiedImageError: cannot identify image file '/data/birds/0412.jpg'
"""


@pytest.mark.parametrize(
    ("log", "label"),
    [
        (BEGINNING.format(1) + FAILED, "data_corrupt"),
        (BEGINNING.format(1) + FAILED + BEGINNING.format(12), None),
        (BEGINNING.format(1) + FAILED + BEGINNING.format(12) + FAILED, "data_corrupt"),
        (BEGINNING.format(1) + FAILED + "Loaded module: python3/3.11.2\ndone\n", "data_corrupt"),
        (
            BEGINNING.format(1) + FAILED + BEGINNING.format(12) + "CUDA out of memory\n",
            "cuda_oom",
        ),
        (f"{FAILED}{BEGINNING.format(1)}{FAILED}{BEGINNING.format(1)}", "data_corrupt"),
    ],
    ids=["one", "begins", "fails-again", "not-the-beginning", "fails-otherwise", "begins-failed"],
)
def test_what_counts_is_the_last_run_of_a_log(log, label, tmp_path, capsys):
    path = tmp_path / "nohup.out"
    path.write_text(log)
    assert diagnosed(capsys, path) == label


@pytest.mark.parametrize(
    ("exception", "label"),
    [
        ("ValueError: all the input arrays must have same number of dimensions", "user_code_error"),
        ("ModuleNotFoundError: No module named 'torch'", "environment_setup"),
    ],
)
def test_a_script_that_lacks_its_environment_and_a_program_that_runs(
    exception, label, tmp_path, capsys
):
    path = tmp_path / "job.err"
    path.write_text(
        "CondaError: Run 'conda init' before 'conda activate'\n"
        "Traceback (most recent call last):\n"
        f'  File "train.py", line 8, in <module>\n    main()\n{exception}\n'
    )
    assert diagnosed(capsys, path) == label


def test_a_pool_that_was_interrupted_did_not_time_out(tmp_path, capsys):
    path = tmp_path / "job.err"
    path.write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/ada/job/data.py", line 31, in main\n'
        "    rows = rows.map(tokenize, num_proc=8)\n"
        "KeyboardInterrupt\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/venv/lib/python3.12/site-packages/multiprocess/pool.py", line 770, in get\n'
        "    raise TimeoutError\n"
        "multiprocess.context.TimeoutError\n"
    )
    assert diagnosed(capsys, path) == "unknown"
