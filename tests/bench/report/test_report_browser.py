"""The page in a real browser: it draws, it filters, it fits a phone, and it says nothing to the console."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_bundles import a_set

from headrace.bench.reporting.page import report_page

pytestmark = pytest.mark.system


@pytest.fixture
def shown(browser, tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_text(report_page(a_set()))

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
    for name in ("throughput", "learning"):
        box = page.locator(f"#{name} svg").first.bounding_box()
        assert box["width"] > 400
        assert box["height"] > 150
    assert page.locator("#startup svg rect").count() >= 2
    assert page.locator("#split .track i").first.bounding_box()["width"] > 10
    assert page.said == []


def test_filters_choose_rows_and_lines_and_can_be_taken_back(shown) -> None:
    page = shown()
    everyone = page.locator("#runs-table tbody tr:visible").count()
    page.get_by_label("library").select_option("skrl")
    rows = page.locator("#runs-table tbody tr:visible")
    assert 0 < rows.count() < everyone
    assert set(rows.evaluate_all("rows => rows.map(row => row.dataset.library)")) == {"skrl"}
    assert page.locator("#learning g[data-runs]:visible").count() == 1
    assert page.locator("#count").inner_text() == f"{rows.count()} of {everyone} runs"
    page.get_by_role("button", name="show all").click()
    page.wait_for_function(f"document.querySelectorAll('#runs-table tbody tr:not([hidden])').length === {everyone}")
    page.get_by_label("search").fill("crashed")
    assert page.locator("#runs-table tbody tr:visible").count() == 1


def test_the_keyboard_reaches_filters_and_scroll_boxes(shown) -> None:
    page = shown()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.filter || document.activeElement.className"))
    assert {"kind", "task", "library", "status", "text"} <= set(reached)
    assert "scroll" in reached
    assert "plot" in reached


def test_a_phone_needs_no_sideways_scrolling(shown) -> None:
    page = shown(viewport={"width": 375, "height": 800}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_dark_mode_is_dark(shown) -> None:
    color = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert max(shown(color_scheme="dark").evaluate(color)) < 60
    assert min(shown(color_scheme="light").evaluate(color)) > 200


def test_the_table_of_runs_is_not_clipped(shown) -> None:
    page = shown(viewport={"width": 1100, "height": 900})
    fits = "(() => { const it = document.querySelector('#runs .scroll'); return it.scrollWidth <= it.clientWidth; })()"
    assert page.evaluate(fits)


def test_a_dark_page_is_printed_light(shown) -> None:
    page = shown(viewport={"width": 1100, "height": 900}, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(16, 23, 22)"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
