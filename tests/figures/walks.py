"""Three walks through the code, counted: `python tests/figures/walks.py [parameter] [fit] [experts]` (docs/design/walks.md).

    parameter   a chain of four blocks under a root (tests/figures/subjects.py) is sharded over a fake process group of two ranks, and
                trained for three steps; sharding, the first step and the third are watched
    fit         a Trainer fits a small LightningModule for one step on two gloo processes, and saves a checkpoint; rank 0 is watched,
                from the Trainer's construction to the end of `fit`
    experts     a layer of eight experts on four gloo processes, divided among two and sharded over two; rank 0 is watched, the layer's
                preparation, and its forward and backward in the third step

What is counted, and how, is in `walked.py`. Each program runs in a process of its own. `--peers FOLDER` adds libraries that are unpacked
there: `megatron_fsdp`, `megatron` (Megatron-Core) and `torchtitan`, without a GPU (`walk_peers.py`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.figures.walked import COLUMNS, Figures, Folders, Walk, Watch

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).resolve().parents[1]
OURS = {"lightning_mfsdp": ROOT / "lightning_mfsdp"}
FSDP2 = {"_fully_shard": SITE / "torch/distributed/fsdp/_fully_shard"}
MARK = "walked: "
WALKS = ("parameter", "fit", "experts")


class Watching:
    """What a program is given: `with watching("step"):` is a span of the walk.

    Attributes:
        folders: Of the library ("all"), then of what it stands on, by what each adds to the name of the figures.
        spans: By name.
    """

    def __init__(self, folders: Mapping[str, Folders]) -> None:
        self.folders = folders
        self.spans: dict[str, Walk] = {}

    @contextmanager
    def __call__(self, span: str) -> Iterator[None]:
        with Watch([path for some in self.folders.values() for path in some.values()]) as walk:
            yield
        self.spans[span] = walk

    def figures(self) -> dict[str, Figures]:
        """Of the library, span by span and as a whole, and of the library with one after the other of what it stands on."""
        whole, library = Walk(), next(iter(self.folders.values()))
        for walk in self.spans.values():
            whole |= walk
        found = {span: walk.figures(library) for span, walk in self.spans.items()}
        together: dict[str, Path] = {}
        for name, some in self.folders.items():
            together.update(some)
            found[name] = whole.figures(together)
        return found


def import_all(package: str) -> None:
    """Modules that a program would import on its way."""
    module = importlib.import_module(package)
    for one in pkgutil.walk_packages(module.__path__, f"{package}."):
        if not one.name.endswith("__main__"):
            try:
                importlib.import_module(one.name)
            except ImportError:  # of a library that is not here
                continue


# -- a parameter -------------------------------------------------------------------------------------------------------


def of_a_parameter(build: Callable[[int], Any], watching: Watching) -> None:
    """Shard a chain, train it for three steps."""

    from tests.figures.subjects import batch

    dist.init_process_group("fake", rank=0, world_size=2)
    x = batch()
    with watching("sharding"):
        subject = build(4)
    with watching("first step"):
        subject.step(x)
    subject.step(x)
    with watching("third step"):
        subject.step(x)


def parameter_ours(watching: Watching) -> None:
    from tests.figures.subjects import Package

    import_all("lightning_mfsdp")
    of_a_parameter(Package(ROOT).subject, watching)


def parameter_fsdp2(watching: Watching) -> None:
    from tests.figures.subjects import fsdp2

    of_a_parameter(fsdp2, watching)


# -- a fit -------------------------------------------------------------------------------------------------------------


def of_a_fit(watching: Watching, *, strategy: Callable[[], Any], shard: Callable[[nn.Module], None] | None) -> None:
    """One step of a Trainer and a checkpoint. The Trainer starts this program again for the other rank."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from tests.figures.subjects import chain

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain(4)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.chain(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class ShardedModule(Module):
        def configure_model(self) -> None:
            assert shard is not None
            for block in self.chain.blocks:
                shard(block)
            shard(self.chain)

    seed_everything(0, verbose=False)
    data: Any = DataLoader(torch.randn(8, 8), batch_size=4)  # type: ignore[arg-type]
    module = Module() if shard is None else ShardedModule()
    with tempfile.TemporaryDirectory() as folder, watching("fit"):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy(),
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1)],
        )
        trainer.fit(module, data)


def fit_ours(watching: Watching) -> None:
    import_all("lightning_mfsdp")
    of_a_fit(watching, strategy=lambda: "mfsdp", shard=None)


def fit_fsdp2(watching: Watching) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module) -> None:
        fully_shard(module)

    of_a_fit(
        watching, strategy=lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), shard=shard
    )


# -- a batch of experts ------------------------------------------------------------------------------------------------

DIM, EXPERTS, TOP_K, WIDTH = 8, 8, 2, 16


def of_experts(layer: nn.Module, watching: Watching) -> None:
    """The third of three batches of tokens, of shape [B, S, D], goes through a layer and back."""
    for step in range(3):
        generator = torch.Generator().manual_seed(4 * step + dist.get_rank())
        x = torch.randn(2, 8, DIM, generator=generator, requires_grad=True)
        with watching("forward") if step == 2 else nullcontext():
            result = layer(x)
        loss = result.square().mean()
        with watching("backward") if step == 2 else nullcontext():
            loss.backward()


def experts_ours(watching: Watching, dispatcher: Literal["all_gather", "all_to_all"] = "all_gather") -> None:
    """As examples/moe.py does it, without balancing."""
    from lightning_mfsdp import fully_shard
    from lightning_mfsdp.moe import GroupedExperts, TopKRouter, expert_parallel

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = TopKRouter(hidden_size=DIM, num_experts=EXPERTS, top_k=TOP_K, balancing=None)
            self.experts = GroupedExperts(num_experts=EXPERTS, hidden_size=DIM, intermediate_size=WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            routes = self.router(tokens)
            result: Tensor = self.experts(tokens, routes.expert_index, routes.probabilities)
            return result.view_as(x)

    import_all("lightning_mfsdp")
    dense, expert = meshes("shard", "expert")
    layer = Layer()
    expert_parallel(layer.experts, expert, dispatcher=dispatcher)
    fully_shard(layer.experts, expert)
    fully_shard(layer, dense)
    of_experts(layer, watching)


def experts_mixtral(watching: Watching) -> None:
    """A layer of transformers' Mixtral under FSDP2, which does not divide experts: all ranks gather them whole."""
    from torch.distributed.fsdp import fully_shard
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=DIM, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "grouped_mm"
    layer = MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call]
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    fully_shard(layer.experts)
    fully_shard(layer)
    of_experts(layer, watching)


def meshes(shard: str, expert: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Of four ranks in a row, and in two rows: experts differ along the second axis, and are sharded over the first."""
    return (
        init_device_mesh("cpu", (4,), mesh_dim_names=(shard,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=(shard, expert)),
    )


# -- what is watched ---------------------------------------------------------------------------------------------------

LIGHTNING = {
    "pytorch/strategies": SITE / "lightning/pytorch/strategies",
    "fabric/strategies": SITE / "lightning/fabric/strategies",
    "pytorch/plugins": SITE / "lightning/pytorch/plugins",
    "fabric/plugins": SITE / "lightning/fabric/plugins",
}
PEERS_STRATEGY = {
    "pytorch/strategies/model_parallel": SITE / "lightning/pytorch/strategies/model_parallel.py",
    "fabric/strategies/model_parallel": SITE / "lightning/fabric/strategies/model_parallel.py",
}
BELOW = {"with DTensor": {"torch/distributed/tensor": SITE / "torch/distributed/tensor"}}
BELOW_FIT = {
    "with Lightning's strategies": LIGHTNING,
    "with torch.distributed.checkpoint": {"torch/distributed/checkpoint": SITE / "torch/distributed/checkpoint"},
    **BELOW,
}
MOE = {"lightning_mfsdp/moe": ROOT / "lightning_mfsdp/moe"}
MIXTRAL = {
    f"transformers/{one}": SITE / "transformers" / f"{one}.py"
    for one in ("models/mixtral/modeling_mixtral", "integrations/moe")
}


@dataclass(frozen=True)
class Column:
    """A program and what it walks through.

    Args:
        program: Is run on `ranks` processes of which the first is watched; one that brings its own process group says 1.
        peers: What must be in the folder of `--peers`.
    """

    program: Callable[[Watching], None]
    folders: Mapping[str, Folders]
    ranks: int = 1
    peers: tuple[str, ...] = ()


def columns(walk: str, peers: Path | None) -> dict[str, Column]:
    """Those that can be run."""
    from tests.figures import walk_peers

    at = peers or Path()
    inside = ("transformer", "tensor_parallel", "typed_torch.py", "utils.py", "parallel_state.py")
    megatron_core = [f"megatron/core/{one}" for one in inside]
    megatron = {"megatron_fsdp": at / "megatron_fsdp"}
    every: dict[str, dict[str, Column]] = {
        "parameter": {
            "ours": Column(parameter_ours, {"all": OURS, **BELOW}),
            "FSDP2": Column(parameter_fsdp2, {"all": FSDP2, **BELOW}),
            "Megatron-FSDP v2": Column(walk_peers.parameter_v2, {"all": megatron, **BELOW}, peers=("megatron_fsdp",)),
            "Megatron-FSDP v1": Column(walk_peers.parameter_v1, {"all": megatron, **BELOW}, peers=("megatron_fsdp",)),
        },
        "fit": {
            "ours": Column(fit_ours, {"all": OURS, **BELOW_FIT}),
            "FSDP2": Column(fit_fsdp2, {"all": {**PEERS_STRATEGY, **FSDP2}, **BELOW_FIT}),
            "Megatron-FSDP v1": Column(walk_peers.loop_v1, {"all": megatron, **BELOW_FIT}, 2, ("megatron_fsdp",)),
        },
        "experts": {
            "ours": Column(experts_ours, {"all": MOE, "with the engine": OURS, **BELOW}, 4),
            "ours, all_to_all": Column(
                partial(experts_ours, dispatcher="all_to_all"), {"all": MOE, "with the engine": OURS, **BELOW}, 4
            ),
            "FSDP2, transformers": Column(experts_mixtral, {"all": MIXTRAL, "with the engine": FSDP2, **BELOW}, 4),
            "FSDP2, torchtitan": Column(
                walk_peers.experts_torchtitan,
                {"all": {"torchtitan": at / "torchtitan"}, "with the engine": FSDP2, **BELOW},
                4,
                ("torchtitan",),
            ),
            "Megatron-FSDP v1, Megatron-Core": Column(
                walk_peers.experts_megatron,
                {
                    "all": {one: at / one for one in megatron_core},
                    "with the engine": {"megatron/core/distributed": at / "megatron/core/distributed"},
                    **BELOW,
                },
                4,
                ("megatron",),
            ),
        },
    }
    return {name: column for name, column in every[walk].items() if all((at / one).is_dir() for one in column.peers)}


# -- the report --------------------------------------------------------------------------------------------------------


def run(walk: str, column: str, peers: Path | None, ranks: int) -> dict[str, Figures]:
    """In processes of its own; they meet in a file."""
    command = [sys.executable, "-W", "ignore", __file__, "--inside", walk, column]
    if peers is not None:
        command += ["--peers", str(peers)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WALK_MEETING": f"file://{folder}/meeting"}
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "WALK_RANK": str(rank), "WALK_RANKS": str(ranks)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"Error: the walk {walk} of {column} failed:\n" + "\n".join(errors for _, errors in said))
    marked = [line for line in said[0][0].splitlines() if line.startswith(MARK)]
    return {span: Figures(**one) for span, one in json.loads(marked[-1].removeprefix(MARK)).items()}


def inside(walk: str, name: str, peers: Path | None) -> None:
    """What those processes do."""
    torch.set_num_threads(1)
    column = columns(walk, peers)[name]
    if peers is not None:
        sys.path.insert(0, str(peers))
    rank, ranks = int(os.environ["WALK_RANK"]), int(os.environ["WALK_RANKS"])
    if ranks > 1:
        dist.init_process_group("gloo", init_method=os.environ["WALK_MEETING"], rank=rank, world_size=ranks)
    watching = Watching(column.folders)
    column.program(watching)
    if rank == int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(MARK + json.dumps({span: asdict(one) for span, one in watching.figures().items()}), flush=True)
    if ranks > 1:
        dist.barrier()
    os._exit(0)  # threads that gloo winds down can abort the interpreter's own exit


def table(found: Mapping[str, Figures]) -> str:
    """Markdown: a column for each library, a row for each figure."""
    rows = [[f"{number:,}" for number in one.row] for one in found.values()]
    lines = [f"| | {' | '.join(found)} |", f"|---|{'--:|' * len(found)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in zip(COLUMNS, zip(*rows, strict=True), strict=True)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", help=f"{', '.join(WALKS)}; all if none is named")
    parser.add_argument(
        "--peers", type=lambda given: Path(given).absolute(), help="a folder with other libraries to walk through"
    )
    parser.add_argument(
        "--json", action="store_true", help="all that was counted, with files and functions in their order"
    )
    parser.add_argument("--inside", nargs=2, metavar=("WALK", "COLUMN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        walk, name = arguments.inside
        inside(walk, name, arguments.peers)
    found: dict[str, dict[str, dict[str, Figures]]] = {
        walk: {
            name: run(walk, name, arguments.peers, column.ranks)
            for name, column in columns(walk, arguments.peers).items()
        }
        for walk in arguments.walks or WALKS
    }
    if arguments.json:
        print(json.dumps(found, default=asdict))
        return
    for walk, spans_of in found.items():
        print(f"## {walk}")
        for span in dict.fromkeys(span for spans in spans_of.values() for span in spans):
            print(f"\n### {span}\n\n{table({name: spans[span] for name, spans in spans_of.items() if span in spans})}")
        for name, spans in spans_of.items():
            print(f"\n{name}: {', '.join(spans['all'].functions)}")
        print()
    print(f"Python {platform.python_version()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
