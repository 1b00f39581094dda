"""The report says what the summary says, whatever was measured, and shows foreign text as text."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest
from bs4 import BeautifulSoup
from eval_runs import NASTY, fake_run, unmeasured
from tiny import seed_of_run

from blendkv.errors import InputError, MissingDependencyError
from blendkv.eval.report import write_report
from blendkv.eval.report.page import render
from blendkv.eval.report.text import DASH, clean
from blendkv.eval.summary import summarise

SEED = seed_of_run()
SCORES = ("kl", "f1", "em", "rouge_l", "f1_full", "kl_first", "kl_gold", "top1", "budget_spent", "bytes_loaded", "n")
DRAWN = ("KL against speed-up", "F1 against speed-up", "KL against budget", "Where the time to the first token goes",
         "Deviation from full prefill by layer", "The loading planner's predictions")  # fmt: skip


def parsed(run, summary=None):
    page = render(run, summarise(run) if summary is None else summary)
    return BeautifulSoup(page, "lxml"), page


def table(soup):
    """Cells by mode and key."""
    rows = soup.select("#modes tbody tr")
    return {row["data-mode"]: {cell["data-key"]: cell for cell in row.select("td")} for row in rows}


def pictures(soup):
    return {figure.h3.text: figure for figure in soup.select("#plots figure")}


@pytest.fixture(scope="module")
def run():
    print(f"seed {SEED}")
    return fake_run(SEED)


@pytest.fixture(scope="module")
def summary(run):
    return summarise(run)


@pytest.fixture(scope="module")
def soup(run, summary):
    return parsed(run, summary)[0]


def test_the_table_has_the_figures_of_the_summary(soup, summary):
    shown = table(soup)
    assert list(shown) == [row["mode"] for row in summary]
    for row in summary:
        cells = shown[row["mode"]]
        expected = {key: row[key] for key in SCORES} | {
            "ttft": row["ttft_ms"]["p50"],
            "speedup": row["speedup"]["estimate"],
        }
        for key, value in expected.items():
            if key == "rouge_l":
                assert key not in cells
            elif value is None:
                assert cells[key].text.startswith(DASH)
                assert not cells[key].has_attr("data-value")
            else:
                assert float(cells[key]["data-value"]) == pytest.approx(value)
        assert float(cells["kl"].contents[0]) == pytest.approx(row["kl"], rel=0.05)
        assert cells["f1"].contents[0] == f"{row['f1']:.3f}"
        assert cells["f1"].small.text == f"±\u00a0{row['f1_se']:.3f}"
        assert cells["speedup"].contents[0] == f"{row['speedup']['estimate']:.2f}x"


def test_asked_and_named_budgets_stand_beside_the_spent_one(soup):
    shown = table(soup)
    assert shown["cacheblend@0.15"]["budget_spent"].contents[0] == "20.0\u00a0%"
    assert shown["cacheblend@0.15"]["budget_spent"].small.text == "asked 20.0\u00a0%\nnamed 15\u00a0%"
    assert shown["epic@16"]["budget_spent"].small.text == "asked 20.0\u00a0%\nnamed 16 tokens"
    assert shown["blend:strided@0.03"]["budget_spent"].small.text == "asked 3.0\u00a0%"


def test_every_picture_is_drawn_and_described(soup):
    found = pictures(soup)
    assert tuple(found) == DRAWN
    for figure in found.values():
        assert len(figure.find("svg")["aria-label"]) > 40
    pareto = found["KL against speed-up"].find("svg")
    words = [text.text for text in pareto.select("text")]  # real text: it can be found, copied and read aloud
    assert {"full prefill", "CacheBlend", "head_query", "kv_deviation (CacheBlend)", "5\u00a0%"} <= set(words)
    assert "full" in pareto["aria-label"]


def test_ids_are_unique_and_references_meet_them(soup):
    ids = [element["id"] for element in soup.select("[id]")]
    assert len(ids) == len(set(ids))
    page = str(soup)
    wanted = set(re.findall(r"url\(#([^)]+)\)", page)) | {
        e["href"][1:] for e in soup.select("[href]") if e["href"].startswith("#")
    }
    assert wanted
    assert wanted <= set(ids)


def test_the_same_run_is_the_same_page(run, summary):
    assert render(run, summary) == render(run, summary)


def test_what_was_run_is_told(soup):
    told = soup.select_one("#facts").text
    for part in (
        "made_up.json",
        "float32",
        "A CPU <of> ours",
        "torch 2.13",
        "2026-01-31",
        f"{SEED:032x}",
        "8.0\u00a0GiB",
    ):
        assert part in told
    assert "8 items, 11 modes" in soup.select_one("header").text


def test_the_worst_items_are_those_of_the_closest_blend(run, summary, soup):
    blends = [row for row in summary if "@" in row["mode"]]
    closest = min(blends, key=lambda row: row["kl"])["mode"]
    results = sorted((r for r in run.results if r.mode == closest), key=lambda r: -r.kl)
    shown = soup.select("article.item")
    assert [a.h3.bdi.text for a in shown] == [r.item for r in results]
    for article, result in zip(shown, results, strict=True):
        full = next(r for r in run.results if r.mode == "full" and r.item == result.item)
        sides = [p.text for p in article.select(".sides p")]
        assert sides == [full.answer, result.answer]
        record = run.items[result.item]
        passages = article.select(".tokens")
        assert len(passages) == len(record.chunks)
        for passage, tokens, chosen in zip(passages, record.chunks, result.selected, strict=True):
            marked = "".join(mark.text for mark in passage.select("mark"))
            assert marked == "".join(tokens[i] for i in chosen)
            for summary_of_gap in passage.select("summary"):
                summary_of_gap.extract()
            assert passage.text == "".join(tokens)


def test_at_most_ten_items_are_shown():
    soup, _ = parsed(fake_run(SEED, items=14, modes=["full", "blend:head_query@0.05"], tokens=20))
    assert len(soup.select("article.item")) == 10


@pytest.mark.parametrize("modes", [["full", "reuse", "blend:head_query@0.05"]])
def test_foreign_text_is_text(modes):
    run = fake_run(SEED, items=len(NASTY), modes=modes, tokens=40, nasty=True)
    run.meta["model"] = run.meta["data"] = "</title><script>alert(2)</script>"
    run.meta["left_out"] = {"blend:<b>": "<i>no</i>"}
    for result in run.results:
        result.fallback = "<script>alert(3)</script>" if result.mode == "reuse" else None
    soup, page = parsed(run)
    assert not soup.select("script, img, iframe, object, embed, form, a, b, base")
    assert not [e for e in soup.find_all(True) if any(key.startswith("on") for key in e.attrs)]
    assert len(soup.select("style")) == 1
    assert soup.title.text.endswith("</title><script>alert(2)</script>")
    assert "<b> was left out: <i>no</i>." in soup.select_one("#verdict").text
    shown = {a.h3.bdi.text for a in soup.select("article.item")}
    assert shown <= {clean(item) for item in run.items}
    for text in ("<script>alert('x')</script>", "{{ 7 * 7 }}{% for %}", "]]>", "<!-- --", "$x^2$"):
        assert text in soup.select_one("#worst").text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\ud800-\udfff]", page)


def test_nothing_is_asked_of_the_network(soup):
    policy = soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert policy.startswith("default-src 'none';")
    for element in soup.find_all(True):
        for key in ("src", "href", "xlink:href", "action", "srcset", "data"):
            assert element.get(key, "#").startswith(("#", "data:"))
    assert "url(" not in re.sub(r"url\(#", "", str(soup))
    assert "@import" not in soup.style.text


@pytest.mark.parametrize("task", ["qa", "summary"])
@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize("modes", [["full"], ["reuse"], ["blend:head_query@0.05+js"], ["full", "reuse", "epic@16"]])
def test_any_run_has_a_report(task, items, modes):
    run = fake_run(SEED, items=items, modes=modes, task=task, tokens=30)
    soup, _ = parsed(run)
    shown = table(soup)
    assert list(shown) == modes
    assert not re.search(r"\b(nan|inf|None|undefined)\b", soup.text)
    scored, other = ("f1", "rouge_l") if task == "qa" else ("rouge_l", "f1")
    for cells in shown.values():
        assert cells[scored].has_attr("data-value")
        assert not cells.get(other, soup.title).has_attr("data-value")
    quality = pictures(soup)["F1 against speed-up"]
    assert (quality.svg is None) == (task == "summary" or "full" not in modes)
    if quality.svg is None:
        assert "Not drawn" in quality.figcaption.text


def test_with_nothing_measured_dashes_and_reasons_are_left(run):
    bare = replace(
        run, results=[replace(r, kl=None, stages_s={}, predicted_s=None, deviation=None) for r in run.results]
    )
    soup, _ = parsed(bare, unmeasured(bare))
    for cells in table(soup).values():
        assert {cell.text for key, cell in cells.items() if key != "n"} == {DASH}
    assert not soup.select("svg")
    assert [f.figcaption.text[:9] for f in pictures(soup).values()] == ["Not drawn"] * len(DRAWN)
    assert not soup.select("article.item")
    assert "not measured" in soup.select_one("#verdict").text


@pytest.mark.parametrize(("correct", "word"), [(False, "FAILED"), (None, "NOT CHECKED")])
def test_without_correctness_there_is_no_speed_up(correct, word):
    soup, _ = parsed(fake_run(SEED, correct=correct), summarise(fake_run(SEED)))  # a summary that has speed-ups
    told = soup.select_one("#check")
    assert "failed" in told["class"]
    assert word in told.text
    assert soup.select_one("main").find(True) is told
    assert "speedup" not in next(iter(table(soup).values()))
    assert "speed-up of" not in soup.select_one("#verdict").text
    assert not re.search(r"at \d+\.\d+x|Slower", soup.select_one("#verdict").text)
    assert "Time to first token" not in soup.select_one("#pairs").text
    drawn = [title for title, figure in pictures(soup).items() if figure.svg]
    assert drawn == ["KL against budget", "Deviation from full prefill by layer"]


def test_pairs_are_shown_once_and_no_kl_of_exact_modes(soup, summary):
    rows = [[cell.text for cell in row.find_all(["th", "td"])] for row in soup.select("#pairs tbody tr")]
    pairs = [frozenset(row[:2]) for row in rows]
    assert len(pairs) == len(set(pairs)) == math.comb(len(summary), 2)
    row = next(r for r in summary if r["mode"] == "reuse")
    against = next(cells for cells in rows if cells[:2] == ["reuse", "head_query@0.05"])
    assert row["against"]["blend:head_query@0.05"]["kl"]["words"] in against
    heads = [th.text for th in soup.select_one("#pairs table").select("thead th")]
    assert heads == ["Mode", "Against", "F1", "Time to first token"]


def test_a_page_stays_small():
    """Hundreds of recomputed tokens in long passages: what has no room is counted."""
    modes = [
        "full",
        "prefix",
        "reuse",
        *(f"blend:{s}@0.15" for s in ("random", "strided", "kv_deviation", "head_query")),
    ]
    run = fake_run(SEED, items=24, modes=[*modes, "blend:head_query@0.3"], tokens=3000)
    soup, page = parsed(run)
    assert len(page.encode()) < 3_000_000
    assert "tokens are not shown" in soup.select_one("#worst").text


def test_the_load_and_the_fallbacks_are_told(run, summary):
    load = {
        "rate": 0.5,
        "requests": 40,
        "throughput": 0.43,
        "ttft_ms": {"p20": 1.0, "p50": 512.0, "p80": 9.0},
        "errors": 2,
    }
    rows = [r | {"load": load, "fallbacks": {"too long": 3}} if r["mode"] == "reuse" else r for r in summary]
    soup, _ = parsed(run, rows)
    cells = [cell.text for cell in soup.select("#load tbody tr > *")]
    assert cells == ["reuse", "0.500", "40", "0.430", "512\u00a0ms", "9.00\u00a0ms", "2"]
    assert "In 3 of 8 items, reuse fell back: too long." in soup.select_one("#verdict").text
    assert table(soup)["reuse"]["fallbacks"].text == "3"


def test_a_run_that_was_stopped_says_so(run):
    part = replace(run, results=run.results[:-3])
    assert "3 results of its items and modes are missing" in parsed(part)[0].select_one("#verdict").text


def test_the_file_is_replaced_whole(tmp_path, run, summary):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(run, summary, path)
    assert path.read_text(encoding="utf-8") == render(run, summary)
    with pytest.raises(InputError, match="no results"):
        write_report(run, [], path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named(monkeypatch, run, summary, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=rf"{name}.*pip install 'blendkv\[eval\]'"):
        render(run, summary)
