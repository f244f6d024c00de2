"""Makes faults in Python source: places where one small edit changes what a program does, and what the edit is.

An edit keeps the number of lines. Left alone are docstrings, annotations, assertions, messages (of errors, warnings and logs), `__all__`,
bodies of protocols, and what only type checkers read.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KINDS = ("drop", "double", "swap", "divisor", "dtype", "comparison", "boundary", "transition")

# Functions, or single ones of a class, that do their work only where there is CUDA; tests of the short suite skip or replace them.
NEEDS_GPU = {
    "features/graphs/recording.py:Recording._graph": "records a CUDA graph; tests/engine/test_recording.py replaces it",
    "core/host_memory.py:_PageLocked.__init__": "registers pages with the CUDA driver",
    "core/host_memory.py:_unlock": "takes them back from the driver",
    "features/direct_gradients.py:_has_wide_product": "is false on a CPU, whatever its other conditions say",
    "core/planning.py:spare_bytes": "is 0 on a CPU; asks the driver how much memory is free",
}

# What is done twice: collectives and what adds up. Most other calls may be made twice by right.
_TWICE = {
    *("all_reduce", "reduce_scatter", "all_reduce_coalesced", "reduce_scatter_flat", "reduce_scatter_coalesced"),
    *("sum_scatter_high_precision", "gather", "broadcast", "broadcast_from_first", "broadcast_object_list"),
    *("all_gather_object", "all_gather_flat", "all_gather_coalesced", "all_to_all_single", "_gather"),
    *("_gather_into", "_gather_shards", "_reduce", "_reduce_held_back", "reduce_held_back", "reduce_pending"),
    *("_over_ranks_in_place", "_broadcast", "_gather_whole_weights"),
    *("share_from_first", "append", "extend", "pop", "popleft", "appendleft", "submit", "replay", "backward"),
    *("mul_", "add_", "addmm_", "lerp_", "_scale", "foreach_add_", "foreach_mul_", "foreach_lerp_", "accumulate"),
    *("accumulate_", "set_aside", "_add_product", "_collect"),
    *("release_bucket", "note_run", "note_backward", "note_forward", "run_hooks", "run_gradient_hooks", "hook"),
    *("register", "register_hook", "register_prehook", "register_forward_pre_hook", "register_forward_hook"),
    *("enter", "leave", "begin", "finish", "step", "_step", "own_step", "stepped", "optimizer_stepped", "quantize"),
    *("quantize_all", "unit_done", "came"),
}
_MESSAGES = {
    *("warn", "warning", "info", "debug", "error", "print", "log", "rank_zero_warn", "rank_zero_info", "_advise"),
    *("advise",),
}
_EXCHANGED = {
    *("copy_", "foreach_copy_", "foreach_add_", "foreach_lerp_", "gather", "reduce_scatter", "all_gather_flat"),
    *("all_to_all_single", "reduce_scatter_flat", "reduce_scatter_coalesced", "all_gather_coalesced"),
    *("sum_scatter_high_precision", "lerp_", "mm", "addmm_", "add", "acquire", "release", "_gather_shards"),
    *("submit", "copy_or_add", "accumulate_", "_product_into"),
}
_FACTORS = ("factor", "_factor", "scale", "_scale", "divisor", "reduction_factor", "decay", "weight_decay")
_DTYPES = {
    "main_dtype": "compute_dtype",
    "compute_dtype": "main_dtype",
    "storage_dtype": "main_dtype",
    "comm_dtype": "main_dtype",
    "wire_dtype": "sum_dtype",
    "sum_dtype": "wire_dtype",
    "main_params_dtype": "main_grads_dtype",
    "main_grads_dtype": "grad_comm_dtype",
    "grad_comm_dtype": "main_grads_dtype",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float16": "float32",
    "float64": "float32",
    "int64": "int32",
    "int32": "int64",
}
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SIGNS: dict[type[ast.operator], str] = {ast.Div: "*", ast.FloorDiv: "*", ast.Mult: "//"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)


@dataclass(frozen=True)
class Fault:
    """One edit of one file.

    Attributes:
        file: Relative to the folder of all files.
        line: Where what is changed begins, from 1.
        kind: One of `KINDS`.
        function: The qualified name of the function around it; "" outside functions.
        statement: The line where the innermost statement begins; `None` outside functions.
        start: First byte that is replaced.
        end: First byte after it.
        text: What comes there.
        before: What is there now, on one line, for people.
        after: The same afterwards.
    """

    file: str
    line: int
    kind: str
    function: str
    statement: int | None
    start: int
    end: int
    text: str
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """The file with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def faults_in(file: str, source: bytes) -> list[Fault]:
    """Every fault that can be made in a file, in the order of places."""
    maker = _Maker(file, source)
    found = {(fault.start, fault.end, fault.text): fault for fault in maker.made()}
    return sorted(found.values(), key=lambda fault: (fault.start, fault.end, fault.kind, fault.text))


def draw(sources: Mapping[str, bytes], number: int, seed: int) -> list[Fault]:
    """Faults of all files: as many of each kind as of any other, and of one kind each as likely as any other. No place comes twice.

    Args:
        sources: Of each file.
        number: How many.
        seed: The same faults for the same sources and seed.
    """
    rng = random.Random(seed)
    by_kind: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for file in sorted(sources):
        for fault in faults_in(file, sources[file]):
            by_kind[fault.kind].append(fault)
    for faults in by_kind.values():
        rng.shuffle(faults)
    drawn: list[Fault] = []
    while len(drawn) < number and any(by_kind.values()):
        kinds = [kind for kind in KINDS if by_kind[kind]]
        rng.shuffle(kinds)
        for kind in kinds:
            while by_kind[kind]:
                fault = by_kind[kind].pop()
                if not any(fault.file == other.file and _overlap(fault, other) for other in drawn):
                    drawn.append(fault)
                    break
    return drawn[:number]


def _overlap(one: Fault, other: Fault) -> bool:
    return one.start < other.end and other.start < one.end


class _Maker:
    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def made(self) -> Iterator[Fault]:
        yield from self._in(self._tree, "", None, inside=False)

    # -- where ---------------------------------------------------------------------------------------------------------

    def _in(self, node: ast.AST, function: str, statement: int | None, *, inside: bool) -> Iterator[Fault]:
        """Faults at a node and below it.

        Args:
            node: Of the file.
            function: The qualified name of the function or class around it.
            statement: Where the innermost statement begins.
            inside: It is in the body of a function, not of a class or the file.
        """
        if _is_left_alone(node) or f"{self._file}:{function}" in NEEDS_GPU:
            return
        if isinstance(node, ast.AnnAssign) and (node.value is None or not inside):
            return
        if isinstance(node, ast.stmt) and inside and not isinstance(node, _DEFINITIONS):
            statement = node.lineno
        for fault_of in (self._call, self._numbers, self._dtype, self._comparison, self._boundary, self._transition):
            yield from (self._named(function, statement, *found) for found in fault_of(node, inside))
        for body in _bodies(node):
            for first, one, text, other in self._swaps(body, function) if inside else ():
                yield self._named(function, first, "swap", one, text, other)
        for field, child in _children(node):
            if field in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(child, _DEFINITIONS):
                name = f"{function}.{child.name}".lstrip(".")
                yield from self._in(child, name, None, inside=not isinstance(child, ast.ClassDef))
            else:
                yield from self._in(child, function, statement, inside=inside)

    def _named(self, function: str, statement: int | None, kind: str, node: ast.AST, text: str, *end: ast.AST) -> Fault:
        start = self._offset(node)
        last = self._offset(end[0] if end else node, end=True)
        old = self._source[start:last].decode()
        missing = old.count("\n") - text.count("\n")
        if missing > 0:
            text += ("\n" if isinstance(node, ast.stmt) else " \\\n") * missing
        line = self._source[:start].count(b"\n") + 1
        before, after = _on_one_line(old), _on_one_line(text.rstrip("\\\n ")) or "(nothing)"
        return Fault(self._file, line, kind, function, statement, start, last, text, before, after)

    def _offset(self, node: ast.AST, *, end: bool = False) -> int:
        line, column = ("end_lineno", "end_col_offset") if end else ("lineno", "col_offset")
        return self._starts[int(getattr(node, line)) - 1] + int(getattr(node, column))

    def _text(self, node: ast.AST) -> str:
        return self._source[self._offset(node) : self._offset(node, end=True)].decode()

    # -- what ----------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        """A call whose result nobody uses is dropped or done twice."""
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and inside):
            return
        yield "drop", node, "pass"
        if _name_of(node.value) in _TWICE:
            once = ast.unparse(node)
            yield "double", node, f"{once}; {once}"

    def _swaps(self, body: list[ast.stmt], function: str) -> Iterator[tuple[int, ast.stmt, str, ast.stmt]]:
        """Neighbors change places, where the order may matter: one of them calls, and both speak of one thing."""
        for one, other in itertools.pairwise(body):
            if not (isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE)):
                continue
            if _is_message(one) or _is_message(other) or _is_constant(one) or _is_constant(other):
                continue
            comes_to_be = function.endswith("__init__") and _stored(one) & _loaded(other)
            if _depend(one, other) and not comes_to_be:
                between = self._source[self._offset(one, end=True) : self._offset(other)].decode()
                if ";" not in between:
                    yield one.lineno, one, f"{self._text(other)}{between}{self._text(one)}", other

    def _numbers(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        """Divisors and factors, and arguments that change places."""
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS and not _repeats(node):
            yield "divisor", node, f"{_bracketed(node.left)} {_SIGNS[type(node.op)]} {_bracketed(node.right)}"
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in _FACTORS and isinstance(getattr(node, "ctx", None), ast.Load) and inside:
            yield "divisor", node, "1.0"
            yield "divisor", node, f"(2 * {ast.unparse(node)})"
        if isinstance(node, ast.Call) and len(node.args) > 1 and inside and _name_of(node) in _EXCHANGED:
            first, second, *rest = node.args
            if not any(isinstance(one, ast.Starred) for one in node.args) and ast.dump(first) != ast.dump(second):
                text = ", ".join(ast.unparse(one) for one in (second, first, *rest))
                named = "".join(f", {ast.unparse(one)}" for one in node.keywords)
                yield "swap", node, f"{ast.unparse(node.func)}({text}{named})"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _copies_one(node):
            named = "".join(f", {ast.unparse(one)}" for one in node.keywords)
            yield "swap", node, f"{_bracketed(node.args[0])}.copy_({ast.unparse(node.func.value)}{named})"

    def _dtype(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _DTYPES and inside:
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if not is_torch and ast.unparse(node.value).endswith("codec"):
                return  # has one dtype
            if is_torch == (node.attr.startswith(("float", "bfloat", "int"))):
                yield "dtype", node, f"{ast.unparse(node.value)}.{_DTYPES[node.attr]}"

    def _comparison(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = _OPERATORS[type(node.ops[0])]
            yield "comparison", node, f"({_bracketed(node.left)} {operator} {_bracketed(node.comparators[0])})"
        elif isinstance(node, ast.BoolOp):
            operator = " or " if isinstance(node.op, ast.And) else " and "
            yield "comparison", node, f"({operator.join(_bracketed(value) for value in node.values)})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "comparison", node, f"bool({ast.unparse(node.operand)})"

    def _boundary(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield "boundary", node, str(node.value + 1)
            if node.value > 0:
                yield "boundary", node, str(node.value - 1)
        ends: list[ast.expr] = []
        if isinstance(node, ast.Slice):
            ends = [end for end in (node.lower, node.upper) if end is not None]
        elif isinstance(node, ast.Call) and _name_of(node) == "range" and not node.keywords:
            ends = [end for end in node.args if not isinstance(end, ast.Starred)]
        for end in ends:
            if not isinstance(end, ast.Constant):
                yield "boundary", end, f"({ast.unparse(end)}) + 1"
                yield "boundary", end, f"({ast.unparse(end)}) - 1"

    def _transition(self, node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
        """A state that is set to another, or not set."""
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and inside:
            yield "transition", node, "pass"
        if not (isinstance(node, ast.Assign) and inside):
            return
        if not all(isinstance(target, ast.Attribute) for target in node.targets):
            return
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            yield "transition", node.value, str(not node.value.value)
        elif isinstance(node.value, ast.Constant) and node.value.value is None:
            yield "transition", node, "pass"


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_message(node)):
        return True
    if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def _copies_one(node: ast.Call) -> bool:
    return _name_of(node) == "copy_" and len(node.args) == 1 and not isinstance(node.args[0], (ast.Starred, ast.BinOp))


def _repeats(node: ast.BinOp) -> bool:
    """A sequence times a number."""
    return any(isinstance(side, (ast.List, ast.Tuple, ast.JoinedStr)) for side in (node.left, node.right))


def _is_message(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _name_of(statement.value) in _MESSAGES
    )


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _depend(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether the order of two statements may matter: one calls, both speak of a thing, and no name is used before it is there."""
    if any(isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) for part in ast.walk(one)):
        return False
    calls = any(isinstance(part, ast.Call) for statement in (one, other) for part in ast.walk(statement))
    if not calls or not any(isinstance(statement, ast.Expr) for statement in (one, other)):
        return bool(_stored(one) & _loaded(other) or _stored(other) & _loaded(one))
    return bool(_spoken_of(one) & _spoken_of(other))


def _stored(statement: ast.stmt) -> set[str]:
    return {ast.unparse(part) for part in ast.walk(statement) if isinstance(getattr(part, "ctx", None), ast.Store)}


def _loaded(statement: ast.stmt) -> set[str]:
    return {ast.unparse(part) for part in ast.walk(statement) if isinstance(getattr(part, "ctx", None), ast.Load)}


def _spoken_of(statement: ast.stmt) -> set[str]:
    """Attributes, subscripts and names, but for `self` and modules."""
    found = {
        ast.unparse(part)
        for part in ast.walk(statement)
        if isinstance(part, (ast.Name, ast.Attribute)) and not ast.unparse(part).startswith(("torch", "compat", "dist"))
    }
    return found - {"self", "cls", "None", "len", "tuple", "list", "int"}


def _bracketed(node: ast.expr) -> str:
    text = ast.unparse(node)
    plain = (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript)
    return text if isinstance(node, plain) else f"({text})"


def _on_one_line(text: str) -> str:
    return " ".join(text.replace("\\\n", " ").split())
