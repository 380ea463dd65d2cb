"""One self-contained page about a set of runs."""

from headrace.bench._report._page import Film, Saving, Story, report_page

__all__ = ["Film", "Saving", "Story", "report_page"]
