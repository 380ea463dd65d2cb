"""Every message on the page *Troubleshooting* is one that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


def texts() -> list[str]:
    """The strings of the package; what an f-string fills in is an ellipsis."""
    found: list[str] = []
    for path in (ROOT / "src" / "headrace").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


KNOWN = texts()


def stands(message: str) -> bool:
    """Whether a string has the words of a message in order."""
    words = ".*".join(re.escape(part.strip()) for part in message.split("…"))
    return any(re.search(words, text, re.DOTALL) for text in KNOWN)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_in_the_code(message: str) -> None:
    assert stands(message)


def test_a_message_that_the_code_does_not_have_is_found() -> None:
    assert len(MESSAGES) >= 8
    assert not stands("…() called after reset(); call step() first")
