"""The site: no dead links, pictures that are up to date, and a strict build that loads nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree as ET

import pytest

from tests.browser import AXE, BROWSER, findings, opened

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
SPHINX = ROOT / ".venv-docs/bin/python"
_CODE = re.compile(r"^```.*?^```$|<!--.*?-->|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=\"(?:https?:)?//"
    r"|<link\b[^>]*\brel=\"(?:stylesheet|preload|icon)\"[^>]*\bhref=\"(?:https?:)?//"
    r"|@import|url\([\"']?(?:https?:)?//"
)
"""Markup that makes a browser load something from another host."""


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def script(monkeypatch):
    """Import a script of docs/ by its name."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def dead_links(path, text):
    """Links of a page to files or headings that do not exist."""
    for target, anchor in _LINK.findall(_CODE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists():
            yield target
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}#{anchor}"


def anchors(text):
    """The anchors that GitHub and the site give to headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_no_link_is_dead(path):
    assert not list(dead_links(path, path.read_text(encoding="utf-8")))


def test_dead_links_are_seen():
    text = "[a](nowhere.md) [b](index.md#no-heading) [c](index.md#deploykit) `[d](nowhere.md)`"
    assert list(dead_links(DOCS / "page.md", text)) == ["nowhere.md", "index.md#no-heading"]


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert pages - {"index", "extra/SKILL"} == listed


def test_pictures_are_what_their_scripts_draw(script):
    drawn = script("pictures").pictures()
    for name, text in drawn.items():
        on_disk = (DOCS / "pictures" / name).read_text(encoding="utf-8")
        assert on_disk == text, f"docs/pictures/{name} is out of date: make docs"
    from_runs = {"run.svg", "watch.png", "watch-wide.png", "report.png"}
    assert {path.name for path in DOCS.glob("pictures/*")} == {*drawn, *from_runs}


def test_every_picture_is_shown_and_has_words_for_those_who_cannot_see_it():
    shown = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    for path in DOCS.glob("pictures/*"):
        assert re.search(rf"!\[[^\]]{{10,}}\]\([./\w-]*{path.name}\)", shown), path.name
        assert path.stat().st_size < 100_000
    for path in DOCS.glob("pictures/*.svg"):
        assert ET.parse(path).getroot().get("aria-label")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16)])
def test_the_bubble_that_is_drawn_is_that_of_the_formula(script, name, ranks, pieces):
    schedules = script("pipeline_schedule")
    stages = schedules.SCHEDULES[name]
    drawn = schedules.simulate(name, ranks, pieces)
    assert drawn.bubble == pytest.approx((ranks - 1) / (stages * pieces + ranks - 1))
    assert len(drawn.slots) == 2 * ranks * stages * pieces


@pytest.mark.nightly
@pytest.mark.torch
def test_the_terminal_in_the_readme_shows_what_a_run_prints(script, tmp_path, monkeypatch):
    monkeypatch.delenv("DEPLOYKIT_HOME")
    picture = ET.parse(DOCS / "pictures/run.svg").getroot()
    shown = [part.text or "" for part in picture.findall("{http://www.w3.org/2000/svg}text")]

    def without_numbers(lines):
        """Times and sizes depend on the machine, and so does their width."""
        lines = (re.sub(r"(\d+[hm] )+(?=\d+[ms])", "", line) for line in lines)
        return [re.sub(r"\d+", "0", re.sub(" +", " ", line)) for line in lines]

    printed = script("terminal").session(tmp_path)
    assert without_numbers(printed) == without_numbers(shown), "out of date: make docs"


def test_the_listing_of_strings_has_what_users_see(script):
    strings = script("strings")
    samples = {
        "deploykit/cli/submit.py": r"\w+ \w+",
        "deploykit/lib/errors.py": r"\w+ \w+",
        "deploykit/job/model.py": r"^Name of the job",
        "templates/slurm.sh": r"\w+ \w+",
    }
    for name, pattern in samples.items():
        texts = [text for _, text in strings.strings(ROOT / name)]
        assert any(re.search(pattern, text) for text in texts), name


def test_the_listing_of_strings_tells_messages_from_the_rest(script, tmp_path):
    page = tmp_path / "page.py"
    page.write_text(
        '"""A docstring of a module."""\n'
        'raise ValueError(f"no such run: {run.id}", hint="deploykit list shows them")\n'
        "logs = f\"logs: {name or 'no such run'}\"\n"
        'pattern = r"\\d+ of (?P<total>\\d+) steps"\n'
        "class Options:\n"
        '    """The section of a job file."""\n'
        '    name: Annotated[str, Help("Name of it all.")]\n'
    )
    assert script("strings").strings(page) == [
        (2, "deploykit list shows them"),
        (2, "no such run: {run.id}"),
        (3, "logs: {name or 'no such run'}"),
        (3, "no such run"),
        (6, "The section of a job file."),
        (7, "Name of it all."),
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if not SPHINX.exists():
        pytest.skip("run make .venv-docs/.ready first")
    folder = tmp_path_factory.mktemp("site")
    command = [SPHINX, "-m", "sphinx", "--fail-on-warning", "-q", "-b", "html", DOCS, folder]
    built = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not SPHINX.exists(), reason="run make .venv-docs/.ready first")
def test_the_site_builds_without_a_warning_and_loads_nothing(site):
    texts = [path for path in site.rglob("*") if path.suffix in {".html", ".css"}]
    assert len(texts) > len(list(DOCS.rglob("*.md")))
    for path in texts:
        loads = _LOADED.search(path.read_text(encoding="utf-8"))
        assert loads is None, f"{path.relative_to(site)}: {loads[0]}"
    assert (site / "searchindex.js").stat().st_size > 10_000
    start = (site / "index.html").read_text(encoding="utf-8")
    (cards,) = re.findall(r'<ul class="cards[^"]*">(.*?)</ul>', start, re.DOTALL)
    assert cards.count("<li>") == 6


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None or not AXE.exists() or not SPHINX.exists(),
    reason="optional: no Chromium or axe",
)
@pytest.mark.parametrize("name", ["index", "how-to/compare", "reference/causes"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"width": 1280}, marks=pytest.mark.nightly),
        {"width": 1280, "scheme": "dark"},
        {"width": 390},
    ],
    ids=["wide", "dark", "phone"],
)
def test_axe_has_no_serious_finding_on_the_site(site, name, shape):
    found = findings(site / f"{name}.html", **shape)
    assert found["passed"] > 10
    assert (found["lines"], found["wider"]) == ([], 0)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or not SPHINX.exists(), reason="optional: no Chromium or site")
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 7", "causes"),
        ("RuntimeError: The server socket has failed to listen on [::]:29517", "causes"),
        ("pruner", "sweep"),
    ],
)
def test_a_message_that_is_pasted_into_the_search_finds_its_page(site, words, page):
    options = ("--virtual-time-budget=8000",)
    dom, _ = opened(site / "search.html", *options, query=f"?q={quote(words)}")
    results = re.search(r'<ul [^>]*class="search".*?</ul>', dom, re.DOTALL)[0]
    assert f"/{page}.html" in re.search('href="([^"]*)"', results)[1]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"CUDA out of memory\. Tried to allocate \d+", "CUDA out of memory. Tried to allocate …"),
        (r"[Ee]rror (?:one|two): (?P<path>[^']{1,80})'", "Error one two : … '"),
        (r"^plain (?!not)text$", "plain not text"),
    ],
)
def test_the_words_of_a_pattern_are_those_that_people_search(script, pattern, words):
    assert script("conf")._message(pattern) == words


def test_the_check_for_outside_requests_sees_them():
    for text in (
        '<script src="https://cdn.example/x.js">',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "@import 'x.css'",
        "url(https://fonts.example/x.woff)",
    ):
        assert _LOADED.search(text)
    assert _LOADED.search('<a href="https://example.org">') is None
