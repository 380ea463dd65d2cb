"""One self-contained page about a set of runs."""

from headrace.bench._report._page import report_page
from headrace.bench._report._story import Film, Saving, Story

__all__ = ["Film", "Saving", "Story", "report_page"]
