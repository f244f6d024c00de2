"""Safetensors in and out of a sharded model: every bit arrives, on any number of ranks, or an error says why and nothing changed."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.checkpoint import export_checkpoint, export_model, load_safetensors
from lightning_mfsdp.checkpoint.safetensors.files import FolderWriter
from lightning_mfsdp.engine import MixedPrecisionPolicy, ShardingError, fully_shard
from tests.checkpoint.safetensors_cases import (
    Awkward,
    halves,
    once,
    plain_state,
    rows_of,
    same,
    sharded_model,
    shared_folder,
    whole_state,
    write_folder,
)
from tests.engine.worlds import by_world, check
from tests.helpers.nights import NIGHT

LIMIT = 1500  # bytes in a file: some tensors fill several such, most fit in with others


def read_folder(folder: Path) -> dict[str, Tensor]:
    """By the safetensors package, after the index was compared with the files."""
    files = sorted(folder.glob("*.safetensors"))
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(load_file(file))
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if len(files) > 1:
        assert [file.name for file in files] == [
            f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
        ]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    return state


# -- there and back ----------------------------------------------------------------------------------------------------


def there_and_back(options: Callable[[], dict[str, Any]], rank: int, world: int) -> None:
    """Read a folder of another seed, and write the model: whole, in several files, and cast."""
    expected = plain_state(seed=1)
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "one", once(expected))
            write_folder(folder / "two", *halves(once(expected)))
        dist.barrier()
        for source in (folder / "one", folder / "two", folder / "one" / "model.safetensors"):
            model = sharded_model(seed=0, **options())
            assert not same(whole_state(model), expected)
            load_safetensors(model, source)
            assert same(whole_state(model), expected), source
        assert export_model(model, folder / "out") == [folder / "out" / "model.safetensors"]
        files = export_model(model, str(folder / "several"), max_shard_bytes=LIMIT)
        assert all(file.is_file() for file in files)
        export_model(model, folder / "small", dtype=torch.bfloat16)
        assert sorted(path.name for path in folder.iterdir()) == ["one", "out", "several", "small", "two"]
        if rank == 0:
            assert same(read_folder(folder / "out"), once(expected))
            assert same(read_folder(folder / "several"), once(expected))
            assert len(files) > 3
            for file in files:
                content = load_file(file)
                assert len(content) == 1 or sum(value.nbytes for value in content.values()) <= LIMIT
            cast = {name: value.bfloat16() if value.is_floating_point() else value for name, value in expected.items()}
            assert same(read_folder(folder / "small"), once(cast))


def mesh(outer: int, shard: int) -> dict[str, Any]:
    axes = init_device_mesh("cpu", (outer, shard), mesh_dim_names=("outer", "shard"))
    return {"mesh": axes, "outer_sharding": "optim"}


def bf16_files_become_float32_main_weights(rank: int, world: int) -> None:
    state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in plain_state(1).items()}
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "in", once(state))
        dist.barrier()
        model = sharded_model(seed=0, policy=policy)
        load_safetensors(model, folder / "in")
        expected = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
        assert same(whole_state(model), expected)
        reference = Awkward().bfloat16()
        reference.load_state_dict(state)
        ids = torch.arange(10).view(2, 5)
        assert torch.equal(model(ids), reference(ids)), "compute weights are up to date"


def a_part_of_a_model_whose_parameters_belong_to_the_root(rank: int, world: int) -> None:
    """As `self.model` of a LightningModule, with nothing of it in a unit of its own."""
    expected = plain_state(seed=1)
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "in", once(expected))
        dist.barrier()
        torch.manual_seed(0)
        root = nn.Sequential(OrderedDict(model=Awkward(), other=nn.Linear(3, 3)))
        other = root.other.weight.detach().clone()
        fully_shard(root)
        load_safetensors(root.model, folder / "in")
        assert same(whole_state(root.model), expected)
        assert torch.equal(root.other.weight.full_tensor(), other)
        export_model(root.model, folder / "part")
        with pytest.raises((ValueError, RuntimeError), match=r"other\.weight, other\.bias \(of 2\) do not begin with"):
            export_model(root, folder / "refused", prefix="model.")
        del root.other
        export_model(root, folder / "prefixed", prefix="model.")
        if rank == 0:
            assert same(read_folder(folder / "part"), once(expected))
            assert same(read_folder(folder / "prefixed"), once(expected))


def main_weights_are_exported_while_full_ones_are_shown(rank: int, world: int) -> None:
    """Weights that stay gathered are in the module's tables, in the dtype of compute."""
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    model = sharded_model(seed=1, policy=policy, reshard_after_forward=False)
    expected = whole_state(model)
    model(torch.arange(10).view(2, 5))
    with shared_folder(rank) as folder:
        export_model(model.blocks, folder / "blocks")
        if rank == 0:
            theirs = {
                name.removeprefix("blocks."): value for name, value in expected.items() if name.startswith("blocks.")
            }
            assert same(read_folder(folder / "blocks"), theirs)


def progress_counts_bytes(rank: int, world: int) -> None:
    model = sharded_model(seed=1)
    with shared_folder(rank) as folder:
        written: list[tuple[int, int]] = []
        export_model(model, folder / "out", progress=lambda done, total: written.append((done, total)))
        read: list[tuple[int, int]] = []
        load_safetensors(model, folder / "out", progress=lambda done, total: read.append((done, total)))
    whole = sum(value.nbytes for value in once(plain_state()).values())
    own = sum(value.nbytes for value in rows_of(model).values())
    assert read[-1] == (own, own), "each rank reads its rows and the buffers"
    assert own < whole
    assert written[-1:] == ([(whole, whole)] if rank == 0 else [])
    for calls in (written, read):
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# -- names -------------------------------------------------------------------------------------------------------------


def names_are_translated_or_left_out(rank: int, world: int) -> None:
    expected = plain_state(seed=1)
    theirs = {f"base.{name}": value for name, value in once(expected).items()} | {"mask": torch.zeros(3)}
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "in", theirs)
        dist.barrier()
        model = sharded_model(seed=0)
        before = rows_of(model)
        load_safetensors(
            model, folder / "in", rename=lambda name: None if name == "mask" else name.removeprefix("base.")
        )
        assert same(whole_state(model), expected)
        assert not same(rows_of(model), before)
        with pytest.raises(ValueError, match=r"rename turns base\.\S+ and \S+ into the same name, x"):
            load_safetensors(model, folder / "in", rename=lambda name: "x")


def what_fits_is_loaded_when_not_strict(rank: int, world: int) -> None:
    expected, old = plain_state(seed=1), plain_state(seed=0)
    state = {name: value for name, value in once(expected).items() if name not in ("tiny", "shift")}
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "in", state | {"mask": torch.zeros(3)})
        dist.barrier()
        model = sharded_model(seed=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_safetensors(model, folder / "in", strict=False)
        said = [str(warning.message) for warning in caught]
        assert len(said) == (rank == 0)
        assert all("these keep their present values: tiny" in text for text in said)
        assert same(whole_state(model), expected | {"tiny": old["tiny"], "shift": old["shift"]})


def both_names_of_a_tied_weight_must_agree(rank: int, world: int) -> None:
    expected = plain_state(seed=1)
    second = {"head.weight": expected["embedding.weight"].clone()}
    with shared_folder(rank) as folder:
        if rank == 0:
            write_folder(folder / "in", once(expected), second)
            second["head.weight"][-1, -1] += 1
            write_folder(folder / "other", once(expected), second)
            write_folder(folder / "head", {n: v for n, v in expected.items() if n != "embedding.weight"})
        dist.barrier()
        for source in ("in", "head"):
            model = sharded_model(seed=0)
            load_safetensors(model, folder / source)
            assert same(whole_state(model), expected), source
        model = sharded_model(seed=0)
        before = rows_of(model)
        with pytest.raises(
            RuntimeError, match=r"different values for (embedding|head)\.weight and (embedding|head)\.weight"
        ):
            load_safetensors(model, folder / "other")  # the last row differs: one rank sees it, all refuse
        assert same(rows_of(model), before)
        untied = sharded_model(seed=0, tied=False)
        load_safetensors(untied, folder / "other")
        assert not torch.equal(untied.head.weight.full_tensor(), untied.embedding.weight.full_tensor())


# -- refusals ----------------------------------------------------------------------------------------------------------


def what_does_not_fit_is_listed_and_nothing_changes(rank: int, world: int) -> None:
    good = once(plain_state(seed=1))
    variants: dict[str, tuple[dict[str, Tensor], str]] = {
        "missing": (
            {name: value for name, value in good.items() if name not in ("tiny", "norm.bias")},
            r"missing in the checkpoint: tiny\n.*missing in the checkpoint: norm\.bias\n.*rename=",
        ),
        "extra": (good | {"mask": torch.zeros(3)}, r"missing in the model: mask\n.*strict=False"),
        "shape": (good | {"tiny": torch.zeros(2, 12)}, r"shape of tiny: \(2, 12\) in the checkpoint, \(1, 12\) in"),
        "packed": (
            good | {"norm.bias": torch.zeros(10, dtype=torch.int8)},
            r"norm\.bias is torch\.int8 in the files and torch\.float32 in the model",
        ),
    }
    with shared_folder(rank) as folder:
        if rank == 0:
            for name, (state, _) in variants.items():
                write_folder(folder / name, state)
        dist.barrier()
        model = sharded_model(seed=0)
        before = rows_of(model)
        for name, (_, message) in variants.items():
            with pytest.raises(RuntimeError, match=f"(?s){message}"):
                load_safetensors(model, folder / name)
            assert same(rows_of(model), before), name


def damaged_folders_are_refused_and_nothing_changes(rank: int, world: int) -> None:
    parts = halves(once(plain_state(seed=1)))
    second = "model-00002-of-00002.safetensors"
    index = "model.safetensors.index.json"

    def cut(path: Path) -> None:
        (path / second).write_bytes((path / second).read_bytes()[:-8])

    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "cut": (cut, f"{second} cannot be read as safetensors"),
        "noise": (lambda path: (path / second).write_bytes(b"not at all"), f"{second} cannot be read as safetensors"),
        "gone": (lambda path: (path / second).unlink(), f"{second} is missing"),
        "swapped": (
            lambda path: save_file(parts[0], path / second),
            r"of \d+\), which it should contain according to the index",
        ),
        "index": (lambda path: (path / index).write_text("{}"), "is no index of safetensors files .*weight_map"),
        "no index": (lambda path: (path / index).unlink(), "found 2 safetensors files and 0 indices in it"),
        "nothing": (shutil.rmtree, "found nothing there"),
    }
    with shared_folder(rank) as folder:
        if rank == 0:
            for name, (damage, _) in damages.items():
                damage(write_folder(folder / name, *parts))
            write_folder(folder / "good", *parts)
        dist.barrier()
        model = sharded_model(seed=0)
        before = rows_of(model)
        for name, (_, message) in damages.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                load_safetensors(model, folder / name)
        if world > 1:  # the others see a good folder
            source = folder / ("gone" if rank == world - 1 else "good")
            message = (
                "is missing"
                if rank == world - 1
                else f"rank {world - 1} failed, so all do: RuntimeError: .* is missing"
            )
            with pytest.raises(RuntimeError, match=message):
                load_safetensors(model, source)
        assert same(rows_of(model), before)
        load_safetensors(model, folder / "good")
        assert same(whole_state(model), plain_state(seed=1)), "all ranks are in step afterwards"


def exports_take_no_foreign_folder_and_fail_on_all_ranks(rank: int, world: int) -> None:
    model = sharded_model(seed=1)

    def refused(kind: type[Exception], message: str, target: Path, of: nn.Module = model, **options: Any) -> None:
        with pytest.raises(kind if rank == 0 else (RuntimeError, kind), match=message):
            export_model(of, target, **options)

    with shared_folder(rank) as folder:
        if rank == 0:
            (folder / "mine").mkdir()
            (folder / "mine" / "tokenizer.json").write_text("{}")
            (folder / "file").write_text("")
        dist.barrier()
        refused(IsADirectoryError, r"holds tokenizer\.json \(of 1\), which no export wrote", folder / "mine")
        refused(NotADirectoryError, "a file is there; expected a folder", folder / "file")
        export_model(model, folder / "out", max_shard_bytes=LIMIT)

        add = FolderWriter.add
        calls = []

        def disk_full(self: FolderWriter, tensor: Tensor) -> None:
            calls.append(tensor)
            if len(calls) == 5:
                raise OSError("disk full")
            add(self, tensor)

        with mock.patch.object(FolderWriter, "add", disk_full):
            refused(OSError, "disk full", folder / "out", max_shard_bytes=LIMIT)
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == ["file", "mine", "out"]
        if rank == 0:
            assert same(read_folder(folder / "out"), once(plain_state(seed=1))), "the old one is whole"
        dist.barrier()
        export_model(model, folder / "out")
        if rank == 0:
            assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"], "and then replaced"

        class WithExtra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"scale": 1}

        extra = fully_shard(WithExtra(2, 2))
        refused(ValueError, r"safetensors cannot hold _extra_state \(no tensor\)", folder / "extra", extra)
        refused(ValueError, r'prefix=.model.: expected "" or the beginning', folder / "x", prefix="model")
        refused(ValueError, "dtype=torch.int8: expected a floating-point dtype", folder / "x", dtype=torch.int8)
        refused(ValueError, "max_shard_bytes=0: expected a positive", folder / "x", max_shard_bytes=0)


def a_model_that_peft_has_wrapped_is_not_exported_under_names_that_nothing_reads(rank: int, world: int) -> None:
    class Layer(nn.Module):  # named as peft names its layers
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(2, 2)

    inner = nn.Sequential(OrderedDict(inner=Layer()))
    wrapped = nn.Sequential(OrderedDict(base_model=nn.Sequential(OrderedDict(model=inner))))
    fully_shard(wrapped)
    with shared_folder(rank) as folder:
        message = r"base_layer\.weight belongs to a model that peft has wrapped.*full_state_dict\(model\) on all ranks"
        with pytest.raises((ValueError, RuntimeError), match=message):
            export_model(wrapped, folder / "out")


def only_rank_zero_exports_a_checkpoint(rank: int, world: int) -> None:
    with shared_folder(rank) as folder:
        expected = (
            ("there is nothing at that path", ValueError)
            if rank == 0
            else ("rank 1 called it.*call it on rank 0", RuntimeError)
        )
        with pytest.raises(expected[1], match=expected[0]):
            export_checkpoint(folder / "none", folder / "out")


def a_module_that_is_not_sharded_yet_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ShardingError, match="Linear has no sharded parameters; call it in on_fit_start"):
        load_safetensors(nn.Linear(2, 2), "anywhere")


def without_the_package_the_error_names_the_extra(rank: int, world: int) -> None:
    model = sharded_model(seed=1)
    with shared_folder(rank) as folder:
        export_model(model, folder / "out")  # writing needs none
        with mock.patch.dict("sys.modules", {"safetensors": None}), pytest.raises(ImportError, match=r"mfsdp\[hf\]"):
            load_safetensors(model, folder / "out")


def case(name: str, options: Callable[[], dict[str, Any]]) -> Any:
    made: Any = partial(there_and_back, options)
    made.__name__ = name
    return made


STRATEGIES = {name: case(name, partial(dict, sharding=name)) for name in ("optim_grads_params", "optim", "no_shard")}
ON_A_PUSH = {
    1: [damaged_folders_are_refused_and_nothing_changes],
    2: [
        *STRATEGIES.values(),
        bf16_files_become_float32_main_weights,
        a_part_of_a_model_whose_parameters_belong_to_the_root,
        main_weights_are_exported_while_full_ones_are_shown,
        progress_counts_bytes,
        names_are_translated_or_left_out,
        what_fits_is_loaded_when_not_strict,
        both_names_of_a_tied_weight_must_agree,
        what_does_not_fit_is_listed_and_nothing_changes,
        damaged_folders_are_refused_and_nothing_changes,
        exports_take_no_foreign_folder_and_fail_on_all_ranks,
        a_model_that_peft_has_wrapped_is_not_exported_under_names_that_nothing_reads,
        only_rank_zero_exports_a_checkpoint,
        a_module_that_is_not_sharded_yet_is_refused,
        without_the_package_the_error_names_the_extra,
    ],
    4: [case("hybrid", partial(mesh, 2, 2)), progress_counts_bytes],
}


WORLDS = {
    world: [*cases, *([STRATEGIES["optim_grads_params"]] if NIGHT and world != 2 else [])]
    for world, cases in ON_A_PUSH.items()
}


@by_world(WORLDS)
def test_safetensors(world: Any, case: Any) -> None:
    check(WORLDS, world, case)
