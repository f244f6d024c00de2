"""Writes docs/reference/messages.md, the index of errors and warnings, from what the package raises: `python docs/messages.py`.

A message is what a `raise` or a warning is given. Words that stand elsewhere are looked up: a name stands for what its function or
its file assigns to it, a call of one of the package's functions for the text or the error which that function returns. What is filled
in becomes `…`. Assertions are not messages.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "lightning_mfsdp"
PAGE = DOCS / "reference/messages.md"

# Sections of the index: their titles, the page to read on each, and whose messages they list. The longest path decides.
SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Starting and stopping": (
        "troubleshooting.md#it-does-not-start",
        (
            "launch",
            "commands/doctor",
            "ray.py",
            "_lightning_api.py",
            "engine/comm/process_groups.py",
        ),
    ),
    "Options of the strategies": ("quickstart.md", ("options",)),
    "Precision": (
        "precision.md",
        (
            *(
                "options/dtypes.py",
                "options/policy_and_precision.py",
                "trainer/precision.py",
            ),
            *("engine/core/policy.py", "engine/core/fp32_modules.py"),
        ),
    ),
    "Sharding a model": (
        "strategies.md",
        (
            "base",
            "engine/api",
            "engine/layout",
            "engine/comm/mesh.py",
            "engine/comm/communicators.py",
        ),
    ),
    "Running a sharded model": ("life_of_a_parameter.md", ("engine",)),
    "Optimizers": (
        "strategies.md#other-optimizers",
        (
            *(
                "optim",
                "engine/optimizer",
                "engine/api/optimizer.py",
                "engine/features/fused_adam.py",
            ),
            *(
                "engine/features/decoupled.py",
                "engine/features/offload",
                "engine/core/host_memory.py",
            ),
        ),
    ),
    "CUDA graphs": (
        "performance.md#cuda-graphs-under-the-trainer",
        ("engine/features/graphs", "trainer/cuda_graph.py"),
    ),
    "FP8": ("fp8.md", ("te", "float8")),
    "Trainer and Fabric": ("fabric.md", ("trainer", "fabric")),
    "Callbacks": (
        "callbacks.md",
        ("callbacks", "profile", "trainer/callback_hooks.py"),
    ),
    "Paged stash": ("paged_stash.md", ("callbacks/paged_stash", "moe/stash")),
    "Checkpoints": (
        "checkpoints.md",
        (
            "checkpoint",
            "commands",
            "trainer/checkpointing.py",
            "trainer/data_position.py",
            "fabric/checkpoints.py",
        ),
    ),
    "Safetensors": (
        "export.md",
        ("checkpoint/safetensors", "commands/safetensors_folder.py"),
    ),
    "Memory of a model": (
        "large_runs.md#memory-before-you-rent",
        ("estimate", "commands/memory"),
    ),
    "Losses and batches": ("ops.md", ("ops",)),
    "Mixtures of experts": ("moe.md", ("moe",)),
    "Multi-token prediction": ("mtp.md", ("mtp.py",)),
    "Context parallelism": ("long_context.md", ("context_parallel",)),
    "Tensor parallelism": (
        "design/tensor_parallel.md",
        ("tensor_parallel", "base/part.py"),
    ),
    "Activation checkpointing": (
        "recompute.md",
        ("recompute", "callbacks/recompute.py"),
    ),
}

# Where there is more to read: words of a message, and a section of a page.
READ_MORE: Mapping[str, str] = {
    "MemoryReport(step=": "callbacks.md#where-the-memory-goes",
    "MemoryReport reads": "callbacks.md#where-the-memory-goes",
    "MemoryReport with": "callbacks.md#where-the-memory-goes",
    "StepProfile": "callbacks.md#where-the-time-goes",
    "is no trace of torch.profiler": "reference/cli.md#profile",
    "the trace has neither steps": "reference/cli.md#profile",
    "mfsdp_notebook: ": "notebook.md#several-processes",
    "NormMonitor(": "callbacks.md#norms-of-gradients-weights-and-updates",
    "NormMonitor: ": "callbacks.md#norms-of-gradients-weights-and-updates",
    "NormMonitor reads": "callbacks.md#norms-of-gradients-weights-and-updates",
    "torch.distributed has no process group, and this": "quickstart.md#without-lightning",
    "processes are connected but the Trainer": "quickstart.md#multiple-processes-and-nodes",
    "for all checks": "doctor.md",
    "connecting the processes: rank": "troubleshooting.md#it-does-not-start",
    "cannot reach rank 0 at": "checkpoints.md#saving",
    "so the job is not in the queue again": "checkpoints.md#slurm",
    "came when there was nothing left to train": "checkpoints.md#slurm",
    "LIGHTNING_MFSDP_NAMESPACE=…: expected": "fabric.md#pytorch_lightning",
    "has no option …: …": "coming_from.md",
    "outer x data x context x tensor = …": "strategies.md#two-axes-hsdp-and-hfsdp",
    "needs a mesh with an outer axis": "strategies.md#two-axes-hsdp-and-hfsdp",
    "shards the main weights further": "strategies.md#two-axes-hsdp-and-hfsdp",
    "expected a mesh with one axis": "strategies.md#two-axes-hsdp-and-hfsdp",
    "along which all parameters would differ": "moe.md#expert-parallelism",
    "is for modules of experts, whose parameters differ": "moe.md#expert-parallelism",
    "so its gradients would leave out the data": "moe.md#expert-parallelism",
    "Padding adds": "strategies.md#padding",
    "no module with parameters matches": "strategies.md#units",
    "blocks_per_unit=…: expected": "performance.md#several-blocks-per-unit",
    "did not see within": "checkpoints.md#saving",
    "differs between ranks, so nothing was read": "checkpoints.md#saving",
    "no reset_parameters() to initialize": "quickstart.md#models-that-do-not-fit-on-one-device",
    "does not set all of that": "quickstart.md#models-that-do-not-fit-on-one-device",
    "adapters on the meta device": "finetuning.md#lora",
    "cannot be sharded as it is stored": "fp8.md#fp8-weights",
    "MixedPrecisionPolicy.weight_codecs: expected": "design/codec.md",
    "symmetric_memory=True on rank": "performance.md#symmetric-memory",
    "symmetric_memory=True, but unit": "performance.md#symmetric-memory",
    "the slots of gathered weights are planned": "performance.md#symmetric-memory",
    "is used outside of the forward of its module": "strategies.md#sharded-parameters-in-your-code",
    "a loss was computed from it outside": "strategies.md#sharded-parameters-in-your-code",
    "a loss was computed from its sharded rows": "strategies.md#sharded-parameters-in-your-code",
    "autograd cannot follow a write in place": "strategies.md#sharded-parameters-in-your-code",
    "a forward wrote to its own parameter": "strategies.md#sharded-parameters-in-your-code",
    "is handed to another library (DLPack)": "strategies.md#sharded-parameters-in-your-code",
    "came into the model after it was sharded": "strategies.md#sharded-parameters-in-your-code",
    "a gradient came after the gradients of this unit": "strategies.md#sharded-parameters-in-your-code",
    "that was taken with create_graph=True": "features.md",
    "register_hook on parameter": "strategies.md#sharded-parameters-in-your-code",
    "buffers shall follow the first rank": "strategies.md#sharded-parameters-in-your-code",
    "it was frozen when fully_shard was called": "strategies.md#sharded-parameters-in-your-code",
    "cannot be pickled (torch.save)": "checkpoints.md#in-your-own-loop",
    "was replaced after fully_shard": "checkpoints.md#the-model-after-training",
    "was sharded with main weights of": "checkpoints.md#the-model-after-training",
    "as a conversion left it": "checkpoints.md#the-model-after-training",
    "unshard_model made the module plain whose rows": "checkpoints.md#the-model-after-training",
    "was given a module that is sharded": "checkpoints.md#the-model-after-training",
    "Ranks that share weights have to run the same units": "troubleshooting.md#it-hangs-or-a-rank-died",
    "because another rank is gone or does something else": "troubleshooting.md#it-hangs-or-a-rank-died",
    "rank … ends…: …": "troubleshooting.md#it-hangs-or-a-rank-died",
    "lerp_: the sources (…)": "callbacks.md#teachers-and-target-networks",
    "needs whole vectors or matrices": "strategies.md#other-optimizers",
    "calls it in its step on parameter": "strategies.md#other-optimizers",
    "traces the sharded rows of parameter": "strategies.md#other-optimizers",
    "gives each rank, or may have": "strategies.md#other-optimizers",
    "did not call the closure that fully_shard_optimizer": "strategies.md#other-optimizers",
    "chunk by chunk from inside its closure": "performance.md#optimizer-state-in-host-memory",
    "did not call the closure it was given": "performance.md#optimizer-state-in-host-memory",
    "FusedAdam(capturable=True)": "fp8.md#fusedadam",
    "FusedAdam(master_weights=True": "fp8.md#fusedadam",
    "(use_decoupled_grad=True) would find": "fp8.md#fusedadam",
    "use_decoupled_grad needs one optimizer": "fp8.md#fusedadam",
    "computes in float16 and there is no loss scaling": "precision.md#loss-scaling-in-your-own-loop",
    "under loss scaling: the optimizer removes": "precision.md#loss-scaling-in-your-own-loop",
    "Muon: parameter … of shape": "strategies.md#muon",
    "parts of a matrix, this rank": "strategies.md#muon",
    "contradict each other": "precision.md#your-own-policy",
    "there is no loss scaling, so small gradients become zero and large": "precision.md#trade-offs",
    "GradientWatch: expected": "callbacks.md#nan-and-infinite-gradients",
    "non-finite gradients in step": "callbacks.md#nan-and-infinite-gradients",
    "the step with the gradients of the warning above": "callbacks.md#nan-and-infinite-gradients",
    "ShardedEMA: there is no average of this model": "callbacks.md#an-exponential-moving-average-of-the-weights",
    "parameters to be unfrozen are in the optimizer": "callbacks.md#freezing-unfreezing-and-new-parameter-groups",
    "so training runs without CUDA graphs": "performance.md#cuda-graphs-under-the-trainer",
    "has no option `capturable`": "performance.md#a-step-as-one-cuda-graph",
    "is no recipe; expected one of": "fp8.md#recipes",
    "recipe … cannot run on": "fp8.md#recipes",
    "has no layer that was replaced or built": "fp8.md#replaced-layers",
    "has hooks, a parametrization or modules inside": "fp8.md#replaced-layers",
    "multiplies matrices whose sizes": "fp8.md#replaced-layers",
    "has no module with FP8 weights": "fp8.md#fp8-weights",
    "is to compute with another recipe": "fp8.md#fp8-weights",
    "which cannot be saved safely": "fp8.md#limitations",
    "or give your experts a `saver`": "paged_stash.md#custom-expert-layers",
    "gave live_rows as": "paged_stash.md#custom-expert-layers",
    "PagedStash does not pay here": "paged_stash.md#when-to-use-it",
    "rows of … found no pages": "paged_stash.md#overflow",
    "so all ranks leave this optimizer step out": "paged_stash.md#overflow",
    "so all ranks do this step again": "paged_stash.md#overflow",
    "overflowed() was not called before": "paged_stash.md#in-your-own-loop",
    "were saved after submit_overflow()": "paged_stash.md#in-your-own-loop",
    "had more rows than its buffer holds": "moe.md#expert-parallelism",
    "so this call takes a larger buffer": "moe.md#expert-parallelism",
    "expert_parallel: expected a mesh": "moe.md#expert-parallelism",
    "TopKRouter: scores: expected": "moe.md#the-router",
    "which is not loaded by default": "checkpoints.md#what-loads-what",
    "in it, as this strategy writes": "checkpoints.md#what-loads-what",
    "rank 0 sees no checkpoint": "checkpoints.md#kinds",
    "is no checkpoint: expected a directory with": "checkpoints.md#kinds",
    "is incomplete or damaged, so nothing was read": "checkpoints.md#verify",
    "the checksum of … differs": "checkpoints.md#verify",
    "async_save=True: two callbacks save": "checkpoints.md#saving",
    "reads that epoch from its beginning again": "checkpoints.md#saving",
    "so that they cannot save together": "checkpoints.md#saving",
    "so their names are unknown": "checkpoints.md#optimizer-states-without-names",
    "it is unclear where the model is": "checkpoints.md#conversion",
    "load_safetensors: … has no sharded parameters": "export.md#load-pretrained-weights",
    "into the same name": "export.md#load-pretrained-weights",
    "do not begin with prefix=…": "export.md#export",
    "fabric.load(…): nothing to load into": "fabric.md#fabric",
    "an optimizer holds parameters on the meta device": "fabric.md#fabric",
    "give each batch as many samples as divide num_tokens": "ops.md#batches-for-fp8",
    "needs a multiple of …; give width": "ops.md#batches-for-fp8",
    "the weight is sharded, and this rank has only some": "ops.md#a-head-that-can-be-sharded",
    "vocab_group: rank … is not part of it": "ops.md#a-vocabulary-split-over-ranks",
    "documents: expected the number": "mtp.md#packed-samples",
    "count_drafts: expected": "mtp.md#drafts",
    "checkpoints itself already": "recompute.md#what-does-not-combine",
    "a cache that its forward writes to": "recompute.md#what-does-not-combine",
    "is recomputed in backward by an activation checkpoint": "recompute.md#what-does-not-combine",
    "so its own input is kept as well": "recompute.md#how-it-works",
    "save_ops: there is no operator": "recompute.md#which-method",
    "is made of other operators": "recompute.md#which-method",
    "plan_recompute: a step takes": "recompute.md#how-many-layers",
}

# Functions whose errors no call of the public functions leads to, and why.
_OWN_LAYOUT = "the engine asks for layouts by itself, and packing.py searches only among those that keep the rules"
INTERNAL = {
    "engine/layout/layout.py:Layout.__post_init__": _OWN_LAYOUT,
    "engine/layout/layout.py:Layout._check_tensor": _OWN_LAYOUT,
    "engine/layout/layout.py:Layout._check_span": _OWN_LAYOUT,
    "engine/layout/layout.py:_check_arguments": _OWN_LAYOUT,
    "checkpoint/io/write.py:Writer.write_data": "it says what the operating system said, in its words",
    "checkpoint/io/ranks.py:Ranks.together": "it has what ranks raised, in their words, and is explained where it is caught",
    "base/tree.py:_read": "it is explained where it is caught",
    "__init__.py:__getattr__": "it is Python's own message for a name that a module lacks",
    "launch/stopping.py:Stopping._on_signal": "it is Lightning's exception, without words",
    "launch/stopping.py:Stopping._before_batch": "it is Lightning's exception, without words",
}

INTRODUCTION = """\
# Messages

This page lists every error and every warning of the package, by subject. Search for words of your message: `…` stands for names and numbers of your
program. Each message says what to do, and the last column links to further reading. [Troubleshooting](../troubleshooting.md) is sorted by symptom, and also
explains messages of PyTorch and Lightning.

`ShardingError` is a `ValueError`: something cannot be sharded as requested. `EngineStateError` is a `RuntimeError`: a call is not possible in the present
state of the engine. `log` marks log messages. An error from inside the package that is not on this page is a defect of the package; please report it.

`python docs/messages.py` writes this page from the code."""  # noqa: E501

WARNERS = {"warn", "warning", "rank_zero_warn", "rank_zero_deprecation"}
LOGGED = "log"
# Words that are filled in are written out if they are at least so long, and not more than so many.
LONG, MANY = 40, 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one `raise` or one warning may say, with `…` for what is filled in; `kind` is its class."""

    text: str
    kind: str
    file: str
    function: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Scope:
    """Where an expression stands, and the functions whose results are being looked up already."""

    file: str
    function: Function | None
    known: frozenset[str] = frozenset()


class Finder:
    """Finds the messages of a set of files, given as their text by name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in files.items()}
        self.makers: dict[str, list[Scope]] = {}
        for name, tree in self.trees.items():
            for function, _ in _functions(tree):
                if _makes_messages(function):
                    self.makers.setdefault(function.name, []).append(
                        Scope(name, function)
                    )

    def messages(self) -> list[Message]:
        found: list[Message] = []
        for name, tree in self.trees.items():
            for function, within in [(None, ""), *_functions(tree)]:
                nodes = list(_own_nodes(function or tree))
                caught = {
                    node.name
                    for node in nodes
                    if isinstance(node, ast.ExceptHandler) and node.name
                }
                for node in nodes:
                    for kind, text in self._said(
                        node, caught, Scope(name, function)
                    ):
                        found.append(
                            Message(
                                text=text,
                                kind=kind,
                                file=name,
                                function=f"{name}:{within}",
                                line=node.lineno,
                            )
                        )
        return found

    def _said(
        self, node: ast.AST, caught: set[str], scope: Scope
    ) -> Iterator[tuple[str, str]]:
        """Classes and texts. `raise` alone, and of an exception that was caught, passes on what was said elsewhere."""
        if isinstance(node, ast.Raise) and node.exc is not None:
            if not (isinstance(node.exc, ast.Name) and node.exc.id in caught):
                yield from self._errors(node.exc, scope)
        elif isinstance(node, ast.Call) and _called(node) in WARNERS and node.args:
            kind = LOGGED if _called(node) == "warning" else _category(node)
            yield from ((kind, text) for text in self._texts(node.args[0], scope))

    def _errors(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Call):
            if _called(node) in self.makers:
                for value, where in self._returned(_called(node), scope):
                    yield from self._errors(value, where)
            else:
                texts = self._texts(node.args[0], scope) if node.args else [""]
                yield from ((_called(node) or "…", text) for text in texts)
        elif isinstance(node, ast.Name) and (
            values := self._assigned(node.id, scope)
        ):
            for value, where in values:
                yield from self._errors(value, where)
        elif isinstance(node, ast.Name):
            yield node.id, ""
        else:
            yield "…", ""

    def _texts(self, node: ast.expr, scope: Scope) -> list[str]:
        """What an expression may say. What is only known at run time is `…`."""
        if isinstance(node, ast.Constant):
            return (
                [re.sub(r"%[sdr]", "…", node.value)]
                if isinstance(node.value, str)
                else ["…"]
            )
        if isinstance(node, ast.JoinedStr):
            parts = [
                self._filled(part.value, scope)
                if isinstance(part, ast.FormattedValue)
                else self._texts(part, scope)
                for part in node.values
            ]
            return ["".join(choice) for choice in itertools.product(*parts)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = itertools.product(
                self._texts(node.left, scope), self._texts(node.right, scope)
            )
            return ["".join(choice) for choice in both]
        if (
            isinstance(node, ast.Call)
            and _called(node) == "join"
            and len(node.args) == 1
        ):
            between = self._texts(node.func.value, scope)[0]
            return [
                between.join(choice)
                for choice in itertools.product(*self._lines(node.args[0], scope))
            ]
        if isinstance(node, ast.Call) and _called(node) == "format":
            return [
                re.sub(r"\{\w*\}", "…", text)
                for text in self._texts(node.func.value, scope)
            ]
        if isinstance(node, ast.IfExp):
            return _once(
                [*self._texts(node.body, scope), *self._texts(node.orelse, scope)]
            )
        if isinstance(node, ast.Name) and (
            values := self._assigned(node.id, scope)
        ):
            return _once(
                [
                    text
                    for value, where in values
                    for text in self._texts(value, where)
                ]
            )
        if isinstance(node, ast.Call) and _called(node) in self.makers:
            values = self._returned(_called(node), scope)
            return _once(
                [
                    text
                    for value, where in values
                    for text in self._texts(value, where)
                ]
            ) or ["…"]
        return ["…"]

    def _lines(self, node: ast.expr, scope: Scope) -> Iterator[list[str]]:
        """What is joined, as far as it is known."""
        if isinstance(node, ast.List):
            for part in node.elts:
                yield from (
                    self._lines(part.value, scope)
                    if isinstance(part, ast.Starred)
                    else [self._texts(part, scope)]
                )
        elif isinstance(node, ast.GeneratorExp | ast.ListComp):
            yield self._texts(node.elt, scope)
        elif isinstance(node, ast.Name) and (
            values := self._assigned(node.id, scope)
        ):
            yield from self._lines(*values[0])
            yield ["…"]  # what is appended to it
        else:
            yield ["…"]

    def _filled(self, node: ast.expr, scope: Scope) -> list[str]:
        """Whole sentences that are filled in are part of the message; names, numbers and the like are not."""
        texts = self._texts(node, scope)
        return (
            texts
            if len(texts) <= MANY
            and any(len(text.replace("…", "")) >= LONG for text in texts)
            else ["…"]
        )

    def _returned(self, called: str, scope: Scope) -> list[tuple[ast.expr, Scope]]:
        if called in scope.known:
            return []
        known = scope.known | {called}
        return [
            (node.value, Scope(maker.file, maker.function, known))
            for maker in self.makers[called]
            for node in _own_nodes(maker.function)
            if isinstance(node, ast.Return)
            and node.value is not None
            and not _is_empty(node.value)
        ]

    def _assigned(self, name: str, scope: Scope) -> list[tuple[ast.expr, Scope]]:
        """What a function assigns to a name, or else its file, or a file of the package from which it is imported."""
        if name in scope.known:
            return []
        within = Scope(scope.file, scope.function, scope.known | {name})
        tree = self.trees[scope.file]
        values = list(_values_of(name, scope.function)) or list(
            _values_of(name, tree)
        )
        for node in () if values else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(
                name in (one.asname, one.name) for one in node.names
            ):
                source = (node.module or "").removeprefix(
                    "lightning_mfsdp."
                ).replace(".", "/") + ".py"
                if source in self.trees:
                    return [
                        (value, Scope(source, None, within.known))
                        for value in _values_of(name, self.trees[source])
                    ]
        return [(value, within) for value in values]


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[Function, str]]:
    """Functions at any depth, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        inner = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{node.name}" if within else node.name
            if not isinstance(node, ast.ClassDef):
                yield node, inner
        yield from _functions(node, inner)


def _makes_messages(function: Function) -> bool:
    """Whether what a function returns is a text or an error, and not something that a message is filled in with."""
    result = function.returns
    return isinstance(result, ast.Name) and (
        result.id == "str" or result.id.endswith(("Error", "Exception"))
    )


def _own_nodes(scope: ast.AST | None) -> Iterator[ast.AST]:
    """Everything inside a function or a file that no function inside it contains."""
    for node in ast.iter_child_nodes(scope) if scope is not None else ():
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _own_nodes(node)


def _called(node: ast.Call) -> str:
    return (
        node.func.id
        if isinstance(node.func, ast.Name)
        else getattr(node.func, "attr", "")
    )


def _category(node: ast.Call) -> str:
    """The class of a warning."""
    given = [
        word.value for word in node.keywords if word.arg == "category"
    ] or node.args[1:2]
    return (
        given[0].id if given and isinstance(given[0], ast.Name) else "UserWarning"
    )


def _values_of(name: str, scope: ast.AST | None) -> Iterator[ast.expr]:
    for node in _own_nodes(scope):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            and node.value is not None
        ):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target]
            )
            if any(
                isinstance(target, ast.Name) and target.id == name
                for target in targets
            ):
                yield node.value


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in ("", None)


def _once(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


@cache
def package_messages() -> tuple[Message, ...]:
    """All that calls of the package's functions may lead to."""
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return tuple(Finder(files).messages())


def section_of(file: str) -> str:
    """Raises KeyError for a file that no section is for."""
    titles = {
        path: title for title, (_, paths) in SECTIONS.items() for path in paths
    }
    parts = file.split("/")
    for length in range(len(parts), 0, -1):
        if (title := titles.get("/".join(parts[:length]))) is not None:
            return title
    raise KeyError(file)


@cache
def anchors(page: Path) -> dict[str, str]:
    """The headings of a page by their anchors; "" is its title."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#{2,} (.+)$", text, flags=re.MULTILINE)
    slugs = {
        re.sub(
            r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()
        ): heading
        for heading in headings
    }
    return {"": text.partition("\n")[0].removeprefix("# "), **slugs}


def link(target: str) -> str:
    """To a section of a page, by its heading. Raises KeyError if there is none."""
    page, _, anchor = target.partition("#")
    return f"[{anchors(DOCS / page)[anchor]}](../{target})"


def index(messages: Iterable[Message]) -> str:
    """The page."""
    lines = [INTRODUCTION]
    tables: dict[str, dict[str, Message]] = {title: {} for title in SECTIONS}
    for message in messages:
        if message.function not in INTERNAL:
            tables[section_of(message.file)].setdefault(message.text, message)
    for title, table in tables.items():
        lines += [
            "",
            f"## {title}",
            "",
            f"Read on: {link(SECTIONS[title][0])}.",
            "",
            "| message | class | more |",
            "|---|---|---|",
        ]
        for message in sorted(
            table.values(), key=lambda message: message.text.lstrip("…:( ").lower()
        ):
            more = dict.fromkeys(
                target
                for words, target in READ_MORE.items()
                if words in message.text
            )
            lines.append(
                f"| {code(message.text)} | `{message.kind}` | {', '.join(map(link, more))} |"
            )
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """A text as code in a cell of a table."""
    text = re.sub(r"…{2,}", "…", " ".join(text.split())).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(index(package_messages()))
