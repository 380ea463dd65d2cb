"""What commands print while they work."""

from __future__ import annotations

from headrace import _progress as printing


def test_progress_is_a_line_now_and_then_where_no_terminal_draws_a_bar(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(printing.time, "monotonic", lambda: now)
    with printing.progress("recording", None) as show:
        show(completed=1)
        now = 11.0
        show(completed=20, total=2_000)
        show(completed=30)
        now = 22.0
        show(description="training", completed=40)
    assert capsys.readouterr().err.splitlines() == ["recording: 20 of 2,000", "training: 40 of 2,000"]


def test_a_bar_that_knows_no_total_shows_what_is_done(monkeypatch, capsys):
    monkeypatch.setattr(printing, "_LINE_S", 0.0)
    with printing.progress("exporting", None) as show:
        show(completed=7)
    assert capsys.readouterr().err == "exporting: 7\n"
