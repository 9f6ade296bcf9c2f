"""`rm`, `prune` and `disk`; what a run that has ended still needs; and attacks on all of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from deploykit import backend, bundle, cli, paths, registry, removal, run_state, storage
from deploykit.model import State, Status

LIMIT = 1 << 30
DAY = 86400
AT_REST = [State.SUCCEEDED, State.FAILED, State.CANCELLED]
ACTIVE = [State.SUBMITTING, State.QUEUED, State.RUNNING, State.STOPPING, State.UNKNOWN]


@pytest.fixture
def source(tmp_path):
    """A source of files in folders, one of them executable, and a link."""
    folder = tmp_path / "src"
    (folder / "package/data").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "start.sh").write_text("exec true\n")
    (folder / "start.sh").chmod(0o755)
    (folder / "package/data/table.csv").write_text("a,b\n" * 10_000)
    (folder / "package/config.json").write_text("{}\n")
    (folder / "latest").symlink_to("package/config.json")
    return folder


@pytest.fixture
def add(source):
    """A run of that source with an unpacked copy, as if it had been sent `days` ago.

    One that has not ended holds its lock, as its shell would.
    """
    held = []

    def one(name, state=State.SUCCEEDED, *, days=0.0, target=None, whole=True):
        packed = bundle.scan(source, LIMIT)
        folder = paths.run_folder(name)
        row = registry.Run(
            *(name, "job", "local", target or os.uname().nodename, str(folder), "a", packed.hash),
            *(None, registry.now() - days * DAY, str(folder / "output")),
        )
        registry.add(row)
        if whole:
            bundle.unpack(bundle.store(packed), paths.private_folder(folder) / "source")
            for part in backend.FOLDERS:
                paths.private_folder(folder / part)
            paths.write(folder / "submitting", "")
        if whole and state in {State.QUEUED, State.RUNNING, State.STOPPING}:
            held.append((folder / "alive").open("w"))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        if target is not None:
            (folder / "exit_records").rmdir()
        if state is not State.SUBMITTING:
            registry.confirm(name, name)
            registry.update(name, Status(state))
        return folder

    yield one
    for file in held:
        file.close()


def run(capsys, *words):
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def names():
    return {row.run for row in registry.every()}


def tree(folder):
    """Every file and link below `folder`, with its content."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


# --- the copies of the source -----------------------------------------------------------------


def test_each_run_works_in_a_copy_of_its_own(add):
    """A trainer that writes into a file of its source changes nothing for others."""
    first, second = add("first"), add("second")
    before = tree(second / "source")
    with (first / "source/package/data/table.csv").open("r+") as file:
        file.write("overwritten in place")
    assert tree(second / "source") == before
    third = add("third")
    assert tree(third / "source") == before


def test_runs_that_have_ended_keep_what_they_wrote_and_the_newest_stay_whole(add):
    folders = [add(f"run-{number}", days=10 - number) for number in range(5)]
    whole = tree(folders[4] / "source")
    oldest = folders[0] / "source"
    (oldest / "snapshot.pt").write_text("weights")
    (oldest / "package/config.json").write_text('{"changed": true}')
    storage.tidy()
    assert tree(oldest) == {
        "snapshot.pt": b"weights",
        "package/config.json": b'{"changed": true}',
        backend.FILES: whole[backend.FILES],
    }
    assert set(tree(folders[1] / "source")) == {backend.FILES}
    for folder in folders[2:]:
        assert tree(folder / "source") == whole


def test_the_command_of_the_guide_brings_a_reduced_source_back(add):
    folders = [add(f"run-{number}", days=10 - number) for number in range(4)]
    whole = tree(folders[3] / "source")
    (folders[0] / "source/package/config.json").write_text("mine")
    storage.tidy()
    guide = (Path(__file__).parents[1] / "docs/how-to/clean-up.md").read_text(encoding="utf-8")
    line = next(line for line in guide.splitlines() if line.startswith("tar "))
    line = line.replace("~/.local/state/deploykit", "$DEPLOYKIT_HOME")
    line = line.replace("HASH", registry.get("run-0").bundle).replace("RUN", "run-0")
    line = line.replace("$DEPLOYKIT_HOME", f"'{paths.state()}'")
    subprocess.run(["sh", "-c", line], check=False, capture_output=True)
    assert tree(folders[0] / "source") == {**whole, "package/config.json": b"mine"}


@pytest.mark.parametrize("state", [*ACTIVE, State.UNSENT])
def test_the_source_of_a_run_that_may_need_it_is_not_reduced(add, state):
    folder = add("old", state, days=1)
    for number in range(4):
        add(f"new-{number}")
    before = tree(folder / "source")
    storage.tidy()
    assert tree(folder / "source") == before


def test_without_the_right_archive_nothing_is_taken_away(add):
    folder = add("old", days=1)
    for number in range(4):
        add(f"new-{number}")
    before = tree(folder / "source")
    (archive,) = storage.bundles().values()
    good = archive.read_bytes()
    archive.write_bytes(good[: len(good) // 2])
    storage.tidy()
    assert tree(folder / "source") == before
    archive.unlink()
    storage.tidy_all()
    assert tree(folder / "source") == before


def test_a_folder_that_the_run_replaced_by_a_link_is_not_emptied(add, tmp_path):
    """The files behind it are the same as in the bundle, and somebody else's."""
    folder = add("old", days=1)
    for number in range(4):
        add(f"new-{number}")
    elsewhere = tmp_path / "elsewhere"
    (folder / "source/package").rename(elsewhere)
    (folder / "source/package").symlink_to(elsewhere)
    before = tree(elsewhere)
    storage.tidy()
    assert tree(elsewhere) == before
    assert not (folder / "source/train.py").exists()


@pytest.mark.parametrize("which", ["", "source"])
def test_a_run_folder_that_is_a_link_is_not_reduced(add, tmp_path, which):
    folder = add("old", days=1)
    for number in range(4):
        add(f"new-{number}")
    elsewhere = tmp_path / "elsewhere"
    (folder / which).rename(elsewhere)
    (folder / which).symlink_to(elsewhere)
    before = tree(elsewhere)
    storage.tidy()
    assert tree(elsewhere) == before


def test_the_end_of_a_run_reduces_the_sources_of_older_ones(add):
    """As `wait`, `status` and `list` see it: the run's shell has gone, so it has ended."""
    old = add("old", days=1)
    add("ending")
    registry.update("ending", Status(State.RUNNING))
    for number in range(3):
        add(f"new-{number}")
    run_state.refresh([registry.get("ending")])
    assert set(tree(old / "source")) == {backend.FILES}


def test_runs_of_one_source_take_little_more_than_one(add, source):
    (source / "weights.bin").write_bytes(os.urandom(1 << 20))
    for number in range(20):
        add(f"run-{number:02}", days=30 - number)
    before = storage.size(paths.state())
    storage.tidy()
    assert len(storage.whole(registry.every())) == 12  # a few at each end of a run
    assert cli.main(["prune", "--yes"]) == 0
    assert before > 20 << 20
    assert storage.size(paths.state()) < 7 << 20  # three copies, the archive, and small files


# --- rm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", AT_REST)
def test_rm_removes_the_folder_the_row_and_the_bundle(add, capsys, state):
    folder = add("exp-alpha", state)
    code, out, _ = run(capsys, "rm", "exp-a")
    assert (code, out.startswith("exp-alpha: removed, ")) == (0, True)
    assert not folder.exists()
    assert names() == set()
    assert list(paths.bundles().iterdir()) == []


def test_rm_keeps_a_bundle_that_another_run_refers_to(add, capsys):
    add("first"), add("second")
    assert run(capsys, "rm", "first")[0] == 0
    assert len(storage.bundles()) == 1
    assert run(capsys, "rm", "second")[0] == 0
    assert storage.bundles() == {}


@pytest.mark.parametrize("state", [State.SUBMITTING, State.QUEUED, State.RUNNING, State.UNKNOWN])
def test_rm_refuses_a_run_that_has_not_ended(add, capsys, state):
    """The machine of one with an unknown state cannot be asked from here."""
    folder = add("exp-alpha", state, target="elsewhere" if state is State.UNKNOWN else None)
    before = tree(folder)
    add("exp-beta")
    code, _, err = run(capsys, "rm", "exp-beta", "exp-alpha")
    assert code == 64
    assert "only runs that have ended can be removed" in err
    assert "exp-alpha is " in err
    assert tree(folder) == before
    assert names() == {"exp-alpha", "exp-beta"}


def test_rm_says_how_to_end_a_run_and_force_is_no_help(add, capsys):
    add("exp-alpha", State.RUNNING)
    for more in ([], ["--force"]):
        code, _, err = run(capsys, "rm", "exp-alpha", *more)
        assert code == 64
        assert "`deploykit cancel exp-alpha` stops it" in err
    assert names() == {"exp-alpha"}


def test_rm_force_removes_a_run_whose_target_is_gone(add, capsys):
    add("exp-alpha", State.QUEUED, target="another-machine")
    code, _, err = run(capsys, "rm", "exp-alpha")
    assert (code, "if its job is gone for good, add --force" in err) == (64, True)
    assert run(capsys, "rm", "exp-alpha", "--force")[0] == 0
    assert names() == set()


@pytest.mark.parametrize("name", ["exp", "alpha", "exp-", "exp-x"])
def test_rm_takes_an_id_or_a_unique_beginning_of_four_characters(add, capsys, name):
    add("exp-alpha"), add("exp-beta")
    assert run(capsys, "rm", name)[0] == 66
    assert names() == {"exp-alpha", "exp-beta"}


def test_rm_removes_all_or_none_and_names_every_mistake(add, capsys):
    add("exp-alpha")
    code, _, err = run(capsys, "rm", "exp-alpha", "nothing-1", "nothing-2")
    assert code == 64
    assert "nothing-1" in err
    assert "nothing-2" in err
    assert names() == {"exp-alpha"}


def test_rm_names_what_is_left_elsewhere(add, capsys):
    add("exp-alpha")
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database, database:
        database.execute("UPDATE runs SET output = '/shared/results'")
    (one,) = json.loads(run(capsys, "rm", "exp-alpha", "--json")[1])
    assert one["run"] == "exp-alpha"
    assert one["bytes"] > 40_000
    assert one["left"] == [{"location": "/shared/results", "command": None}]


def test_rm_names_the_folder_on_a_login_node(add, capsys):
    folder = add("exp-alpha")
    there = "/home/me/my runs/exp-alpha"
    paths.write(folder / "remote.json", json.dumps({"host": "login", "folder": there}))
    with contextlib.closing(sqlite3.connect(paths.state() / "runs.sqlite")) as database, database:
        database.execute("UPDATE runs SET backend = 'slurm'")
    ((left,),) = (one["left"] for one in json.loads(run(capsys, "rm", "exp-alpha", "--json")[1]))
    assert left["location"] == f"login:{there}"
    *ssh, remotely = shlex.split(left["command"])
    assert ssh == ["ssh", "--", "login"]
    assert shlex.split(remotely) == ["rm", "-r", "--", there]


def test_rm_removes_a_run_whose_folder_was_deleted(add, capsys):
    add("exp-alpha", whole=False)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert names() == set()


def test_a_link_in_place_of_a_run_folder_is_removed_and_not_followed(add, capsys, tmp_path):
    folder = add("exp-alpha")
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = tree(elsewhere)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert not folder.is_symlink()
    assert tree(elsewhere) == before


def test_links_in_a_run_folder_are_not_followed(add, capsys, tmp_path):
    folder, elsewhere = add("exp-alpha"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    (folder / "output/link").symlink_to(elsewhere)
    assert run(capsys, "rm", "exp-alpha")[0] == 0
    assert (elsewhere / "kept").read_text() == "kept"


@pytest.mark.parametrize("name", ["../../victim", "..", ".", "", "a/../../victim", "/", "a--b"])
def test_an_id_of_an_edited_registry_leads_nowhere(add, capsys, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    kept = add("kept-one")
    old = registry.now() - 99 * DAY
    row = registry.Run(name, "j", "local", "h", str(victim), "a", "../victim", None, old, "/out")
    registry.add(row)
    registry.update(name, Status(State.SUCCEEDED))
    assert run(capsys, "disk")[0] == 0
    assert run(capsys, "prune", "--older", "30d", "--yes")[0] == 0
    assert victim.is_dir()
    assert kept.is_dir()
    assert names() == {"kept-one"}


def test_nothing_but_entries_of_the_state_folders_own_folders_is_removed(tmp_path):
    for path in (
        *(tmp_path / "other", paths.state() / "runs", paths.state() / "runs/.."),
        *(paths.state() / "runs/one/source", Path("/")),
    ):
        with pytest.raises(storage.CannotWrite):
            storage.remove(path)


@pytest.mark.skipif(os.getuid() != 0, reason="optional: needs root, to become another user")
def test_a_folder_of_runs_that_belongs_to_another_user_is_refused(add, capsys):
    add("exp-alpha")
    os.chown(paths.state() / "runs", 65534, 65534)
    code, _, err = run(capsys, "rm", "exp-alpha")
    assert (code, "belongs to another user" in err) == (73, True)


def test_folders_and_files_without_permissions_are_removed():
    """As package managers leave in caches: folders that even their owner may not write to."""
    code = (
        "from deploykit import paths, storage\n"
        "folder = paths.private_folder(paths.run_folder('one'))\n"
        "(folder / 'output/cache/deep').mkdir(parents=True)\n"
        "(folder / 'output/cache/deep/file').touch(0)\n"
        "for name in ('output/cache/deep', 'output/cache', 'output', ''):\n"
        "    os.chmod(folder / name, 0)\n"
        "assert storage.run_usage('one').size > 0\n"
        "storage.remove(folder)\n"
        "assert not folder.exists()\n"
    )
    become = "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n" if os.getuid() == 0 else ""
    with tempfile.TemporaryDirectory() as home:
        if become:  # root may do anything
            os.chown(home, 65534, 65534)
        done = subprocess.run(
            [sys.executable, "-c", f"import os\nfrom deploykit import storage\n{become}{code}"],
            env={**os.environ, "DEPLOYKIT_HOME": f"{home}/state", "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_a_file_that_cannot_be_removed_leaves_the_run_in_the_list(add, capsys, monkeypatch):
    folder = add("exp-alpha")

    def refused(*_args, **_kwargs):
        raise OSError(16, "Device or resource busy", "output")

    with monkeypatch.context() as patched:
        patched.setattr(storage.shutil, "rmtree", refused)
        code, _, err = run(capsys, "rm", "exp-alpha")
    assert code == 73
    assert f"{folder} cannot be removed: Device or resource busy" in err
    assert names() == {"exp-alpha"}
    assert run(capsys, "rm", "exp-alpha")[0] == 0


# --- a bundle that is removed and used at once --------------------------------------------------


def test_a_bundle_is_kept_for_a_submit_that_has_just_found_it(add, source, capsys, monkeypatch):
    """The other run goes between the submit's look at the archive and its unpacking."""
    add("first")
    holds = bundle.holds

    def look(*args):
        found = holds(*args)
        assert cli.main(["rm", "first"]) == 0
        return found

    registry.add(registry.get("first")._replace(run="second", id=None))
    monkeypatch.setattr(bundle, "holds", look)
    archive = bundle.store(bundle.scan(source, LIMIT))
    assert archive.is_file()
    assert names() == {"second"}


def test_a_submit_waits_while_a_bundle_is_removed(add, source):
    """Between the look at the registry and the removal no run can begin to refer to it."""
    add("first")
    row = registry.get("first")
    registry.remove("first")
    order = []

    def submit():
        registry.add(row._replace(run="second"))
        order.append("added")

    def removing():
        other.start()
        time.sleep(0.3)
        order.append("removed")

    other = threading.Thread(target=submit)
    registry.release(row.bundle, removing)
    other.join()
    assert order == ["removed", "added"]


@pytest.mark.parametrize("verb", [["rm", "exp-alpha"], ["prune", "--older", "0s", "--yes"]])
def test_two_removals_at_once_remove_everything_and_fail_at_nothing(add, verb):
    folder = add("exp-alpha", days=1)
    for number in range(2000):
        (folder / f"output/{number}").touch()
    argv = [sys.executable, "-m", "deploykit", *verb]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    both = [
        subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    ended = [(child.communicate()[1].decode(), child.returncode) for child in both]
    # `rm` may find the run gone (66), or being removed (75)
    assert {code for _, code in ended} <= ({0} if verb[0] == "prune" else {0, 66, 75}), ended
    assert 0 in {code for _, code in ended}
    assert "unexpected" not in "".join(err for err, _ in ended)
    assert not folder.exists()
    assert names() == set()


def test_a_run_whose_folder_another_process_has_just_removed_is_removed(add, monkeypatch):
    folder = add("exp-alpha", days=1)
    asked = paths.is_private_folder

    def lost(path):
        answer = asked(path)
        shutil.rmtree(folder, ignore_errors=True)
        return answer

    monkeypatch.setattr(paths, "is_private_folder", lost)
    removal.remove(registry.known("exp-alpha"))
    assert names() == set()


def test_a_file_written_into_a_folder_while_it_is_removed_goes_too(add, monkeypatch):
    """As another process that removes the same run does, with its lock."""
    folder = add("exp-alpha", days=1)
    remove_folder = os.rmdir

    def write_first(path, **at):
        if path == folder.name:
            monkeypatch.setattr(os, "rmdir", remove_folder)
            (folder / "submitting").touch()
        remove_folder(path, **at)

    monkeypatch.setattr(os, "rmdir", write_first)
    removal.remove(registry.known("exp-alpha"))
    assert not folder.exists()


def test_a_run_that_is_being_submitted_is_not_removed(add, capsys):
    """An unsent one: the same id is being sent again just now."""
    folder = add("exp-alpha", State.UNSENT, days=1)
    with paths.submitting(folder, "exp-alpha"):
        assert run(capsys, "rm", "exp-alpha")[0] == 75
    assert folder.is_dir()
    assert names() == {"exp-alpha"}


def test_a_run_that_another_process_removed_is_no_error_for_a_list(add, monkeypatch):
    add("exp-alpha")
    row = registry.get("exp-alpha")
    registry.remove("exp-alpha")
    assert [one.run for one in run_state.refresh([row])] == ["exp-alpha"]


# --- prune --------------------------------------------------------------------------------------


@pytest.fixture
def history(add):
    """Runs of several ages and states, the newest last."""
    for name, state, days in (
        ("aaaa", State.FAILED, 50),
        ("bbbb", State.SUCCEEDED, 45),
        ("cccc", State.RUNNING, 44),
        ("dddd", State.FAILED, 20),
        ("eeee", State.SUCCEEDED, 10),
    ):
        add(name, state, days=days)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--older", "30d"], {"aaaa", "bbbb"}),
        (["--keep-last", "1"], {"aaaa", "bbbb", "dddd"}),
        (["--keep-last", "3", "--older", "1d"], {"aaaa"}),
        (["--state", "failed"], {"aaaa", "dddd"}),
        (["--state", "failed", "--keep-last", "1"], {"aaaa"}),
        (["--state", "failed", "--state", "succeeded", "--older", "45d"], {"aaaa", "bbbb"}),
        (["--older", "90d"], set()),
        ([], set()),
    ],
)
def test_prune_selects_runs_and_never_active_ones(history, capsys, options, gone):
    shown = json.loads(run(capsys, "prune", *options, "--dry-run", "--json")[1])
    assert {one["name"] for one in shown["found"] if one["kind"] == "run"} == gone
    assert shown["removed"] == []
    assert names() == {"aaaa", "bbbb", "cccc", "dddd", "eeee"}
    code, out, _ = run(capsys, "prune", *options, "--yes", "--json")
    assert code == 0
    assert {one["name"] for one in json.loads(out)["removed"] if one["kind"] == "run"} == gone
    assert names() == {"aaaa", "bbbb", "cccc", "dddd", "eeee"} - gone
    assert {path.name for path in (paths.state() / "runs").iterdir()} == names()
    assert len(storage.bundles()) == 1


def test_prune_shows_sizes_and_asks_nobody_in_a_pipe(history, capsys):
    code, out, err = run(capsys, "prune", "--older", "30d", "--dry-run")
    assert code == 0
    line = next(line for line in out.splitlines() if line.endswith("\taaaa"))
    size, date, *rest = line.split("\t")
    assert size.endswith(" kB")
    assert len(date) == 10
    assert rest == ["run", "failed", "aaaa"]
    assert err.startswith("2 to remove, ")
    code, _, err = run(capsys, "prune", "--older", "30d")
    assert (code, "add --yes" in err) == (64, True)
    assert len(names()) == 5


@pytest.mark.parametrize(("answer", "left"), [("y\n", 3), ("n\n", 5), ("\n", 5), ("", 5)])
def test_prune_asks_on_a_terminal(history, capsys, monkeypatch, answer, left):
    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(capsys, "prune", "--older", "30d")[0] == 0
    assert len(names()) == left


@pytest.mark.parametrize(
    "words", [["--older", "soon"], ["--keep-last", "-1"], ["--state", "running"]]
)
def test_prune_refuses_what_selects_nothing_that_can_go(history, capsys, words):
    assert run(capsys, "prune", "--yes", *words)[0] == 64
    assert len(names()) == 5


def age(path, seconds=7200):
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def test_what_an_interrupted_submit_leaves_is_found_and_removed(add, capsys):
    add("kept")
    paths.write(paths.bundles() / "orphan.tar.gz", b"x" * 5000)
    scratch = paths.private_folder(paths.bundles() / "tmpabc")
    paths.write(scratch / "half.tar.gz", b"x" * 50_000)
    folder = paths.private_folder(paths.run_folder("never-claimed"))
    paths.write(folder / "submitting", "")
    assert json.loads(run(capsys, "prune", "--json", "--dry-run")[1])["found"] == []
    for path in (paths.bundles() / "orphan.tar.gz", scratch / "half.tar.gz", scratch):
        age(path)
    for path in (folder / "submitting", folder):
        age(path)
    kinds = json.loads(run(capsys, "disk", "--json")[1])["kinds"]
    assert kinds["left over"]["count"] == 3
    assert kinds["left over"]["bytes"] >= 55_000
    assert run(capsys, "prune", "--yes")[0] == 0
    assert [path.name for path in (paths.state() / "runs").iterdir()] == ["kept"]
    assert len(list(paths.bundles().iterdir())) == 1
    assert names() == {"kept"}


def test_the_scratch_of_a_submit_that_was_killed_is_found(project, capsys):
    script = str(Path(__file__).parent / "kill_at.py")
    submit = ["submit", "--backend", "local", "--run", "killed"]
    argv = [sys.executable, script, "before", "deploykit.bundle:_write", "--", *submit]
    assert subprocess.run(argv, check=False, capture_output=True).returncode < 0
    (scratch,) = paths.bundles().iterdir()
    for path in (*scratch.iterdir(), scratch):
        age(path)
    assert run(capsys, "prune", "--dry-run")[1].endswith(f"\tleft over\t\tbundles/{scratch.name}\n")
    assert run(capsys, "prune", "--yes")[0] == 0
    assert list(paths.bundles().iterdir()) == []
    assert names() == {"killed"}  # it may be submitted again


def test_without_a_registry_no_results_are_removed(add, capsys):
    """Its own advice is to move a registry of another version away."""
    folder = add("precious")
    (folder / "output/model.pt").write_text("weights")
    (paths.state() / "runs.sqlite").rename(paths.state() / "away.sqlite")
    for path in (*folder.iterdir(), folder, *paths.bundles().iterdir()):
        age(path)
    assert run(capsys, "prune", "--older", "0s", "--yes")[0] == 0
    assert (folder / "output/model.pt").read_text() == "weights"
    assert len(storage.bundles()) == 1
    kinds = json.loads(run(capsys, "disk", "--json")[1])["kinds"]
    assert kinds["unlisted runs"]["count"] == 1


def test_logs_of_crashes_go_when_they_are_old(capsys):
    folder = paths.private_folder(paths.state() / "crashes")
    for name, days in (("old.log", 40), ("new.log", 2)):
        paths.write(folder / name, "x")
        age(folder / name, days * DAY)
    assert run(capsys, "prune", "--older", "30d", "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["new.log"]


def test_prune_goes_on_after_one_that_cannot_be_removed(history, capsys, monkeypatch):
    remove = storage.remove

    def refuse_one(path):
        if path.name == "bbbb":
            raise storage.CannotWrite("bbbb cannot be removed: busy")
        remove(path)

    monkeypatch.setattr(storage, "remove", refuse_one)
    code, _, err = run(capsys, "prune", "--older", "30d", "--yes")
    assert code == 73
    assert "bbbb: bbbb cannot be removed: busy" in err
    assert names() == {"bbbb", "cccc", "dddd", "eeee"}


# --- disk ---------------------------------------------------------------------------------------


def test_disk_adds_up_and_lists_the_largest_first(add, capsys):
    large, small = add("large"), add("small")
    (large / "checkpoints/step-1").write_bytes(b"x" * 2_000_000)
    (small / "output/result").write_bytes(b"x" * 300_000)
    shown = json.loads(run(capsys, "disk", "--json")[1])
    assert [one["run"] for one in shown["runs"]] == ["large", "small"]
    first, second = shown["runs"]
    assert 2_000_000 <= first["parts"]["checkpoints"] < 2_020_000
    assert 300_000 <= second["parts"]["output"] < 320_000
    assert sum(kind["bytes"] for kind in shown["kinds"].values()) == shown["bytes"]
    counted = subprocess.run(
        ["du", "-s", "-B1", str(paths.state())], capture_output=True, text=True, check=True
    )
    assert abs(int(counted.stdout.split()[0]) - shown["bytes"]) <= 8192
    assert shown["free"] > 0
    out = run(capsys, "disk")[1]
    assert out.index("runs\t2\t") < out.index("bundles\t1\t")
    assert out.index("\nlarge\t") < out.index("\nsmall\t")


def test_disk_with_nothing_to_show_makes_no_file(capsys):
    code, out, _ = run(capsys, "disk")
    assert (code, out.startswith(f"{paths.state()}: 0 B, ")) == (0, True)
    assert not paths.state().exists()


def test_a_file_with_two_names_counts_once_and_a_link_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    empty = storage.size(folder)
    (folder / "one").write_bytes(b"x" * 8192)
    os.link(folder / "one", folder / "two")
    (folder / "link").symlink_to("..")  # a target of 60 bytes and more would take a block
    assert storage.size(folder) == empty + 8192


def test_disk_looks_into_folders_of_any_depth(tmp_path):
    deep = tmp_path / "deep"
    here = deep
    for _ in range(300):
        here /= "d"
    here.mkdir(parents=True)
    (here / "file").write_bytes(b"x" * 4096)
    assert storage.size(deep) >= 301 * 4096
