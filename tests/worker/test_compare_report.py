"""The figures of pairs made by hand, and the table, page and files that are made of them."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gristmill.jobs.source import Source
from gristmill.worker.show.console import UsageRefused
from gristmill.worker.tools.compare import figures as compare_figures
from gristmill.worker.tools.compare.figures import to_compare_payload
from gristmill.worker.tools.compare.files import PAIRS, REPORT, SUMMARY, check_output, write_files
from gristmill.worker.tools.compare.html import (
    MAX_DIFF_WORDS,
    find_early_pairs,
    find_far_pairs,
    mark_differences,
    to_html,
)
from gristmill.worker.tools.compare.pairs import Comparison
from gristmill.worker.tools.compare.report import to_compare_text
from tests.worker.compare_kit import build_comparison, build_failed, build_pair, build_scores

SOURCES = [Source("/data/rows.jsonl", 10, "1", "jsonl")]
HOSTILE = '<script>alert("x")</script>&amp;'


def build_mixed() -> list[Any]:
    return [
        build_pair("yes", "yes", index=0, scores=build_scores(-3.0, -6.0, [0.5, 1.5, 1.0])),
        build_pair("yes it is", "yes it was", index=1, scores=build_scores(-9.0, -9.0, [0.0] * 9)),
        build_pair(
            "no", "yes", index=2, language="vi", num_prompt=200, scores=build_scores(-2.0, -4.0, [3.0, 4.0])
        ),
        build_failed(3, "row 3 is broken"),
    ]


def test_the_figures_are_what_they_say() -> None:
    payload = to_compare_payload(build_comparison(build_mixed(), ("yes", "no")), "rows.jsonl")
    assert (payload["rows"], payload["compared"], payload["failed"]) == (4, 3, 1)
    overall = payload["overall"]
    assert overall["same"] == pytest.approx(1 / 3)
    assert overall["first_divergence"] == {"rows": 2, "median": 3.5, "within_10": pytest.approx(2 / 3)}
    assert overall["tokens"] == {"a": 14, "b": 16}
    surprises = {"a_under_a": 14 / 14, "a_under_b": 19 / 14, "b_under_b": 6 / 16, "b_under_a": 12 / 16}
    assert overall["perplexity"] == {name: pytest.approx(math.exp(mean)) for name, mean in surprises.items()}
    assert overall["kl"] == {"mean": pytest.approx(10 / 14), "p99": 4.0, "max": 4.0}
    assert payload["first_error"] == "row 3 is broken" and "1 rows could not run" in payload["notes"][0]


def test_groups_are_by_language_and_by_prompt_length_in_its_order() -> None:
    payload = to_compare_payload(build_comparison(build_mixed()[::-1]), "rows.jsonl")
    assert {name: group["rows"] for name, group in payload["by_language"].items()} == {"en": 2, "vi": 1}
    assert list(payload["by_language"]) == ["en", "vi"]
    assert list(payload["by_prompt_tokens"]) == ["1-32", "129-512"]
    assert payload["by_language"]["vi"]["kl"]["mean"] == 3.5


def test_agreement_is_over_rows_where_a_side_chose() -> None:
    wanted, texts = ("yes", "no"), [("yes", "Yes!"), ("no", "yes"), ("?", "no"), ("?", "??")]
    pairs = [build_pair(a, b, choices=wanted) for a, b in texts]
    payload = to_compare_payload(build_comparison(pairs, wanted), "r")
    found = payload["overall"]["choices"]
    assert found == {"rows": 3, "agree": pytest.approx(1 / 3), "none_a": 2, "none_b": 1}


def test_many_languages_become_a_bounded_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_figures, "MAX_GROUPS", 3)
    pairs = [build_pair("a", "a", language=name) for name in "aaabbccdd"]
    groups = to_compare_payload(build_comparison(pairs), "r")["by_language"]
    assert {name: group["rows"] for name, group in groups.items()} == {"a": 3, "b": 2, "others": 4}


def test_without_scores_the_figures_are_left_out_and_it_is_said() -> None:
    fault = "the vocabularies differ: A has 300 tokens, B has 301"
    payload = to_compare_payload(build_comparison([build_pair("a", "b")], unscored=fault), "r")
    assert payload["overall"]["kl"] == {"mean": None, "p99": None, "max": None}
    assert set(payload["overall"]["perplexity"].values()) == {None}
    text = to_compare_text(payload)
    assert f"no perplexity and no KL: {fault}" in text and "KL mean" not in text


def test_a_surprise_beyond_every_number_is_no_number() -> None:
    pairs = [build_pair("ab", "ab", scores=build_scores(-math.inf, -2000.0, [math.inf, 1.0]))]
    payload = to_compare_payload(build_comparison(pairs), "r")
    json.dumps(payload, allow_nan=False)
    assert payload["overall"]["perplexity"]["a_under_a"] is None and payload["overall"]["kl"]["max"] is None


def test_the_table_has_a_line_a_group_and_names_both_sides() -> None:
    text = to_compare_text(to_compare_payload(build_comparison(build_mixed()), "rows.jsonl"))
    lines = text.splitlines()
    assert lines[0] == "A  m.gguf (float32, 4.5 bits a weight, 32 a key or value)"
    assert lines[1].startswith("B  m.gguf, quantization int4 (float32, ")
    assert "3 of 4 rows" in lines[2]
    for label in ("all rows", "by language", "  en", "  vi", "by prompt tokens", "  1-32", "  129-512"):
        assert sum(line.rstrip() == label or line.startswith(f"{label} ") for line in lines) == 2, label
    assert "\x1b" not in text and max(map(len, lines[3:-1])) <= 160
    assert "\x1b[" in to_compare_text(
        to_compare_payload(build_comparison(build_mixed()), "r"), 100, colors=True
    )


class Page(HTMLParser):
    """The tags, attributes and text of a comparison's page."""

    def __init__(self, comparison: Comparison, rows_file: str = "r") -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.source = to_html(comparison, to_compare_payload(comparison, rows_file))
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_escapes_everything_and_loads_nothing() -> None:
    scores = build_scores(-1, -2, [1])
    pair = build_pair(HOSTILE + " a", HOSTILE + " b", prompt=HOSTILE, language="<b>", scores=scores)
    page = Page(build_comparison([pair]), "<i>rows</i>.jsonl")
    assert not {"script", "b1", "i", "img", "link", "iframe", "object", "form"} & set(page.tags)
    assert not {"src", "href", "onload", "onclick", "action"} & {name for name, _ in page.attributes}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert page.text.count(HOSTILE) == 3 and "<i>rows</i>.jsonl" in page.text and "<b>" in page.text
    assert not re.search(r"https?://|url\(|@import", page.source)


def test_the_page_shows_the_pairs_that_differ_most_and_each_once() -> None:
    pairs = build_mixed()
    assert [pair.row.row.row_index for pair in find_far_pairs(pairs)] == [2, 0]
    assert [pair.row.row.row_index for pair in find_early_pairs(pairs)] == [2, 1]
    page = Page(build_comparison(pairs))
    assert page.tags.count("article") == 3
    assert "part after 0 tokens" in page.text and "KL 3.5 a token, 4 at most" in page.text


@pytest.mark.parametrize(
    ("a", "b", "marked"),
    [
        ("it is red.", "it is <b>.", ("it is <mark>red</mark>.", "it is <mark>&lt;b&gt;</mark>.")),
        ("same", "same", ("same", "same")),
        ("", "new", ("", "<mark>new</mark>")),
    ],
)
def test_only_what_differs_is_marked(a: str, b: str, marked: tuple[str, str]) -> None:
    assert mark_differences(a, b) == marked


def test_long_texts_are_marked_by_their_beginning_and_end() -> None:
    word = "word "
    a, b = word * MAX_DIFF_WORDS + "x" + word, word * MAX_DIFF_WORDS + "y" + word
    assert mark_differences(a, b)[0].endswith("<mark>xword</mark> ")
    longer = mark_differences(word * MAX_DIFF_WORDS, word * (MAX_DIFF_WORDS + 1))
    assert "<mark>" not in longer[0] and longer[1].count("<mark>") == 1


def test_the_files_hold_every_pair_the_page_and_the_figures(tmp_path: Path) -> None:
    comparison = build_comparison(build_mixed())
    payload = to_compare_payload(comparison, "rows.jsonl")
    folder = tmp_path / "new" / "out"
    write_files(check_output(str(folder), False, SOURCES), comparison, payload, SOURCES)
    assert sorted(path.name for path in folder.iterdir()) == sorted([PAIRS, REPORT, SUMMARY])
    rows = pq.read_table(folder / PAIRS).to_pylist()
    assert [row["row_index"] for row in rows] == [0, 1, 2, 3]
    first, _, third, failed = rows
    assert (first["answer_a"], first["same"], first["first_divergence"]) == ("yes", True, None)
    assert first["kl_mean"] == pytest.approx(1.0) and first["kl_max"] == 1.5
    assert (first["logprob_a_under_a"], first["logprob_a_under_b"]) == (-3.0, -6.0)
    assert (first["logprob_b_under_a"], first["logprob_b_under_b"]) == (-4.0, -2.0)
    assert (third["source"], third["prompt_tokens"], third["language"]) == ("rows.jsonl", 200, "vi")
    assert (failed["error"], failed["answer_a"], failed["same"]) == ("row 3 is broken", None, None)
    assert json.loads((folder / SUMMARY).read_text()) == payload


def test_a_folder_with_a_comparison_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text("old")
    with pytest.raises(UsageRefused, match="report.html is there already; .* --overwrite"):
        check_output(str(tmp_path), False, SOURCES)
    comparison = build_comparison(build_mixed())
    folder = check_output(str(tmp_path), True, SOURCES)
    write_files(folder, comparison, to_compare_payload(comparison, "r"), SOURCES)
    assert (tmp_path / REPORT).read_text() != "old"


@pytest.mark.parametrize(
    ("folder", "overwrite", "message"),
    [
        ("file", False, "is not a folder"),
        ("file/below", False, "file is not a folder"),
        ("s3://bucket/out", False, "local folder"),
        (".", True, "summary.json is a folder"),
        ("x", True, "pairs.parquet is the input"),
    ],
)
def test_a_place_that_can_not_hold_the_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, overwrite: bool, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path(SUMMARY).mkdir()
    with pytest.raises(UsageRefused, match=message):
        check_output(folder, overwrite, [Source(str(tmp_path / "x" / PAIRS), 1, "1", "parquet")])
