"""Where a compiled function takes a Python branch on the value of a tensor.

Python control flow runs while a function is traced, when tensors have no values yet. Only tests
that visibly compute with TensorFlow are reported: `if tf.reduce_any(x > 0):`, or `if loss > 3:`
after `loss = tf.reduce_mean(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.porting import table
from replicax.porting.findings import Finding
from replicax.porting.names import Kind
from replicax.porting.resolution import Program

if TYPE_CHECKING:
    import libcst as cst
    from libcst import matchers
else:
    cst = lazy.module("libcst", "replicax[port]")
    matchers = lazy.module("libcst.matchers", "replicax[port]")

# The calls that hand a function to the compiler: those of `tf`, and methods of strategies.
_TRACING = ("function",)
_RUNNING = ("run", "experimental_run_v2")
# Methods of Keras layers and models that are always traced.
_KERAS_METHODS = ("call", "train_step", "test_step")
_KERAS_BASES = ("keras.Model", "keras.models.Model", "keras.layers.", "keras.Sequential")
# What is known while a function is traced.
_STATIC = ("shape", "dtype", "ndim", "rank", "name", "device", "get_shape", "numpy")


def findings(program: Program) -> list[Finding]:
    """Returns the tests on tensors in the compiled functions of a program."""
    functions: list[cst.FunctionDef] = matchers.findall(program.module, matchers.FunctionDef())  # type: ignore[assignment]
    traced_names = _names_of_traced(program)
    found: list[Finding] = []
    for function in functions:
        if _is_traced(program, function, traced_names):
            found += _in_function(program, function)
    return found


def _names_of_traced(program: Program) -> set[str]:
    """Returns the names of functions that the program passes to `tf.function` or `strategy.run`."""
    names: set[str] = set()
    for call in matchers.findall(program.module, matchers.Call()):
        assert isinstance(call, cst.Call)
        first = call.args[0].value if call.args else None
        if not isinstance(first, cst.Name):
            continue
        func = call.func
        is_run = isinstance(func, cst.Attribute) and func.attr.value in _RUNNING
        is_run = is_run and "strategy" in program.source(func).lower()
        if is_run or program.name(func) in _TRACING:
            names.add(first.value)
    return names


def _is_traced(program: Program, function: cst.FunctionDef, names: set[str]) -> bool:
    node: Any = function
    while node is not None:
        if isinstance(node, cst.FunctionDef):
            if node.name.value in names or any(
                _is_compiling(program, one.decorator) for one in node.decorators
            ):
                return True
            owner = program.parent(program.parent(node))
            if node.name.value in _KERAS_METHODS and isinstance(owner, cst.ClassDef):
                return _is_keras(program, owner)
        node = program.parent(node)
    return False


def _is_compiling(program: Program, decorator: cst.BaseExpression) -> bool:
    if isinstance(decorator, cst.Call):
        decorator = decorator.func
    return program.name(decorator) in _TRACING


def _is_keras(program: Program, owner: cst.ClassDef) -> bool:
    bases = [program.name(base.value) or "" for base in owner.bases]
    return any(base.startswith(_KERAS_BASES) for base in bases)


def _in_function(program: Program, function: cst.FunctionDef) -> list[Finding]:
    tensors: set[str] = set()
    found: list[Finding] = []
    nodes = _own_nodes(function.body)
    traced = _traced_nodes(program, nodes)
    for node in nodes:
        if isinstance(node, cst.Assign) and _is_tensor(program, node.value, tensors):
            tensors |= {
                target.target.value
                for target in node.targets
                if isinstance(target.target, cst.Name)
            }
        elif isinstance(node, cst.AugAssign) and isinstance(node.target, cst.Name):
            # Numbers that a loop changes are tensors of its compiled body.
            is_carried = traced is not None and node in traced
            if is_carried or _is_tensor(program, node.value, tensors):
                tensors.add(node.target.value)
        elif isinstance(node, cst.For) and _is_range(program, node):
            tensors |= {node.target.value} if isinstance(node.target, cst.Name) else set()
        elif (
            isinstance(node, cst.If | cst.While | cst.IfExp)
            and _is_tensor(program, node.test, tensors)
            and (traced is None or node in traced)
        ):
            found.append(_finding(program, node))
    return found


def _traced_nodes(program: Program, nodes: list[cst.CSTNode]) -> set[cst.CSTNode] | None:
    """Returns what is compiled of a function with loops over data; None if all of it is.

    Such a function runs on the host, and the bodies of its loops are compiled. A loop that is
    left early runs on the host as well.
    """
    loops = [node for node in nodes if isinstance(node, cst.For) and _takes_data(program, node)]
    if not loops:
        return None
    found: set[cst.CSTNode] = set()
    for loop in loops:
        inner = _own_nodes(loop.body)
        if not any(isinstance(node, cst.Break | cst.Continue | cst.Return) for node in inner):
            found.update(inner)
    return found


def _is_range(program: Program, loop: cst.For) -> bool:
    return isinstance(loop.iter, cst.Call) and program.name(loop.iter.func) == "range"


def _takes_data(program: Program, loop: cst.For) -> bool:
    """Tells whether a loop takes batches: from what it iterates over, or from an iterator."""
    if _is_range(program, loop):
        calls = [node for node in _own_nodes(loop.body) if isinstance(node, cst.Call)]
        return any(_is_data_call(program, call) for call in calls)
    return "data" in program.source(loop.iter).lower()


def _is_data_call(program: Program, call: cst.Call) -> bool:
    name = program.source(call.func)
    return name == "next" or name.endswith((".get_next", *(f".{one}" for one in _RUNNING)))


def _own_nodes(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns the nodes below one, in the order of the text, without inner functions."""
    nodes: list[cst.CSTNode] = []
    for child in node.children:
        if isinstance(child, cst.FunctionDef | cst.Lambda | cst.ClassDef):
            continue
        nodes.append(child)
        nodes += _own_nodes(child)
    return nodes


def _is_tensor(program: Program, node: cst.CSTNode, tensors: set[str]) -> bool:
    """Tells whether an expression visibly has the value of a tensor."""
    if isinstance(node, cst.Name):
        return node.value in tensors
    if isinstance(node, cst.Call):
        name = program.name(node.func)
        return name is not None and _computes(name)
    if isinstance(node, cst.Attribute):
        return node.attr.value not in _STATIC and _is_tensor(program, node.value, tensors)
    if isinstance(node, cst.Subscript):
        return _is_tensor(program, node.value, tensors)
    if isinstance(node, cst.UnaryOperation):
        return _is_tensor(program, node.expression, tensors)
    if isinstance(node, cst.BinaryOperation | cst.BooleanOperation):
        return _is_tensor(program, node.left, tensors) or _is_tensor(program, node.right, tensors)
    if isinstance(node, cst.Comparison):
        compared = [one.comparator for one in node.comparisons]
        by_value = not any(
            isinstance(one.operator, cst.Is | cst.IsNot | cst.In | cst.NotIn)
            for one in node.comparisons
        )
        return by_value and any(_is_tensor(program, one, tensors) for one in [node.left, *compared])
    return False


def _computes(name: str) -> bool:
    """Tells whether a function of `tf` returns a tensor."""
    return any(
        name.startswith(family) if family.endswith((".", "_")) else name == family
        for family in table.TENSOR_FAMILIES
    )


def _finding(program: Program, node: cst.If | cst.While | cst.IfExp) -> Finding:
    line, column = program.place(node)
    test = " ".join(program.source(node.test).split())
    if isinstance(node, cst.While):
        kind = "while"
        advice = f"Write `tf.while_loop(lambda *state: {test}, body, state)`"
    else:
        kind = "if"
        advice = f"Write `tf.cond({test}, lambda: ..., lambda: ...)`, or `tf.where` for one value"
    if matchers.findall(node.test, matchers.BooleanOperation() | matchers.Not()):
        advice += ", with `tf.logical_and`, `tf.logical_or` and `tf.logical_not` for Python's words"
    message = f"`{kind} {test}` needs the value of a tensor while the function is traced. {advice}"
    return Finding(line, column, Kind.REFUSED, f"{kind} on a tensor", message)
