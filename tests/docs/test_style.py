"""The words of the style guide: phrases that users stumbled over are in no page, help text or message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "src").rglob("*.py")),
]
PHRASES = {
    r"bytes a (transition|frame|row)": "bytes per …",
    r"\b(folder|file|directory) a (library|task|episode)": "one … per …",
    r"as if the pause had not been": "as if it had never been paused",
    r"expected reset\(\) first": "step() called before reset(); call reset() first",
    r"expected an open one": "the environment is closed; create a new one",
    r"do not fit the sizes beside": "weights do not match the saved network sizes",
    r"code of whoever": "can execute arbitrary code; load only files you trust",
    r"end after so many": "stop after N steps (default: run until Ctrl-C)",
    r"[Mm]easure[ds]? (it )?beside|beside its peers": "compared with",
    r"\b(actions|ms) a (call|step)\b": "per call, per step",
    r"rows for nobody": "wasted rows",
    r"\b(?i:behaviour|colours?|neighbour|normalis|honour|licence|metres?\b|modelled on)": "American spelling",
    r"\b(?i:maths|fulfil)\b": "American spelling: math, fulfill",
}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_that_users_stumbled_over_is_not_used(phrase: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: write {PHRASES[phrase]!r}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert found == []
