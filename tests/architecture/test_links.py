"""Links and anchors of README, docs and notebooks lead somewhere; without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_TARGET = re.compile(r"^\(([\w-]+)\)=$|<a (?:id|name)=\"([\w-]+)\"", re.MULTILINE)


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST give to the headings of a page."""
    text = re.sub(r"^ *(`{3,}).*?^ *\1[^\S\n]*$", "", page.read_text(), flags=re.M | re.S)
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = 0
        while (name := slug if count == 0 else f"{slug}-{count}") in found:
            count += 1
        found.add(name)
    return found | {a or b for a, b in _TARGET.findall(text)}


def links(page: Path) -> list[str]:
    text = re.sub(r"^ *(`{3,}).*?^ *\1[^\S\n]*$", "", page.read_text(), flags=re.M | re.S)
    return _LINK.findall(re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", text))


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            found.append(f"{link}: there is no such file")
        elif target.is_dir():
            found.append(f"{link}: a directory has no page; link to its index.md")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: the page has no such heading")
    return [f"{page.relative_to(ROOT)}: {text}" for text in found]


def test_links_and_anchors_of_all_pages_lead_somewhere() -> None:
    assert len(pages()) > 80
    assert sum(len(links(page)) for page in pages()) > 150
    assert [text for page in pages() for text in broken(page)] == []


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "faults.md"
    assert "exactly-once" in anchors(page)
    assert "no-such-heading" not in anchors(page)
    sample = tmp_path / "page.md"
    sample.write_text(
        "[a](missing.md) and `[b](code.md)`\n```\n[c](fence.md)\n```\n[d](#nothing)\n"
    )
    assert links(sample) == ["missing.md", "#nothing"]


def test_pictures_have_a_text_for_readers_who_do_not_see_them() -> None:
    texts = {page: re.findall(r"!\[([^\]]*)\]\(", page.read_text()) for page in pages()}
    assert not [page for page, found in texts.items() if "" in found]


def test_the_page_for_tf_distribute_users_has_each_of_its_names() -> None:
    page = (ROOT / "docs" / "guides" / "from-tf-distribute.md").read_text()
    table = page.partition("## Each name of tf.distribute")[2].partition("\n## ")[0]
    known = json.loads((ROOT / "tests" / "support" / "semantics_names.json").read_text())
    kinds = ("class", "function", "enum")
    names = {name for name, kind, _ in known["appendix"] if kind in kinds}
    names = {n for n in names if n.startswith("tf.distribute.")}
    assert len(names) > 50
    missing = [n for n in names if f"{n.rpartition('.')[2]}`" not in table]
    assert missing == []
