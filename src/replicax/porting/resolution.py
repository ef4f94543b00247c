"""Which name of TensorFlow an expression refers to, whatever the program calls it.

Imports and their aliases are resolved by the scopes of libcst. A name that is assigned once from
such an expression (`layers = tf.keras.layers`) is an alias too.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.porting.names import below_tf, is_known

if TYPE_CHECKING:
    import libcst as cst
    from libcst import matchers, metadata
else:
    cst = lazy.module("libcst", "replicax[port]")
    matchers = lazy.module("libcst.matchers", "replicax[port]")
    metadata = lazy.module("libcst.metadata", "replicax[port]")


@dataclass(frozen=True)
class Reference:
    """An expression that refers to a name of TensorFlow.

    Attributes:
      name: The name below `tf`; empty for `tf` itself.
      base: The identifier that the expression starts with.
      base_name: What that identifier refers to, below `tf`.
      is_star: Whether the identifier comes from `from ... import *`.
    """

    name: str
    base: str
    base_name: str
    is_star: bool = False


class Program:
    """A parsed program with its scopes and positions.

    Args:
      text: The program.

    Raises:
      libcst.ParserSyntaxError: The text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._scopes: Any = wrapper.resolve(metadata.ScopeProvider)
        self._parents: Any = wrapper.resolve(metadata.ParentNodeProvider)
        self._spans: Any = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._positions: Any = wrapper.resolve(metadata.PositionProvider)
        # The modules below `tf` from which `from ... import *` takes names, the last one first.
        self.star_modules = _star_modules(self.module)

    def place(self, node: cst.CSTNode) -> tuple[int, int]:
        """Returns the line, from 1, and the column, from 0, where a node starts."""
        start = self._positions[node].start
        return start.line, start.column

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Returns the first byte of a node, and the one after its last byte."""
        found = self._spans[node]
        return found.start, found.start + found.length

    def source(self, node: cst.CSTNode) -> str:
        """Returns the text of a node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def parent(self, node: cst.CSTNode) -> Any:
        """Returns the node around a node; None around the module."""
        return self._parents.get(node)

    def scope(self, node: cst.CSTNode) -> Any:
        """Returns the scope in which a name is used; None where libcst has none."""
        return self._scopes.get(node)

    def reference(self, node: cst.CSTNode) -> Reference | None:
        """Returns the name of TensorFlow that an expression refers to, if any."""
        return self._reference(node, 0)

    def name(self, node: cst.CSTNode) -> str | None:
        """Returns the name below `tf` that an expression refers to, if any."""
        found = self.reference(node)
        return None if found is None else found.name

    def qualified(self, node: cst.CSTNode) -> str | None:
        """Returns the qualified name of an imported thing, of any package."""
        chain = dotted(node)
        scope = self.scope(_base(node)) if chain else None
        if chain is None or scope is None:
            return None
        found = [
            one.name
            for one in scope.get_qualified_names_for(chain)
            if one.source is metadata.QualifiedNameSource.IMPORT
        ]
        # A program may import one name in two ways, depending on the version.
        return min(found, key=lambda name: (len(name), name)) if found else None

    def _reference(self, node: cst.CSTNode, depth: int) -> Reference | None:
        chain = dotted(node)
        if chain is None or depth > 8:
            return None
        base = _base(node)
        qualified = self.qualified(node)
        if qualified is not None:
            name = below_tf(qualified)
            if name is None:
                return None
            return Reference(name, base.value, self._base_name(base, chain, name))
        tail = chain[len(base.value) :].lstrip(".")
        star = self._star_name(base)
        if star is not None:
            return Reference(".".join(filter(None, [star, tail])), base.value, star, is_star=True)
        value = self._assigned_value(base)
        target = None if value is None else self._reference(value, depth + 1)
        if target is None:
            return None
        name = ".".join(filter(None, [target.name, tail]))
        return Reference(name, base.value, target.name)

    def _base_name(self, base: cst.Name, chain: str, name: str) -> str:
        qualified = self.qualified(base)
        found = None if qualified is None else below_tf(qualified)
        if found is not None:
            return found
        # `import tensorflow.keras` makes the name `tensorflow`.
        depth = chain.count(".")
        return ".".join(name.split(".")[: max(0, len(name.split(".")) - depth)]) if name else ""

    def _star_name(self, base: cst.Name) -> str | None:
        """Returns the name below `tf` of an identifier that only a star import can define."""
        scope = self.scope(base)
        if not self.star_modules or scope is None or list(scope[base.value]):
            return None
        names = (".".join(filter(None, [module, base.value])) for module in self.star_modules)
        return next(filter(is_known, names), None)

    def _assigned_value(self, base: cst.Name) -> cst.BaseExpression | None:
        """Returns what a name is, if it is assigned once, by a plain assignment."""
        scope = self.scope(base)
        if scope is None:
            return None
        assignments = list(scope[base.value])
        if len(assignments) != 1:
            return None
        target = getattr(assignments[0], "node", None)
        parent = self.parent(target) if isinstance(target, cst.Name) else None
        if not isinstance(parent, cst.AssignTarget):
            return None
        statement = self.parent(parent)
        is_plain = isinstance(statement, cst.Assign) and dotted(statement.value) is not None
        return statement.value if is_plain else None


def _star_modules(module: cst.Module) -> list[str]:
    found: list[str] = []
    pattern = matchers.ImportFrom(names=matchers.ImportStar(), relative=[])
    for node in matchers.findall(module, pattern):
        assert isinstance(node, cst.ImportFrom)
        path = dotted(node.module) if node.module is not None else None
        name = below_tf(path) if path else None
        if name is not None:
            found.insert(0, name)
    return found


def syntax_error(text: str) -> str:
    """Returns why a text is not Python; empty if it is.

    Python's own parser has limits for nested expressions, beyond which that of libcst fails.

    >>> syntax_error("x = 1"), syntax_error("print 1").partition(":")[0]
    ('', 'not valid Python 3 (line 1)')
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except SyntaxError as error:
        return f"not valid Python 3 (line {error.lineno}): {error.msg}"
    except (ValueError, RecursionError, MemoryError):
        return "not readable: expressions are nested too deeply"
    return ""


def dotted(node: cst.CSTNode) -> str | None:
    """Returns the text of a chain of names, "a.b.c"; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def _base(node: cst.CSTNode) -> cst.Name:
    while isinstance(node, cst.Attribute):
        node = node.value
    assert isinstance(node, cst.Name)
    return node
