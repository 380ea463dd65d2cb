"""One self-contained page about a set of runs."""

from headrace.bench.report._page import report_page

__all__ = ["report_page"]
