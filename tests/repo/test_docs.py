"""No link is broken, and every runbook has the same sections."""

import re
from pathlib import Path

import pytest

from qat_lora.errors import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("caches/*.md"), *ROOT.glob("runs/*.md")])
RUNBOOKS = ("qat-recovery", "musclebob", "reservoir", "athena", "cot-sft")
PARTS = (
    "Question", "What you need", "One command", "What you should see", "Variations", "Troubleshooting", "How it works",
    "Figures",
)  # fmt: skip


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))


def test_no_link_is_broken():
    assert {"docs/TPU.md", "docs/overview.png"} <= set(links(ROOT / "README.md"))
    for page in PAGES:
        for link in links(page):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not link.startswith(("http://", "https://")):
                assert target.exists(), f"{page}: {link}: no such file"
                assert not anchor or anchor in anchors(target), f"{page}: {link}: no such heading"


def test_the_index_lists_every_page():
    listed = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_has_all_sections_in_order_and_a_link_in_the_readme(name):
    page = ROOT / "docs" / f"{name}.md"
    assert re.findall(r"^## (.+)$", prose(page), re.MULTILINE) == list(PARTS)
    seen = re.search(r"^## What you should see$(.*?)^## ", page.read_text(), re.MULTILINE | re.DOTALL)[1]
    output = re.search(r"^```text\n(.*?)^```", seen, re.MULTILINE | re.DOTALL)
    assert output and len(output[1].splitlines()) >= 5, "what you should see has no real output"
    assert f"docs/{name}.md" in links(ROOT / "README.md")
