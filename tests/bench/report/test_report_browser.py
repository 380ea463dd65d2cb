"""The page in a real browser: it draws, the answer comes first, it fits a phone, and it says nothing to the console."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_bundles import a_set, varied

from headrace.bench.comparison import CompareCfg, compare
from headrace.bench.reporting.page import report_page

pytestmark = pytest.mark.system


@pytest.fixture
def shown(browser, tmp_path: Path):
    path = tmp_path / "report.html"
    sides = [[varied("runtime", 100 * side + i, label=f"side {side}") for i in range(20)] for side in range(2)]
    compared = compare(*sides, CompareCfg(accept_drift=True))
    path.write_text(report_page([*sides[0], *sides[1], *a_set()], [compared]))

    def show(**context):
        page = browser.new_context(**context).new_page()
        page.said = []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.said.append(request.url) if "file:" not in request.url else None)
        page.goto(path.as_uri())
        return page

    return show


def test_plots_are_drawn_without_a_word_on_the_console(shown) -> None:
    page = shown(viewport={"width": 1100, "height": 900})
    box = page.locator("#learning svg").first.bounding_box()
    assert box["width"] > 400
    assert box["height"] > 150
    assert page.locator("#sides svg circle").count() >= 10
    assert page.said == []


def test_the_answer_is_seen_without_scrolling(shown) -> None:
    """Of a comparison of 2 × 20 runs, on a desktop's and on a phone's screen."""
    for width, height in ((1300, 900), (400, 800)):
        page = shown(viewport={"width": width, "height": height})
        box = page.locator("#verdicts .answer").bounding_box()
        assert box["y"] + box["height"] < height
        row = page.locator("#verdicts tbody tr").first
        assert row.bounding_box()["y"] < height
        assert page.locator("#sides tbody tr").count() < 20
        page.locator("#runs summary").click()
        assert page.locator("#runs tbody tr:visible").count() == 40 + len(a_set())
        assert page.said == []


def test_a_phone_needs_no_sideways_scrolling(shown) -> None:
    page = shown(viewport={"width": 375, "height": 800}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_dark_mode_is_dark(shown) -> None:
    color = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert max(shown(color_scheme="dark").evaluate(color)) < 60
    assert min(shown(color_scheme="light").evaluate(color)) > 200


def test_a_dark_page_is_printed_light(shown) -> None:
    page = shown(viewport={"width": 1100, "height": 900}, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(16, 23, 22)"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
