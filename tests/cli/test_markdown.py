"""`report` and `compare` as Markdown, read by a parser of CommonMark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from deploykit.cli import main as cli
from deploykit.cli import markdown
from deploykit.job.model import State, Status
from deploykit.run import registry

EVIL = "`x` @ada [a](http://evil) <img src=x> | **b** #1 ``` \x1b[2J\u202e"
PARSER = MarkdownIt("commonmark").enable("table")
SAFE = {
    *("heading", "paragraph", "inline", "text", "code_inline", "strong", "softbreak", "fence"),
    *("table", "thead", "tbody", "tr", "th", "td", "html_block"),
}
OURS = {"<details><summary>Metrics</summary>\n", "</details>\n"}


def parts(text):
    """Every token of a document, also those within lines."""
    for token in PARSER.parse(text):
        yield token
        yield from token.children or ()


def is_safe(text):
    for token in parts(text):
        kind = token.type.removesuffix("_open").removesuffix("_close")
        assert kind in SAFE, token
        if kind == "html_block":
            assert token.content in OURS
        if kind == "text":
            assert "@" not in token.content
    return True


def table(text):
    """The cells of the first table."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `*") for cell in row] for row in rows if row[0].strip() != "---"]


@pytest.fixture(autouse=True)
def runs(project, tmp_path):
    """A good run, and a failed one whose texts are hostile."""
    for name, state, loss in (("good", State.SUCCEEDED, 0.25), ("bad", State.FAILED, 0.5)):
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "output").mkdir()
        evil = EVIL if name == "bad" else "fine"
        job = {"name": "exp", "entrypoint": {"script": "train.py", "args": ["--note", evil]}}
        (folder / "job.json").write_text(json.dumps(job))
        points = {"step": 1, "loss": loss, f"m {evil}": 1.0}
        (folder / "output/metrics.jsonl").write_text(json.dumps(points) + "\n")
        if state is State.FAILED:
            log = f"RuntimeError: CUDA out of memory. {EVIL}\n"
            (folder / "logs/node-0.log").write_text(log)
        where = ("local", "localhost", str(folder))
        row = registry.Run(name, "exp", *where, "a", "b", None, 1.0, f"{folder}/output", name)
        registry.add(row)
        registry.update(name, Status(state, "", evil, int(state is State.FAILED)))


def shown(capsys, *words, code=0):
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def test_a_report_has_the_state_the_numbers_the_cause_and_the_metrics(capsys):
    text = shown(capsys, "report", "bad", "--markdown")
    assert is_safe(text)
    assert text.startswith("### `bad`: failed\n")
    assert "\n**`cuda_oom`**: a GPU ran out of memory\n" in text
    assert "Reduce the micro-batch" in text
    assert "| `loss` | 0.5 | 0.5 |" in text
    assert not list(Path().glob("report-*"))


def test_several_runs_are_compared(capsys):
    text = shown(capsys, "report", "good", "bad", "--markdown")
    assert is_safe(text)
    compared = text[text.index("### Comparison") :]
    assert table(compared)[:2] == [
        ["", "good", "bad"],
        ["state", "succeeded", "failed, exit code 1"],
    ]


def test_compare_marks_the_best(capsys):
    text = shown(capsys, "compare", "good", "bad", "--markdown")
    assert is_safe(text)
    assert "| `loss, last` | **`0.25`** | `0.5` |" in text


@pytest.mark.parametrize("words", [["--force"], ["-o", "x.html"]])
def test_a_report_in_markdown_is_no_file(capsys, words):
    error = shown(capsys, "report", "good", "--markdown", *words, code=64)
    assert "--markdown cannot be combined" in error


@pytest.mark.parametrize("words", [["report", "good"], ["compare", "good", "bad"]])
def test_markdown_is_no_json(capsys, words):
    assert cli.main([*words, "--markdown", "--json"]) == 64
    assert "--markdown" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_long_line_is_cut():
    text = markdown.block(["x" * 9999] * 99)
    assert f"\n{'x' * markdown.MAX_LINE}…\n" in text
    assert len(text) < 65536 / 4


@given(st.text(max_size=60))
def test_any_text_is_one_piece_of_code(text):
    assert is_safe(markdown.code(text) or "none")
    assert is_safe(markdown.block([text]))
    rows = PARSER.parse(markdown.table(["a"], [[markdown.code(text)]]))
    assert sum(token.type == "td_open" for token in rows) == 1
