"""Which names of TensorFlow a program uses, and how those that moved are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.porting import table
from replicax.porting.findings import Edit, Finding
from replicax.porting.names import Judgement, Kind, is_offered, judge, known_part, moved_name
from replicax.porting.resolution import Program, Reference, dotted

if TYPE_CHECKING:
    import libcst as cst
else:
    cst = lazy.module("libcst", "replicax[port]")

_V1 = "compat.v1"


class ReferencePorter:
    """Judges the names of TensorFlow that a program refers to.

    Args:
      program: The program.
      tf_alias: What the program calls `tf`; None if it imports parts of it only.
    """

    def __init__(self, program: Program, tf_alias: str | None) -> None:
        self._program = program
        self._tf_alias = tf_alias
        self.findings: list[Finding] = []
        # The names that the program uses, below `tf`.
        self.used: set[str] = set()

    def port(self, node: cst.Attribute | cst.Name) -> None:
        """Judges one expression, and renames it if it moved."""
        found = self._program.reference(node)
        if found is None or not found.name:
            return
        is_alias = isinstance(node, cst.Name) and self._program.qualified(node) is None
        if is_alias and not found.is_star:
            return
        line, column = self._program.place(node)
        self.used.add(found.name)
        constant = table.CONSTANTS.get(found.name)
        if constant is not None:
            self._change(node, found, constant)
            return
        judged = judge(found.name)
        name = _shown(known_part(found.name))
        if judged.kind is not Kind.CHANGES:
            finding = Finding(line, column, judged.kind, name, judged.advice)
            self.findings.append(finding)
            return
        text = self._new_text(found, judged)
        if text is None:
            advice = f"Write `{_shown(judged.name)}`"
            self.findings.append(Finding(line, column, Kind.REFUSED, name, advice))
        elif text == dotted(node):
            # Its import is what changes.
            self.findings.append(Finding(line, column, Kind.RUNS, _shown(judged.name)))
        else:
            self._change(node, found, text)

    def _new_text(self, found: Reference, judged: Judgement) -> str | None:
        """Returns how the program can write a new name; None if it has no alias for it."""
        if found.is_star:
            return judged.name if "" in self._program.star_modules else self._with_alias(judged)
        base = judge(found.base_name).name if found.base_name else ""
        if base == judged.name:
            return found.base
        if not base:
            return f"{found.base}.{judged.name}"
        for prefix in (base, moved_name(found.base_name)):
            if judged.name.startswith(prefix + "."):
                return found.base + judged.name[len(prefix) :]
        if base == _V1 and is_offered(f"{_V1}.{judged.name}"):
            # `import tensorflow.compat.v1 as tf`: the new name is there as well.
            return f"{found.base}.{judged.name}"
        return self._with_alias(judged)

    def _with_alias(self, judged: Judgement) -> str | None:
        return None if self._tf_alias is None else f"{self._tf_alias}.{judged.name}"

    def _change(self, node: cst.CSTNode, found: Reference, text: str) -> None:
        line, column = self._program.place(node)
        message = f"`{self._program.source(node)}` becomes `{text}`"
        edit = Edit(*self._program.span(node), text)
        name = _shown(found.name)
        self.findings.append(Finding(line, column, Kind.CHANGES, name, message, (edit,)))


def _shown(name: str) -> str:
    return f"tf.{name}"
