"""What a package index shows: links that work there, one address, versions that agree."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import replicax as rx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]


@cache
def built_readme() -> str:
    return ProjectMetadata(str(ROOT), PluginManager()).core.readme


def test_every_link_of_the_built_readme_is_absolute_and_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", built_readme())
    targets += re.findall(r'(?:src|href)="([^"]+)"', built_readme())
    assert len(targets) > 20
    own = [target for target in targets if target.startswith(HOME)]
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []
    missing = [
        target
        for target in own
        if not (ROOT / re.sub(r"/(?:blob|raw)/main/", "", target[len(HOME) :]).partition("#")[0])
        .resolve()
        .exists()
    ]
    assert own and not missing


def test_pictures_of_the_built_readme_are_files_and_not_pages() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", built_readme())
    assert pictures
    assert all("/raw/main/" in picture for picture in pictures if picture.startswith(HOME))


def test_one_address_is_used_everywhere() -> None:
    assert {url.split("/blob/")[0] for url in PROJECT["urls"].values()} == {HOME}
    assert f"repository-code: {HOME}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {rx.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_range_of_jax_is_one_minor_version_and_explained() -> None:
    (requirement,) = (r for r in PROJECT["dependencies"] if r.startswith("jax"))
    low, high = re.fullmatch(r"jax>=0\.(\d+),<0\.(\d+)", requirement).groups()  # type: ignore[union-attr]
    assert int(high) == int(low) + 1
    reasons = (ROOT / "docs" / "design" / "0005-dependencies.md").read_text()
    assert f"`jax>=0.{low},<0.{high}`" in reasons
