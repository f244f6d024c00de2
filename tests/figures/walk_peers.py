"""The walks of `walks.py` through libraries that ask for a GPU, taken without one: Megatron-FSDP, Megatron-Core, torchtitan.

Their Python runs as it is. What they find in the place of CUDA has no streams, events or ranges, "cuda" means the CPU, and Triton is a
name: torchtitan sorts tokens by its own CPU function. Transformer Engine and apex are not there. Calls of a library's own functions are
those of a GPU, but for kernels.

    pip download --no-deps megatron-fsdp==0.6.1 megatron-core==0.16.1 torchtitan==0.2.2 einops
    for wheel in *.whl; do unzip -qn $wheel -d peers; done
    python tests/figures/walks.py --peers peers
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tests.figures.walks import Watching

REAL_DEVICE = torch.device


class _Stream:
    """Of nothing: all work is done when it is asked for."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _DeviceKind(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, REAL_DEVICE)


class _Device(metaclass=_DeviceKind):
    """`torch.device`, but "cuda" is the CPU."""

    def __new__(cls, kind: Any = "cpu", *index: int) -> Any:
        on_a_gpu = isinstance(kind, int) or str(kind).startswith("cuda")
        return REAL_DEVICE("cpu") if on_a_gpu else REAL_DEVICE(kind, *index)


def _nowhere(*_: object, **__: object) -> Any:
    return nullcontext()


def without_cuda() -> None:
    """What code for CUDA finds on a machine without, from now on in this process."""
    stream = _Stream()
    found: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": _nowhere,
        "device": _nowhere,
        "current_device": lambda: REAL_DEVICE("cpu"),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in found.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.device = _Device  # type: ignore[assignment,misc]
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))


def _on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A constructor of tensors that takes a GPU's number or name for the CPU's."""

    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Tensor:
        if options.get("device") is not None:
            options["device"] = _Device(options["device"])
        return make(*arguments, **options)

    return made


# -- a parameter -------------------------------------------------------------------------------------------------------


def megatron_v2(blocks: int) -> Any:
    """The chain of tests/figures/subjects.py under `megatron_fsdp.experimental`."""
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    from tests.figures.subjects import Subject, chain

    model = chain(blocks)
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        "placements": Placements(dp_axes=["dp"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()]),
        "mixed_precision_policy": MixedPrecisionPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard_optimizer(optimizer)
    return Subject(model, optimizer)


def megatron_v1(blocks: int, **options: Any) -> Any:
    """The chain under `megatron_fsdp.fully_shard`."""
    from megatron_fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    from tests.figures.subjects import Block, Subject, chain

    model = chain(blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp"))
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        **options,
    )
    return Subject(model, optimizer)


def _parameter(build: Callable[[int], Any], watching: Watching) -> None:
    from tests.figures.walks import of_a_parameter

    _megatron_fsdp()
    of_a_parameter(build, watching)


def _megatron_fsdp() -> None:
    """Import it by itself, as its wheel is: it takes parts of Megatron-Core where that is there."""
    from tests.figures.walks import import_all

    without_cuda()
    sys.modules["megatron"] = None  # type: ignore[assignment]
    import_all("megatron_fsdp")


def parameter_v2(watching: Watching) -> None:
    _parameter(megatron_v2, watching)


def parameter_v1(watching: Watching) -> None:
    _parameter(megatron_v1, watching)


# -- a loop ------------------------------------------------------------------------------------------------------------


def loop_v1(watching: Watching) -> None:
    """There is no Lightning strategy for Megatron-FSDP: what a Trainer does is written out."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from tests.figures.subjects import batch

    _megatron_fsdp()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    x = batch()
    with watching("fit"):
        subject = megatron_v1(4, calculate_per_token_loss=True)  # gloo has no scaled sums
        subject.step(x)
        state = {"model": subject.model.state_dict(), "optimizer": subject.optimizer.state_dict()}
        save(state, checkpoint_id=folder[0])
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


# -- a batch of experts ------------------------------------------------------------------------------------------------


def experts_torchtitan(watching: Watching) -> None:
    """torchtitan's layer: its ExpertParallel along one axis, FSDP2 along the other, as its `apply_fsdp` does."""
    import torch._dynamo  # looks for Triton when it is imported
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.figures.walks import DIM, EXPERTS, TOP_K, WIDTH, meshes, of_experts

    triton: Any = types.ModuleType("triton")
    triton.language = types.ModuleType("triton.language")
    triton.language.constexpr = int
    triton.jit = lambda kernel: kernel
    sys.modules.update({"triton": triton, "triton.language": triton.language})
    for name in ("", ".models", ".distributed"):  # without what these packages import for training
        package = types.ModuleType(f"torchtitan{name}")
        package.__path__ = [str(Path(at, "torchtitan", name[1:])) for at in sys.path]
        sys.modules[package.__name__] = package
    annotations: Any = types.ModuleType("annotations")
    annotations.BaseModelArgs = annotations.StateDictAdapter = object
    names = ("torchtitan.protocols", "torchtitan.protocols.model", "torchtitan.protocols.state_dict_adapter")
    sys.modules.update(dict.fromkeys(names, annotations))
    from torchtitan.distributed.expert_parallel import ExpertParallel
    from torchtitan.models.moe import MoE, MoEArgs, kernels, utils

    histogram = torch.histc
    torch.histc = lambda x, *it, **how: histogram(x.float(), *it, **how).to(x.dtype)  # CPUs count no integers
    utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
    arguments = MoEArgs(num_experts=EXPERTS, num_shared_experts=0, score_func="softmax", top_k=TOP_K)
    arguments.load_balance_coeff = None
    layer = MoE(arguments, DIM, WIDTH)
    with torch.no_grad():
        layer.init_weights(0.02, torch.device("cpu"))
    dense, expert = meshes("efsdp", "ep")
    parallelize_module(layer.experts, expert["ep"], ExpertParallel())
    fully_shard(layer.experts, mesh=expert["efsdp"])
    fully_shard(layer, mesh=dense)
    of_experts(layer, watching)


def experts_megatron(watching: Watching) -> None:
    """Megatron-Core's layer with local experts, by its default dispatcher, under Megatron-Core's adapter of Megatron-FSDP."""
    import torch.nn.functional as F

    from tests.figures.walks import DIM, EXPERTS, TOP_K, WIDTH, of_experts

    without_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class Mesh(torch.distributed.device_mesh.DeviceMesh):
        @classmethod
        def from_group(cls, *arguments: Any, **options: Any) -> Any:
            return torch.distributed.device_mesh.DeviceMesh.from_group(*arguments, **{**options, "device_type": "cpu"})

    class Layer(torch.nn.Module):
        """Without the bias."""

        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)[0]

    real = token_dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Sizes that are on the CPU already become NumPy's all the same."""
        result = real(tensor, as_numpy, record_stream)
        return result.numpy() if as_numpy and isinstance(result, Tensor) else result

    token_dispatcher.maybe_move_tensor_to_cpu = moved
    adapter.DeviceMesh = Mesh
    moe_utils.te_general_gemm = None  # a name that is read where Transformer Engine is not there
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=DIM,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=WIDTH,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=2,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,  # gloo has no scaled sums
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = adapter.FullyShardedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        Layer(MoELayer(config, spec.submodules)),
        fsdp_unit_modules=[MoELayer],
        device=torch.device("cpu"),
    )
    of_experts(layer, watching)
