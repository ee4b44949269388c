"""Markdown pieces."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def code(text: str) -> str:
    """A code span."""
    return f"`{text}`" if text else ""


def cell(text: str) -> str:
    """Text that may stand in a table: on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns that are empty in every row are left out."""
    cells = [[cell(text) for text in row] for row in rows]
    kept = [index for index in range(len(titles)) if any(row[index] for row in cells)]
    lines = [[titles[index] for index in kept], ["---"] * len(kept), *([row[index] for index in kept] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str, language: str = "python") -> str:
    """A code block."""
    return f"```{language}\n{text.strip()}\n```"


def bullet(head: str, text: str) -> str:
    """A list item: a head, then paragraphs."""
    paragraphs = [head, *text.split("\n\n")] if text else [head]
    return "\n\n".join(
        textwrap.indent(paragraph, "" if number == 0 else "  ") for number, paragraph in enumerate(paragraphs)
    )


def joined(blocks: Iterable[str]) -> str:
    """Blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(block for block in blocks if block)


def word_list(words: Iterable[str]) -> str:
    """Code spans, comma-separated, wrapped."""
    text = ", ".join(code(word) for word in words)
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
