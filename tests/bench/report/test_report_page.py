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
from headrace.bench.reporting.history import Series, change_points, histories, line_plot, nice_ticks, short, strips
from headrace.bench.reporting.page import Film, Story, report_page
from headrace.bench.schema import Bundle, PerEpisode, bundle_text
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


def test_a_page_of_all_kinds_has_every_section_the_answer_first() -> None:
    bundles = a_set()
    compared = compare([varied("runtime", i) for i in range(2)], [varied("runtime", i) for i in range(2, 4)])
    page = report_page(bundles, [compared])
    found = outline(page)
    sections = ("verdicts", "evaluations", "sides", "learning", "runs")
    assert [name for name in found.ids if name in sections] == list(sections)
    assert len(found.ids) == len(set(found.ids))
    assert page.count("<tr") - page.count('<tr><th scope="col"') >= len(bundles)
    assert found.counts["polyline"] >= 2
    assert found.counts["polygon"] == 2  # a band of three seeds for each of two libraries


def test_a_side_is_one_row_with_a_dot_per_completed_run() -> None:
    sides = [("before", range(20)), ("after", range(20, 40))]
    runs = [varied("runtime", i, label=label, seed=i) for label, numbers in sides for i in numbers]
    runs.append(varied("runtime", 99, label="after", status="crashed", status_reason="RuntimeError: boom"))
    page = report_page(runs)
    table = page[page.index('<section id="sides"') : page.index('<section id="runs"')]
    rows = re.findall(r"<tr>.*?</tr>", table.partition("<tbody>")[2])
    assert [re.search(r'<th scope="row">(\w+)', row)[1] for row in rows] == ["before", "after"]
    assert [row.count("<circle") for row in rows] == [20, 20]
    assert "21, 1 not completed" in rows[1]
    assert len(re.findall(r'class="status (completed|crashed)"', page)) == 41
    assert 'class="status crashed" title="RuntimeError: boom"' in page


def test_a_section_that_the_runs_have_nothing_for_is_left_out() -> None:
    page = report_page([varied("startup", 0)])
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["sides", "runs"]
    assert re.findall(r'<a href="#(\w+)">', page) == sections
    assert ">–</td>" in page  # no throughput


def test_strips_put_the_values_of_all_sides_on_one_scale() -> None:
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', strips([[0.0, 5.0], [10.0]], "l"))]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    assert strips([list(range(10_000))], "l").count("<circle") == 200


def _measured(commit: str, at: int, fps: float, **run: object) -> Bundle:
    bundle = varied("runtime", at, start_time_utc=f"2026-01-01T00:{at:02d}:00Z", **run)
    versions = bundle.versions.model_copy(update={"git_commit": commit})
    return bundle.model_copy(
        update={"versions": versions, "runtime": bundle.runtime.model_copy(update={"total_fps": fps})}
    )


def test_a_history_has_the_commit_at_which_a_metric_changed() -> None:
    noise = np.random.default_rng(0).normal(1, 0.01, 20)
    runs = [_measured(f"{i // 2:040x}", i, (1000 if i < 12 else 800) * noise[i]) for i in range(20)]
    (found,) = histories(runs[::-1], ["runtime.total_fps"], alpha=0.01, min_effect=0.05)
    assert [commit[-1] for commit in found.commits] == list("0123456789")
    ((at, change),) = found.changes
    assert (at, change) == (6, pytest.approx(-0.2, abs=0.03))
    page = report_page(runs, history=[found])
    outline(page)
    assert page.count('class="mark"') == 1
    assert f"-{abs(change):.1%} at {found.commits[6][:9]}" in page
    other = [_measured("f" * 40, 30, 5.0, task="ant")]
    assert not histories(other, ["*"], alpha=0.01, min_effect=0.05), "one commit has no history"


def test_noise_has_change_points_about_as_rarely_as_alpha_says() -> None:
    random = np.random.default_rng(1)
    noise = random.normal(1, 0.1, (100, 10, 2)).tolist()
    found = sum(bool(change_points(groups, alpha=0.05, min_effect=1e-9)) for groups in noise)
    assert found <= 12  # 5 are expected; more than 12 come with a chance of 0.1 %
    first, second = change_points([[1.0] * 5, [1.1] * 5, [2.0] * 5])
    assert (first, second) == ((1, pytest.approx(0.1)), (2, pytest.approx(0.9, abs=0.1)))
    assert change_points([[1.0] * 9, [1.01] * 9]) == [], "smaller than what matters"
    assert change_points([[1.0, 1.1], [2.0, 2.1]]) == [], "too few for any verdict"


def test_a_story_comes_first_with_its_film(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"\x00film")
    story = Story(sentences=["<once>"], films=[Film(film, "a & b")])
    page = report_page([varied("runtime", 0)], story=story)
    outline(page)
    assert page.index('<section id="story"') < page.index('<section id="sides"')
    for part in ("<p>&lt;once&gt;</p>", "data:video/mp4;base64,AGZpbG0=", "a &amp; b"):
        assert part in page


def test_an_unfinished_evaluation_has_no_rates() -> None:
    play = varied("play", 0)
    plan = play.plan.model_copy(update={"kind": "episodes", "episodes_planned": 10_000})
    page = report_page([play.model_copy(update={"plan": plan})])
    row = page[page.index('<section id="evaluations"') : page.index('<section id="sides"')]
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
    plot = line_plot([Series(name="a", line=[(0, 0), (10, 5), (20, 10)])], x="x", y="y", label="l")
    points = [tuple(map(float, p.split(","))) for p in re.search(r'polyline points="([^"]*)"', plot)[1].split()]
    assert points[1] == pytest.approx(((points[0][0] + points[2][0]) / 2, (points[0][1] + points[2][1]) / 2))
    assert points[0][1] > points[2][1]  # up is more


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0, 0.73) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert nice_ticks(3, 3) == [3]
    assert [short(v) for v in (0, 250, 1024, 15e3, 2e6, 0.05)] == ["0", "250", "1,024", "15k", "2M", "0.05"]


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
    series = [Series(name=str(i), line=[(0, i), (1, i)], dots=[(0, i, "d")]) for i in range(20)]
    plot = line_plot(series, x="x", y="y", label="l")
    styles = re.findall(r'<polyline points="[^"]*" fill="none" (stroke="[^/]*)/>', plot)
    assert len(set(styles)) == 20


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
