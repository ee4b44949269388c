"""Every relative link leads somewhere, to the heading if it names one, and every page is linked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    return (target for target in _LINK.findall(prose(path)) if "://" not in target)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        base = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = 0
        while (name := base if number == 0 else f"{base}-{number}") in found:
            number += 1
        found.add(name)
    return found


def problem(path: Path, target: str) -> str | None:
    """Why a link of a page leads nowhere; None when it leads somewhere."""
    name, _, anchor = target.partition("#")
    aim = (path.parent / name).resolve() if name else path
    if not aim.exists() or ROOT not in (aim, *aim.parents):
        return f"{target}: no such file"
    if anchor and (aim.suffix != ".md" or anchor not in anchors(aim)):
        return f"{target}: no such heading"
    return None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert [found for target in links(path) if (found := problem(path, target))] == []


def test_every_page_is_linked_from_another() -> None:
    linked = {(path.parent / target.partition("#")[0]).resolve() for path in PAGES for target in links(path)}
    folders = {target for target in linked if target.is_dir()}
    assert [path for path in PAGES[1:] if path not in linked and path.parent not in folders] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    assert problem(readme, "docs/nowhere.md") == "docs/nowhere.md: no such file"
    assert problem(readme, "docs/changelog.md#nowhere") == "docs/changelog.md#nowhere: no such heading"
    assert problem(readme, "#read-on") is None
    copy = tmp_path / "page.md"
    copy.write_text("# A `b.c` (D): e_f\n\n# A\n\n# A\n\n```sh\n# no heading\n[x](y)\n```\n", encoding="utf-8")
    assert anchors(copy) == {"a-bc-d-e_f", "a", "a-1"}
    assert list(links(copy)) == []
