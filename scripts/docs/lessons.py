"""A hook of mkdocs: each lesson, a plain Python file in docs/tutorials, becomes a page of prose and code.

The module's docstring is the introduction. A paragraph of comments at the left margin, with an empty line after it, is
prose; everything else is code. So a lesson reads well in an editor, in a browser, and runs. Guides link to the Python
file, which is what a reader of the repository has; on the site the link leads to the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put a generated page beside each lesson."""
    for lesson in sorted(Path(config.docs_dir, "tutorials").glob("*.py")):
        page = f"tutorials/{lesson.stem}.md"
        files.append(File.generated(config, page, content=lesson_page(lesson.read_text(), lesson.name)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to lessons lead to their pages."""
    return re.sub(r"\(((?:\.\./)?tutorials/\w+)\.py\)", r"(\1.md)", markdown)


def lesson_page(source: str, name: str) -> str:
    """The Markdown of a lesson's source."""
    tree = ast.parse(source)
    introduction = ast.get_docstring(tree)
    if introduction is None:
        raise ValueError(f"{name}: expected a docstring that introduces the lesson")
    title, _, rest = introduction.partition("\n")
    body = source.splitlines()[tree.body[0].end_lineno :]
    parts = [f"# {title.removeprefix('Lesson: ').rstrip('.').capitalize()}", rest.strip()]
    code: list[str] = []
    for paragraph in _paragraphs(body):
        if all(line.startswith("#") for line in paragraph):
            _close(code, parts)
            parts.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in paragraph))
        else:
            code += [*paragraph, ""]
    _close(code, parts)
    return "\n\n".join(parts) + "\n"


def _paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def _close(code: list[str], parts: list[str]) -> None:
    if code:
        parts.append("```py\n" + "\n".join(code).strip("\n") + "\n```")
        code.clear()
