"""A Sphinx extension for the reference: expands blocks of names, and links names in docstrings."""

from __future__ import annotations

import re
from typing import Any

import reference_names
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.nodes import make_refnode


def _expand_source(app: Any, docname: str, source: list[str]) -> None:
    if docname.startswith("reference/"):
        source[0] = reference_names.expand(source[0])


def _resolve(app: Any, env: Any, node: pending_xref, contnode: nodes.Node) -> nodes.Node | None:
    """Finds `rx.X` and names without their namespace; everything else stays plain code."""
    if node.get("refdomain") != "py":
        return None
    target = re.sub(r"\(.*\)$", "", node["reftarget"])
    objects = env.get_domain("py").objects
    for name in (re.sub(r"^rx\.", "replicax.", target), f"replicax.{target}"):
        if name in objects and name != node["reftarget"]:
            entry = objects[name]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)
    return None


def _forget_guesses(app: Any, doctree: nodes.document) -> None:
    """Lets a name refer to what it says in full, and not to any method of that name."""
    for node in doctree.findall(pending_xref):
        node.attributes.pop("refspecific", None)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _expand_source)
    app.connect("doctree-read", _forget_guesses)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
