"""HTML that notebooks show instead of a `repr`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """Returns a small HTML table, for the `_repr_html_` of an object.

    All text is escaped: names and values come from users.

    Args:
      title: The caption, such as the class of the object.
      rows: The cells of each row; the first cell of a row is its name.
      header: The names of the columns, if they need any.

    >>> html_table("Strategy", [("devices", "<2>")])
    '<table><caption>Strategy</caption><tr><th>devices</th><td>&lt;2&gt;</td></tr></table>'
    """
    lines = ["".join(_cell(name, "th") for name in header)] if header else []
    lines += [_cell(row[0], "th") + "".join(_cell(c, "td") for c in row[1:]) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{html.escape(title)}</caption>{body}</table>"


def _cell(content: object, tag: str) -> str:
    return f"<{tag}>{html.escape(str(content))}</{tag}>"
