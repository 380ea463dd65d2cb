"""The page as text: every section, escaped names, nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_bundles import a_set, varied

import headrace
from headrace.bench.comparison import CompareCfg, compare
from headrace.bench.reporting._plots import Series, icicle, line_plot, log_ticks, nice_ticks, short, spans_decades
from headrace.bench.reporting.page import Film, Saving, Story, report_page
from headrace.bench.schema import PerEpisode, ProfileNode, bundle_text
from headrace.cli import main
from headrace.errors import DataError

VOID = {"meta", "link", "input", "br", "img"}


class Outline(HTMLParser):
    """Checks that tags close in order, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_a_page_of_all_kinds_has_every_section_and_a_row_per_run() -> None:
    bundles = a_set()
    compared = compare([varied("runtime", i) for i in range(2)], [varied("runtime", i) for i in range(2, 4)])
    found = outline(report_page(bundles, [compared]))
    sections = ("evaluations", "runs", "throughput", "learning", "split", "memory", "startup", "verdicts")
    assert [name for name in found.ids if name in sections] == list(sections)
    assert len(found.ids) == len(set(found.ids))
    page = report_page(bundles)
    assert len(re.findall(r'<tr data-run="', page)) == len(bundles)
    assert found.counts["polyline"] >= 6
    assert found.counts["polygon"] == 2  # a band of three seeds for each of two libraries


def test_a_section_that_the_runs_have_nothing_for_is_left_out() -> None:
    page = report_page([varied("startup", 0)])
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["runs", "startup"]
    assert re.findall(r'<a href="#(\w+)">', page) == sections


def test_a_story_comes_first_with_its_film_and_what_was_saved(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"\x00film")
    story = Story(sentences=["<once>"], savings=[Saving("rows", "all", 200, 50)], films=[Film(film, "a & b")])
    page = report_page([varied("runtime", 0)], story=story)
    outline(page)
    assert page.index('<section id="story"') < page.index('<section id="runs"')
    for part in ("<p>&lt;once&gt;</p>", "<td>75%</td>", "data:video/mp4;base64,AGZpbG0=", "a &amp; b"):
        assert part in page


def test_an_unfinished_evaluation_has_no_rates() -> None:
    play = varied("play", 0)
    plan = play.plan.model_copy(update={"kind": "episodes", "episodes_planned": 10_000})
    page = report_page([play.model_copy(update={"plan": plan})])
    row = page[page.index('<section id="evaluations"') : page.index('<section id="runs"')]
    assert "of 10,000" in row
    assert "%" not in row.partition("<tbody>")[2]


@pytest.mark.parametrize("kind", ["runtime", "training", "play", "startup"])
def test_one_bundle_is_enough(kind: str) -> None:
    found = outline(report_page([varied(kind, 0)]))
    assert found.counts["tr"] >= 2


def test_nothing_is_fetched() -> None:
    page = report_page(a_set())
    assert not re.search(r"https?://|src=|@import|url\(", page)


def test_names_are_escaped() -> None:
    page = report_page([varied("runtime", 1, task="<script>alert(1)</script>", label='"&<b>')])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    outline(page)


def test_missing_values_are_dashes_never_zeros() -> None:
    page = report_page([varied("startup", 0)])
    row = page[page.index('<tr data-run="startup-0"') : page.index("</tr>", page.index('<tr data-run="startup-0"'))]
    assert row.count("<td>–</td>") == 6  # side, library, frames/s, reward, success, memory
    assert "<td>0" not in row.replace("<td>012", "")


def test_a_crashed_run_is_listed_and_not_part_of_a_line() -> None:
    crashed = varied("runtime", 7, status="crashed", status_reason="RuntimeError: boom")
    page = report_page([varied("runtime", 1), crashed])
    assert 'class="status crashed" title="RuntimeError: boom"' in page
    assert "1 did not complete" in page
    assert re.findall(r'<g data-runs="([^"]*)"', page) == ["runtime-1"]


def test_verdicts_are_shown_with_their_reasons() -> None:
    runs = [varied("runtime", i, seed=i) for i in range(16)]
    slower = [
        run.model_copy(update={"runtime": run.runtime.model_copy(update={"total_fps": 0.5 * run.runtime.total_fps})})
        for run in runs[8:]
    ]
    page = report_page(runs, [compare(runs[:8], slower, CompareCfg(accept_drift=True))], names=("before", "after"))
    assert 'class="verdict regressed"' in page
    assert ">before</th>" in page
    assert ">after</th>" in page


def test_a_reward_near_zero_changes_by_a_difference_not_by_thousands_of_percent() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 400)
    sides = [
        varied("play", number).model_copy(
            update={
                "per_episode": PerEpisode(
                    episode_ids=list(range(400)), rewards=(mean + noise).tolist(), lengths=[5] * 400, successes=None
                )
            }
        )
        for number, mean in enumerate((0.01, 1.24))
    ]
    page = report_page(sides, [compare([sides[0]], [sides[1]])])
    assert "<td>+1.23</td>" in page
    assert "000%" not in page


def test_coordinates_stand_for_the_data() -> None:
    plot = line_plot([Series(name="a", line=[(0, 0), (10, 5), (20, 10)], runs=["r"])], x="x", y="y", label="l")
    points = [tuple(map(float, p.split(","))) for p in re.search(r'polyline points="([^"]*)"', plot)[1].split()]
    assert points[1] == pytest.approx(((points[0][0] + points[2][0]) / 2, (points[0][1] + points[2][1]) / 2))
    assert points[0][1] > points[2][1]  # up is more


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0, 0.73) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert nice_ticks(3, 3) == [3]
    assert [short(v) for v in (0, 250, 1024, 15e3, 2e6, 0.05)] == ["0", "250", "1,024", "15k", "2M", "0.05"]


def test_a_log_axis_has_equal_steps_for_equal_factors_and_says_that_it_is_one() -> None:
    series = [Series(name="a", line=[(1, 100), (2, 1000), (4, 10000)], runs=["r"])]
    plot = line_plot(series, x="x", y="rate", label="l", log_x=True, log_y=True)
    points = [tuple(map(float, p.split(","))) for p in re.search(r'polyline points="([^"]*)"', plot)[1].split()]
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1])
    assert "rate, log scale" in plot
    assert ">1,000</text>" in plot


def test_ticks_of_a_log_axis_are_1_2_5_and_hold_the_data() -> None:
    assert log_ticks(300, 7_951) == [200, 500, 1_000, 2_000, 5_000, 10_000]
    assert log_ticks(1_000, 1_000) == [1_000]
    assert log_ticks(0.03, 0.4) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5])
    assert log_ticks(9, 11) == [5, 10, 20]


@pytest.mark.parametrize(("rates", "log"), [((900, 8_000), False), ((300, 8_000), True)])
def test_throughput_is_on_a_log_axis_only_where_it_spans_decades(rates: tuple[float, float], log: bool) -> None:
    assert spans_decades(rates) == log
    bundles = [
        run.model_copy(update={"runtime": run.runtime.model_copy(update={"total_fps": rate})})
        for rate, run in zip(rates, (varied("runtime", 0), varied("runtime", 1, num_envs=64)), strict=True)
    ]
    assert ("frames per second, log scale" in report_page(bundles)) == log
    assert not spans_decades([0.0, 5.0])  # 0 has no place on a log axis


def test_an_icicle_has_seconds_below_it() -> None:
    tree = ProfileNode(name="all", own_time_s=0.2, cum_time_s=1.1, children=[])
    axis = re.findall(r'<text class="tick[^"]*" x="([\d.]+)" y="[\d.]+">([\d.]+) s</text>', icicle(tree, label="l"))
    assert [float(seconds) for _, seconds in axis] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [float(x) / 640 * 1.1 for x, _ in axis] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-3)  # x: 0.1


def test_no_bundles_are_refused() -> None:
    with pytest.raises(DataError, match="at least one bundle"):
        report_page([])


def test_the_command_reads_folders_and_compares_with_vs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, first in (("before", 0), ("after", 8)):
        for i in range(first, first + 8):
            (tmp_path / side / str(i)).mkdir(parents=True)
            (tmp_path / side / str(i) / "runtime.json").write_text(bundle_text(varied("runtime", i, seed=i)))
    output = tmp_path / "page.html"
    command = ["report", str(tmp_path / "before"), "vs", str(tmp_path / "after"), "--output", str(output)]
    assert main(command) == 0
    assert "16 runs" in capsys.readouterr().out
    assert 'class="verdict' in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "expected a bundle file or a directory of them"),
        (["vs", "x"], "expected a path on both sides of one 'vs'"),
        (["x", "--output", "page.pdf"], "expected a file that ends in .html"),
        (["x", "--allow", "everything"], "everything"),
    ],
)
def test_bad_requests_are_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_more_series_than_colors_differ_in_dashes_and_dots() -> None:
    series = [Series(name=str(i), line=[(0, i), (1, i)], dots=[(0, i, "d")], runs=[str(i)]) for i in range(20)]
    plot = line_plot(series, x="x", y="y", label="l")
    styles = re.findall(r'<polyline points="[^"]*" fill="none" (stroke="[^/]*)/>', plot)
    assert len(set(styles)) == 20
    assert {"<circle", "<rect"} <= set(re.findall(r"<(?:circle|rect)", plot))


def test_two_paths_are_compared_and_a_broken_file_is_only_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, first in (("before", 0), ("after", 8)):
        for i in range(first, first + 8):
            (tmp_path / side / str(i)).mkdir(parents=True)
            (tmp_path / side / str(i) / "runtime.json").write_text(bundle_text(varied("runtime", i, seed=i)))
    (tmp_path / "before" / "broken").mkdir()
    (tmp_path / "before" / "broken" / "runtime.json").write_text("{")
    output = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "before"), str(tmp_path / "after"), "--output", str(output)]) == 0
    page = output.read_text()
    assert 'class="verdict' in page
    assert "<td>before</td>" in page
    assert "<td>after</td>" in page
    assert "left out:" in capsys.readouterr().out
    assert "left out:" in page


def test_sides_that_cannot_be_compared_are_still_reported(tmp_path: Path) -> None:
    for side, task in (("one", "ant"), ("two", "cartpole")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "runtime.json").write_text(bundle_text(varied("runtime", len(task), task=task)))
    found = headrace.bench.report(tmp_path / "one", tmp_path / "two", output=tmp_path / "page.html")
    assert (found.runs, found.path) == (2, tmp_path / "page.html")
    assert any("not compared" in note for note in found.notes)
