"""The report in a real browser: no complaint, no request, no wider than a phone, and something to see."""

from __future__ import annotations

import io
import unicodedata

import pytest
from chromium import browser
from eval_runs import fake_run, unmeasured
from PIL import Image
from pypdf import PdfReader
from tiny import seed_of_run

from blendkv.eval.report import write_report
from blendkv.eval.summary import summarise

SEED = seed_of_run()
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
LONG = "blend:query_attention@0.15+js"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "usual": fake_run(SEED),
        "nasty": fake_run(SEED, items=4, modes=["full", "reuse", LONG], nasty=True, correct=False),
        "bare": fake_run(SEED, items=1, modes=["full"], tokens=5),
    }
    for name, run in runs.items():
        write_report(run, unmeasured(run) if name == "bare" else summarise(run), folder / f"{name}.html")
    return folder


def colours(path):
    """Number of colours, and the share of pixels that have the most frequent one."""
    image = Image.open(path).convert("RGB")
    counts = sorted((count for count, _ in image.getcolors(1 << 24)), reverse=True)
    return len(counts), counts[0] / (image.width * image.height)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["usual", "nasty", "bare"])
def test_it_opens_without_a_complaint(page, reports, tmp_path, name, size, dark):
    before = len(page.complaints())
    page.open(reports / f"{name}.html", *SIZES[size], dark=dark)
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    wide, window = page.value(WIDTHS)
    assert window == SIZES[size][0]
    assert wide <= window
    assert page.complaints()[before:] == []
    page.screenshot(tmp_path / "window.png")
    number, most = colours(tmp_path / "window.png")
    assert number > 20
    assert 0.3 < most < 0.99
    corner = Image.open(tmp_path / "window.png").convert("L").getpixel((2, 2))
    assert corner < 64 if dark else corner > 192


def test_the_pictures_are_seen_and_can_be_read(page, reports, tmp_path):
    page.open(reports / "usual.html", *SIZES["phone"])
    sizes = page.value(
        "[...document.querySelectorAll('figure > svg')].map(s => [s.getBoundingClientRect().width, "
        "Math.min(...[...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))])"
    )
    assert len(sizes) == 6
    for width, text in sizes:
        assert 250 < width <= 360
        assert text >= 7  # pixels of a phone's screen
    assert page.value("document.querySelectorAll('.tokens mark').length") > 10


def test_a_gap_opens_by_a_click_alone(page, reports):
    page.open(reports / "usual.html", *SIZES["desktop"])
    page.value("document.querySelectorAll('#worst .item > details').forEach(d => { d.open = true })")
    before, after = page.value(
        "(() => { const gap = document.querySelector('.tokens details'); const area = () => "
        "{ const box = gap.getBoundingClientRect(); return box.width * box.height }; const closed = area(); "
        "gap.querySelector('summary').click(); return [closed, area()] })()"
    )
    assert after > before


def test_print_shows_what_matters(page, reports, tmp_path):
    page.open(reports / "usual.html", *SIZES["desktop"])
    page.pdf(tmp_path / "report.pdf")
    reader = PdfReader(io.BytesIO((tmp_path / "report.pdf").read_bytes()))
    text = " ".join(unicodedata.normalize("NFKC", "".join(p.extract_text() for p in reader.pages)).split())
    assert 2 <= len(reader.pages) <= 9
    for part in ("Closest to full prefill", "speed-up of the time", "Worst items", "Question", "What was run"):
        assert part in text
    assert "All modes" not in text  # what is closed on the screen is not in print
    width = float(reader.pages[0].mediabox.width)
    assert width == pytest.approx(595, abs=2)


def test_a_page_that_does_wrong_is_noticed(page, tmp_path):
    before = len(page.complaints())
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<p style='width: 2000px'>wide<img src='https://example.invalid/x.png'><script>console.error('heard'); boom()"
        "</script>"
    )
    page.open(bad, *SIZES["phone"])
    told = " ".join(page.complaints()[before:])
    for part in ("heard", "boom", "https://example.invalid/x.png"):
        assert part in told
    wide, _ = page.value(WIDTHS)
    assert wide > 1000
