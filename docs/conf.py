"""Sphinx configuration of the documentation site; `make docs` builds it into out/docs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

# Pages and notebooks run on the CPU, as two devices where they ask for them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent))

import replicax

project = "replicax"
author = "The replicax authors"
copyright = "2026, the replicax authors"
version = release = replicax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "public_api",
]
exclude_patterns = ["_build"]
nitpicky = False  # types of JAX, NumPy and Grain have no target here

# Markdown.
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
# A notebook is executed when it or the library has changed, and an error in it ends the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "out" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
# Notebooks live with the examples; copies of them become pages.
_NOTEBOOKS = Path(__file__).parent / "notebooks"
_NOTEBOOKS.mkdir(exist_ok=True)
for _copy in _NOTEBOOKS.glob("*.ipynb"):
    _copy.unlink()
for _notebook in sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb")):
    shutil.copyfile(_notebook, _NOTEBOOKS / _notebook.name)

# Docstrings: Google sections, and `names` in single backticks.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of dataclasses have entries of their own
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# Pages.
html_theme = "furo"
html_title = f"replicax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_copy_source = False
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {
        "color-brand-primary": "#8a3ffc",
        "color-brand-content": "#6929c4",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
    },
    "dark_css_variables": {
        "color-brand-primary": "#be95ff",
        "color-brand-content": "#be95ff",
    },
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Documents that live in the root of the repository have a page here that includes them.
_ROOT_PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
    "README.md": "index.md",
}


def _link_to_pages(app: Any, docname: str, source: list[str]) -> None:
    """Turns links to documents of the root into links to their pages."""
    if not any(_NOTEBOOKS.glob("*.ipynb")):  # Sphinx warns about a pattern without a match
        source[0] = source[0].replace("../notebooks/*\n", "")
    up = "../" * docname.count("/")
    for name, page in _ROOT_PAGES.items():
        pattern = rf"\]\((?:\.\./)+{re.escape(name)}(#[\w-]+)?\)"
        source[0] = re.sub(pattern, lambda m, p=page: f"]({up}{p}{m[1] or ''})", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_to_pages)
