"""Keep the reference pages true: `python docs/reference/generate.py`, or `--check` to change nothing.

A page is Markdown written by hand with regions between `<!-- generated: NAME -->` and `<!-- end -->`. The text of a
region comes from the code: signatures, docstrings, inline comments, parsers. `--check` exits with 1 and names the
pages whose regions differ from what the code says.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reference_sections import SECTIONS, Section
from tokenyard.catalogue import DISABLED_VARIABLE

FOLDER = Path(__file__).resolve().parent

_REGION = re.compile(r"(<!-- generated: (?P<name>[\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- generated: ([\w.]+) -->")


def render(text: str, sections: Mapping[str, Section]) -> str:
    """A page's text with every region filled anew. Raises KeyError for a region that no section fills."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{sections[match['name']]().strip()}\n\n{match[3]}"

    return _REGION.sub(fill, text)


def read_pages(folder: Path) -> dict[Path, str]:
    """The text of each page."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}


def stale_pages(pages: Mapping[Path, str], sections: Mapping[str, Section]) -> dict[Path, str]:
    """The pages that are out of date, with the text that they should have."""
    rendered = {path: render(text, sections) for path, text in pages.items()}
    return {path: text for path, text in rendered.items() if text != pages[path]}


def problems(pages: Mapping[Path, str], sections: Mapping[str, Section]) -> Iterator[str]:
    """Regions that are not closed or that nothing fills, and sections that stand on no page or on several."""
    marks = [name for text in pages.values() for name in _MARK.findall(text)]
    regions = [match["name"] for text in pages.values() for match in _REGION.finditer(text)]
    yield from (f"region '{name}' has no end" for name in marks if name not in regions)
    yield from (f"region '{name}' is filled by no section" for name in regions if name not in sections)
    yield from (f"section '{name}' stands on {marks.count(name)} pages" for name in sections if marks.count(name) != 1)


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """Write the pages, or with `--check` only compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the reference pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is out of date")
    is_check: bool = parser.parse_args(arguments).check
    pages = read_pages(folder)
    if found := list(problems(pages, SECTIONS)):
        print("\n".join(found), file=sys.stderr)
        return 2
    stale = stale_pages(pages, SECTIONS)
    for path, text in stale.items():
        if is_check:
            print(f"out of date: {path.name}; run python docs/reference/generate.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.name}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    os.environ.pop(DISABLED_VARIABLE, None)  # the pages tell of all built-in plugins, whatever is blocked here
    sys.exit(main())
