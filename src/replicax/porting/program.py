"""What becomes of one Python program: findings, and the ported text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.porting import control_flow, tapes
from replicax.porting.calls import CallPorter
from replicax.porting.findings import Finding, PortedSource, apply_edits, sorted_findings
from replicax.porting.imports import ImportPorter
from replicax.porting.names import below_tf
from replicax.porting.references import ReferencePorter
from replicax.porting.resolution import Program, dotted, syntax_error

if TYPE_CHECKING:
    import libcst as cst
    from libcst import matchers
else:
    cst = lazy.module("libcst", "replicax[port]")
    matchers = lazy.module("libcst.matchers", "replicax[port]")

# What a program must contain to be of interest; without it, it is not parsed.
_MARKS = ("tensorflow", "replicax.tf", "tf_keras", "KERAS_BACKEND")


def port_text(text: str, *, tape: bool = False) -> PortedSource:
    r"""Ports a Python program.

    Args:
      text: The program.
      tape: Whether tapes become `rx.value_and_grad`.

    >>> port_text("import tensorflow as T  # comment\n").text
    'import replicax.tf as T  # comment\n'
    """
    if not any(mark in text for mark in _MARKS):
        return PortedSource(text)
    problem = syntax_error(text)
    if problem:
        return PortedSource(text, problem=problem)
    try:
        return _ported(text, tape)
    except (cst.ParserSyntaxError, RecursionError) as error:
        return PortedSource(text, problem=f"not readable: {type(error).__name__}")


def _ported(text: str, tape: bool) -> PortedSource:
    program = Program(text)
    if program.module.code != text:
        return PortedSource(text, problem="the text cannot be reproduced exactly")
    found = _findings(program)
    ported = apply_edits(text, [edit for one in found for edit in one.edits])
    if tape:
        more = tapes.findings(Program(ported))
        ported = apply_edits(ported, [edit for one in more for edit in one.edits])
        found += more
    return PortedSource(ported, sorted_findings(found))


def _findings(program: Program) -> list[Finding]:
    walk = _Walk(program)
    walk.visit(program.module)
    found = walk.findings()
    return found + control_flow.findings(program) if found else []


class _Walk:
    """Passes each node of a program to the porter of its kind."""

    def __init__(self, program: Program) -> None:
        self._program = program
        own, self._overridden = _methods(program)
        self._imports = ImportPorter(program)
        self._references = ReferencePorter(program, _tf_alias(program))
        self._calls = CallPorter(program, own)
        self._handlers: dict[type[cst.CSTNode], Callable[[Any], bool]] = {
            cst.Import: self._port_import,
            cst.ImportFrom: self._port_from,
            cst.Attribute: self._port_attribute,
            cst.Name: self._port_name,
            cst.Call: self._port_call,
            cst.Assign: self._port_assign,
            cst.FunctionDef: self._port_function,
        }

    def findings(self) -> list[Finding]:
        """Returns what the porters have found."""
        self._calls.port_paths()
        uses = self._imports.findings + self._references.findings
        # Methods of other objects are looked at in programs that use TensorFlow only.
        calls = [one for one in self._calls.findings if uses or one.name == "KERAS_BACKEND"]
        return uses + calls

    def visit(self, node: cst.CSTNode) -> None:
        """Visits a node, and those below it in the order of the text."""
        handler = self._handlers.get(type(node))
        if handler is None or handler(node):
            for child in node.children:
                self.visit(child)

    def _port_import(self, node: cst.Import) -> bool:
        self._imports.port_import(node)
        return False

    def _port_from(self, node: cst.ImportFrom) -> bool:
        self._imports.port_from(node)
        return False

    def _port_attribute(self, node: cst.Attribute) -> bool:
        self._references.port(node)
        self._imports.port_outside(node)
        self._calls.port_attribute(node)
        if dotted(node) is None:
            return True
        # A chain of names is one reference.
        inner = node.value
        while isinstance(inner, cst.Attribute):
            self._calls.port_attribute(inner)
            inner = inner.value
        return False

    def _port_name(self, node: cst.Name) -> bool:
        if not _is_attribute_name(self._program, node):
            self._references.port(node)
            self._imports.port_outside(node)
        return False

    def _port_call(self, node: cst.Call) -> bool:
        self._calls.port_call(node)
        self._imports.port_call(node)
        return True

    def _port_assign(self, node: cst.Assign) -> bool:
        self._calls.port_environment(node)
        return True

    def _port_function(self, node: cst.FunctionDef) -> bool:
        if node in self._overridden:
            self._calls.port_method_definition(node)
        return True


def _is_attribute_name(program: Program, node: cst.Name) -> bool:
    """Tells whether a name is no expression: an attribute, a keyword, a parameter, a target."""
    parent = program.parent(node)
    if isinstance(parent, cst.Attribute):
        return node is parent.attr
    if isinstance(parent, cst.Arg):
        return node is parent.keyword
    return isinstance(parent, cst.Param | cst.FunctionDef | cst.ClassDef | cst.AssignTarget)


def _tf_alias(program: Program) -> str | None:
    """Returns what the program calls `tf` everywhere."""
    for statement in program.module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for small in statement.body:
            if not isinstance(small, cst.Import):
                continue
            for alias in small.names:
                path = dotted(alias.name) or ""
                if below_tf(path) != "":
                    continue
                target = alias.asname.name if alias.asname is not None else alias.name
                return target.value if isinstance(target, cst.Name) else None
    return None


def _methods(program: Program) -> tuple[set[str], set[cst.FunctionDef]]:
    """Returns the methods that the program defines itself, and those of Keras metrics."""
    own: set[str] = set()
    overridden: set[cst.FunctionDef] = set()
    for owner in matchers.findall(program.module, matchers.ClassDef()):
        assert isinstance(owner, cst.ClassDef)
        names = [program.name(base.value) or "" for base in owner.bases]
        is_metric = any(name.startswith(("keras.metrics.", "metrics.")) for name in names)
        for member in owner.body.body:
            if isinstance(member, cst.FunctionDef):
                if is_metric:
                    overridden.add(member)
                else:
                    own.add(member.name.value)
    return own, overridden
