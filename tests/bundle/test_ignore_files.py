"""Ignore files mean what git says they mean."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.bundle import source_tree

NAMES = ["a", "b", "ab", "ba", "aab", ".a", "a.b", "a b", "#a", "ä"]
"""Names of files and folders; no default pattern matches them."""
SIMPLE = st.builds(
    "{}{}{}".format,
    st.sampled_from([*NAMES[:-2], "ä", "*", "*a", "a*", "a*b", "*.b", ".*", "A", "a]", "{a}"]),
    st.sampled_from(["", "", "/"]),
    st.sampled_from(["", "", " ", "  ", "\r"]),
) | st.sampled_from(["", " ", "#a", "# b"])
OTHERS = st.sampled_from(
    [
        *("!a", "!b/", "!a/b", "!a/b/", "!*/", "!a/**", "!b/*", "!**/b", "/a", "/*", "*", "a/*"),
        *("a/b", "a/b/", "**/a", "**/b/", "a/**", "b/**", "a/**/b", "a**b", "*a*", "[ab]", "a?"),
        *("a\\ ", "\\#a"),
    ]
)
TREES = st.sets(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join), max_size=12)


def files_of(*patterns):
    """Ignore files by their folder: above the source, in it, below it."""
    lines = st.lists(st.one_of(*patterns), max_size=4)
    return st.dictionaries(st.sampled_from(["", "a", "a/b", "a/b/a"]), lines, max_size=3)


def make(top, tree, files):
    """Write the tree into `top`, a repository; a path that is a folder already is no file."""
    subprocess.run(["git", "init", "-q", "--template=", top], check=True)
    (top / "a/b/a").mkdir(parents=True)
    for path in sorted(tree, key=len, reverse=True):
        if not any((top / part).is_file() for part in Path(path).parents):
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            if not (top / path).is_dir():
                (top / path).touch()
    for folder, lines in files.items():
        (top / folder / ".gitignore").write_text("\n".join(lines), "utf-8", newline="")


def kept_by_git(top, paths):
    asked = "".join(f"{path}\0" for path in paths).encode()
    argv = ["git", "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run([*argv, "-z"], cwd=top, input=asked, capture_output=True, check=False)
    assert done.returncode in {0, 1}, done.stderr
    return set(paths) - set(done.stdout.decode().split("\0"))


def kept(source, paths):
    """The paths that would be bundled, of those in the source folder."""
    rules = source_tree.IgnoreRules(source)
    return {path for path in paths if rules.travels(path)}


def assert_as_git(tree, files, sources=("", "a", "a/b")):
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        make(top, tree, files)
        everything = [path for path in top.rglob("*") if path.is_file()]
        for source in (top / name for name in sources):
            paths = [
                path.relative_to(source).as_posix()
                for path in everything
                if path.is_relative_to(source) and ".git" not in path.relative_to(top).parts
            ]
            expected = kept_by_git(source, paths)
            assert kept(source, paths) == expected, source.relative_to(top)


examples = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@examples
@given(TREES, files_of(SIMPLE, OTHERS))
def test_patterns_mean_what_git_says(tree, files):
    assert_as_git(tree, files)


def test_a_folder_that_is_included_does_not_include_what_another_pattern_ignores():
    """`!b/` is about the folder `b` alone; `a` ignores `a/b/a`."""
    assert_as_git({"a/b/a/x", "a/b/y"}, {"a": ["a", "!b/"]})
    assert_as_git({"a/b/x"}, {"": ["a", "!b"], "a": ["!b/"]})
