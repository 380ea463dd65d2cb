"""One self-contained page about a set of runs."""
