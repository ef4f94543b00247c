"""What notebooks show."""

from __future__ import annotations

from replicax.foundation.notebook import html_table


def test_html_tables_escape_what_users_wrote() -> None:
    table = html_table("<b>", [("<script>", "a & b", 3)], header=("name", "<value>", "count"))
    assert table == (
        "<table><caption>&lt;b&gt;</caption>"
        "<tr><th>name</th><th>&lt;value&gt;</th><th>count</th></tr>"
        "<tr><th>&lt;script&gt;</th><td>a &amp; b</td><td>3</td></tr></table>"
    )
