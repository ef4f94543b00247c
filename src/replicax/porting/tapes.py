"""`with tf.GradientTape() as tape:` as a function for `rx.value_and_grad`.

`replicax.tf` has the tape itself; this rewrite is for those who ask for it. Only the straight
case is rewritten: one tape, whose gradients are taken once, right after its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.porting.findings import Edit, Finding
from replicax.porting.names import Kind
from replicax.porting.resolution import Program

if TYPE_CHECKING:
    import libcst as cst
    from libcst import matchers
else:
    cst = lazy.module("libcst", "replicax[port]")
    matchers = lazy.module("libcst.matchers", "replicax[port]")

_TAPE = "GradientTape"
_LEAVING = ("Return", "Yield", "Break", "Continue", "Nonlocal", "Global", "Await")


@dataclass(frozen=True)
class _Straight:
    """A tape whose block can become a function."""

    block: cst.With
    statement: cst.SimpleStatementLine
    loss: str
    variables: cst.BaseExpression
    gradients: str


def findings(program: Program) -> list[Finding]:
    """Returns an edit for each tape that can be rewritten, and a reason for each that cannot."""
    found: list[Finding] = []
    for block in matchers.findall(program.module, matchers.With()):
        assert isinstance(block, cst.With)
        if not any(_is_tape(program, item) for item in block.items):
            continue
        straight = _straight(program, block)
        line, column = program.place(block)
        if isinstance(straight, str):
            message = f"the tape stays: {straight}"
            found.append(Finding(line, column, Kind.RUNS, f"tf.{_TAPE}", message))
        else:
            edits = _edits(program, straight)
            message = "the block becomes a function for `rx.value_and_grad`"
            found.append(Finding(line, column, Kind.CHANGES, f"tf.{_TAPE}", message, edits))
    if any(one.edits for one in found):
        found += _import_of_replicax(program)
    return found


def _is_tape(program: Program, item: cst.WithItem) -> bool:
    call = item.item
    return isinstance(call, cst.Call) and program.name(call.func) == _TAPE


def _straight(program: Program, block: cst.With) -> _Straight | str:
    """Returns the parts of a tape; or why it cannot be rewritten."""
    item = block.items[0]
    name = item.asname.name if item.asname is not None else None
    if len(block.items) != 1 or not isinstance(name, cst.Name):
        return "several contexts share the block"
    if isinstance(item.item, cst.Call) and item.item.args:
        return "it has arguments"
    siblings: Sequence[Any] = program.parent(block).body
    following = siblings[siblings.index(block) + 1] if block is not siblings[-1] else None
    call = _gradient_call(following, name.value)
    if call is None:
        return f"`{name.value}.gradient` is not the next statement"
    assert isinstance(following, cst.SimpleStatementLine)
    uses = [
        node
        for node in matchers.findall(_function_around(program, block), matchers.Name(name.value))
    ]
    if len(uses) != 2:
        return f"`{name.value}` is used more than once"
    if any(matchers.findall(block.body, getattr(matchers, kind)()) for kind in _LEAVING):
        return "its block leaves the function or a loop"
    carried = _carried_in(program, block)
    if carried is not None:
        return f"its block changes `{carried}`, which has a value before"
    loss, variables = call.args[0].value, call.args[1].value
    if not isinstance(loss, cst.Name):
        return "what is differentiated has no name"
    if loss.value not in _assigned(block):
        return f"`{loss.value}` is not computed in its block"
    assignment = following.body[0]
    assert isinstance(assignment, cst.Assign)
    gradients = program.source(assignment.targets[0].target)
    return _Straight(block, following, loss.value, variables, gradients)


def _gradient_call(statement: Any, tape: str) -> cst.Call | None:
    """Returns the call in `gradients = tape.gradient(loss, variables)`."""
    pattern = matchers.SimpleStatementLine(
        body=[
            matchers.Assign(
                targets=[matchers.AssignTarget()],
                value=matchers.Call(
                    func=matchers.Attribute(
                        value=matchers.Name(tape), attr=matchers.Name("gradient")
                    ),
                    args=[matchers.Arg(keyword=None), matchers.Arg(keyword=None)],
                ),
            )
        ]
    )
    if statement is None or not matchers.matches(statement, pattern):
        return None
    return statement.body[0].value


def _function_around(program: Program, node: cst.CSTNode) -> cst.CSTNode:
    while not isinstance(node, cst.FunctionDef | cst.Module):
        node = program.parent(node)
    return node


def _assigned(block: cst.With) -> list[str]:
    """Returns the names that a block assigns, in their order."""
    names: dict[str, None] = {}
    targets = matchers.AssignTarget() | matchers.AugAssign() | matchers.AnnAssign()
    for node in matchers.findall(block.body, targets | matchers.For() | matchers.NamedExpr()):
        for name in _names_in(getattr(node, "target", node)):
            names[name] = None
    return list(names)


def _names_in(target: cst.CSTNode) -> list[str]:
    if isinstance(target, cst.Name):
        return [target.value]
    if isinstance(target, cst.Tuple | cst.List):
        return [name for element in target.elements for name in _names_in(element.value)]
    return []


def _edits(program: Program, tape: _Straight) -> tuple[Edit, ...]:
    """Makes `def` of `with`, and the call of it of `tape.gradient`."""
    function = _free_name(program, tape.loss)
    augmented = {
        node.target.value
        for node in matchers.findall(tape.block.body, matchers.AugAssign())
        if isinstance(node, cst.AugAssign) and isinstance(node.target, cst.Name)
    }
    kept = [
        name
        for name in _assigned(tape.block)
        if name != tape.loss and (name in augmented or _is_used_after(program, tape, name))
    ]
    start, end = program.span(tape.block)
    body = program.span(tape.block.body)
    head = program.data[start : body[0]]
    colon = start + head.rindex(b":")
    block_indent = _indent(program, tape.block)
    inner_indent = _indent_of_body(program, tape.block, block_indent)
    newline = "\r\n" if b"\r\n" in program.data[:end] else "\n"
    returned = tape.loss if not kept else f"{tape.loss}, ({', '.join(kept)},)"
    results = tape.loss if not kept else f"({tape.loss}, ({', '.join(kept)},))"
    options = ", has_aux=True" if kept else ""
    call = f"rx.value_and_grad({function}, {program.source(tape.variables)}{options})()"
    assignment = tape.statement.body[0]
    last = _end_of_last_line(program, tape.block)
    return (
        Edit(start, colon, f"def {function}()"),
        Edit(last, last, f"{newline}{inner_indent}return {returned}"),
        Edit(*program.span(assignment), f"{results}, {tape.gradients} = {call}"),
    )


def _free_name(program: Program, loss: str) -> str:
    """Returns a name for the function that the program does not use."""
    used = {name.value for name in matchers.findall(program.module, matchers.Name())}  # type: ignore[attr-defined]
    names = [f"compute_{loss}", f"forward_{loss}", f"{loss}_of_tape"]
    names += [f"compute_{loss}_{number}" for number in range(1, len(used) + 2)]
    return next(name for name in names if name not in used)


def _carried_in(program: Program, block: cst.With) -> str | None:
    """Returns a name that the block changes, and that has a value before it, if there is one."""
    around = _function_around(program, block)
    start, _ = program.span(block)
    before = {
        name
        for node in matchers.findall(around, matchers.AssignTarget() | matchers.Param())
        if program.span(node)[0] < start
        for name in _names_in(node.target if isinstance(node, cst.AssignTarget) else node.name)  # type: ignore[attr-defined]
    }
    targets = {id(node) for node in _target_names(block)}
    read = {
        name.value  # type: ignore[attr-defined]
        for name in matchers.findall(block.body, matchers.Name())
        if id(name) not in targets
    }
    augmented = {
        node.target.value
        for node in matchers.findall(block.body, matchers.AugAssign())
        if isinstance(node, cst.AugAssign) and isinstance(node.target, cst.Name)
    }
    return next((n for n in _assigned(block) if n in before and n in read | augmented), None)


def _target_names(block: cst.With) -> list[cst.CSTNode]:
    """Returns the names that are targets of assignments in a block."""
    return [
        name
        for node in matchers.findall(block.body, matchers.AssignTarget())
        for name in matchers.findall(node, matchers.Name())
    ]


def _is_used_after(program: Program, tape: _Straight, name: str) -> bool:
    _, end = program.span(tape.statement)
    uses = matchers.findall(_function_around(program, tape.block), matchers.Name(name))
    return any(program.span(use)[0] >= end for use in uses)


def _indent(program: Program, node: cst.CSTNode) -> str:
    line_start = program.data.rfind(b"\n", 0, program.span(node)[0]) + 1
    return program.data[line_start : program.span(node)[0]].decode()


def _indent_of_body(program: Program, block: cst.With, outer: str) -> str:
    if isinstance(block.body, cst.IndentedBlock):
        return outer + (block.body.indent or program.module.default_indent)
    return outer + program.module.default_indent


def _end_of_last_line(program: Program, block: cst.With) -> int:
    """Returns the end of the last line of a block, comments included."""
    last = block.body.body[-1]
    _, end = program.span(last)
    while program.data[end : end + 1] not in (b"\n", b"\r", b""):
        end += 1
    return end


def _import_of_replicax(program: Program) -> list[Finding]:
    """Returns the edit that adds `import replicax as rx` after the import of `replicax.tf`."""
    statements: list[cst.SimpleStatementLine] = []
    for statement in program.module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        text = program.source(statement)
        if "import replicax as rx" in text:
            return []
        if isinstance(statement.body[0], cst.Import | cst.ImportFrom) and "replicax.tf" in text:
            statements.append(statement)
    if not statements:
        return []
    start, _ = program.span(statements[0])
    line, column = program.place(statements[0])
    newline = "\r\n" if b"\r\n" in program.data else "\n"
    edit = Edit(start, start, f"import replicax as rx{newline}")
    return [Finding(line, column, Kind.CHANGES, "rx", "adds `import replicax as rx`", (edit,))]
