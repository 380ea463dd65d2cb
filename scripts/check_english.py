"""Count words for people in source and docs, where rows and environments are meant: ``check_english.py``.

Exits with 1 above the limit. docs/schema and tutorials in code are not counted; ruff's D401 checks the docstrings.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LIMIT = 60
WORDS = re.compile(r"\b(everyone|everybody|nobody|whoever|somebody|anybody|told)\b", re.IGNORECASE)


def count(root: Path) -> Counter[str]:
    """Return how often each file of ``src``, ``docs`` and the README has such a word."""
    files = [*(root / "src").rglob("*.py"), *(root / "docs").rglob("*.md"), root / "README.md"]
    return Counter({str(file.relative_to(root)): len(WORDS.findall(file.read_text())) for file in files})


if __name__ == "__main__":
    found = count(Path(__file__).resolve().parent.parent)
    print(f"words for people in src and docs: {found.total()} (at most {LIMIT})")
    if found.total() > LIMIT:
        sys.exit("\n".join(f"{number:4} {file}" for file, number in found.most_common(12)))
