"""What counts as a checkpoint in a folder, and which of them are old."""

from __future__ import annotations

import os

import pytest

from deploykit_node.restart import checkpoint_folder


def write(folder, *names, at=1):
    """Files that were last written `at` seconds after the epoch."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"tensors")
        os.utime(path, (at, at))


def names(folder, **options):
    return {
        name: sorted(one.files) for name, one in checkpoint_folder.listed(folder, **options).items()
    }


def old(folder, keep):
    """The titles of what is old."""
    listed = checkpoint_folder.listed(folder).values()
    return sorted(one.title for one in checkpoint_folder.old(listed, keep))


def test_files_with_the_same_step_belong_together(tmp_path):
    write(tmp_path, "model_5.pt", "optim_5.pt", "model_6.pt", "last.pt", "best_3.pt")
    write(tmp_path, "step-7/a.pt", "step-7/b.json", "latest")
    assert names(tmp_path) == {
        "files": ["best_3.pt", "last.pt"],
        "files-5": ["model_5.pt", "optim_5.pt"],
        "files-6": ["model_6.pt"],
        "latest": ["latest"],
        "step-7": ["step-7/a.pt", "step-7/b.json"],
    }


def test_numbers_of_ranks_and_shards_are_no_steps(tmp_path):
    write(tmp_path, "step5_rank0.pt", "step5_rank1.pt", "model-00001-of-00002.safetensors")
    write(tmp_path, "model-00002-of-00002.safetensors", "mp_rank_00.pt", "ckpt-tp3-dp1.pt")
    found = names(tmp_path)
    assert found["files-5"] == ["step5_rank0.pt", "step5_rank1.pt"]
    assert len(found["files"]) == 4
    assert old(tmp_path, 1) == []


def test_what_is_still_being_written_is_not_listed(tmp_path):
    write(tmp_path, "a.pt.tmp", ".hidden.pt", "step-00000003.run.saving/__0_0.distcp")
    write(tmp_path, "step-4/__0_0.distcp", "step-5/__0_0.distcp", "step-5/.metadata")
    write(tmp_path, "nested-6/fsdp/__0_0.distcp", "nested-6/state.json")
    assert list(names(tmp_path)) == ["step-5"]
    assert checkpoint_folder.listed(tmp_path)["step-5"].is_marked
    assert "step-4" in names(tmp_path, parts=True)  # another node writes its .metadata


def test_a_distributed_checkpoint_without_a_folder_of_its_own(tmp_path):
    write(tmp_path, "__0_0.distcp")
    assert names(tmp_path) == {}
    write(tmp_path, ".metadata", "__1_0.distcp")
    assert names(tmp_path) == {"files": [".metadata", "__0_0.distcp", "__1_0.distcp"]}


@pytest.mark.parametrize(
    "pattern",
    [
        "step-{:08d}/__0_0.distcp",
        "checkpoint-{}/model.safetensors",
        "global_step{}/mp_rank_00_model_states.pt",
        "iter_{:07d}/mp_rank_00/model_optim_rng.pt",
        "epoch={}-step=20.ckpt",
        "epoch_{}.pt",
        "model-{}.pth.tar",
    ],
)
def test_the_newest_stay_whatever_script_wrote_them(pattern, tmp_path):
    made = [pattern.format(step) for step in (5, 10, 15, 20)]
    for moment, name in enumerate(made):
        write(tmp_path, name, at=moment)
        if name.endswith(".distcp"):
            write(tmp_path, f"{name.partition('/')[0]}/.metadata", at=moment)
    write(tmp_path, "last.pt", "best-5.pt", "notes-7.txt", "logs-3/events.out", at=0)
    assert old(tmp_path, 2) == sorted(name.partition("/")[0] for name in made[:2])
    assert old(tmp_path, 4) == []


def test_one_that_was_written_again_after_a_restart_is_new(tmp_path):
    for moment, step in enumerate((5, 10, 15, 5)):
        write(tmp_path, f"epoch_{step}.pt", at=moment)
    assert old(tmp_path, 1) == ["epoch_10.pt", "epoch_15.pt"]


def test_versions_of_a_logger_are_no_steps(tmp_path):
    write(tmp_path, "version_0/a.ckpt", "version_1/a.ckpt", "run-3/a.pt", "run-4/a.pt")
    assert old(tmp_path, 1) == []


def test_removing_deletes_nothing_else(tmp_path):
    write(tmp_path, "model_5.pt", "optim_5.pt", "model_6.pt", "step-5/a.pt", "step-5/whole.json")
    listed = checkpoint_folder.listed(tmp_path)
    for name in ("files-5", "step-5"):
        checkpoint_folder.remove(tmp_path, listed[name])
    assert [path.name for path in tmp_path.iterdir()] == ["model_6.pt"]


def test_a_file_that_torch_left_half_written(tmp_path):
    (tmp_path / "half.pt").write_bytes(b"PK\3\4 not complete")
    assert checkpoint_folder.is_cut_off(tmp_path, checkpoint_folder.listed(tmp_path)["files"])
