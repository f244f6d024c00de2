"""The options of the strategies, each stated once: its name, type and default, and below them what it does.

`python docs/options.py` writes from here the signatures and docstrings of both strategies and the tables of docs/reference/options.md;
it says what the labeled lines stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp.engine import MixedPrecisionPolicy
from lightning_mfsdp.options.unit_selection import UnitsArgument
from lightning_mfsdp.recompute import Recompute

__all__ = ["DeclaredOptions", "DeclaredTrainerOptions"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeclaredOptions:
    """The options of both strategies. The text is that of `MFSDPStrategy`; Fabric's refers to it, or has its own."""

    sharding: str | int | Mapping[str, str | int] = "optim_grads_params"
    """What is sharded on the shard axis: "no_shard", "optim", "optim_grads", "optim_grads_params", or 0 to 3. Or patterns of module names
    with one of these each, such as {"*.experts": "optim", "*": "optim_grads_params"}: the first counts that matches a module or one around
    it.

    Section: What is sharded
    Values: `"no_shard"`, `"optim"`, `"optim_grads"`, `"optim_grads_params"`, 0 to 3; patterns of module names
        with one each
    Change it: if less sharding fits in memory too: it communicates less
    More: [strategies](../strategies.md), [other parts, other strategies](../strategies.md#other-parts-other-strategies)
    """

    outer_sharding: str | int = "no_shard"
    """On the outer axis: "no_shard" (HSDP) or "optim" (HFSDP).

    Section: What is sharded
    Values: `"no_shard"` (HSDP), `"optim"` (HFSDP)
    Change it: if the model does not fit with HSDP, to `"optim"`
    More: [two axes](../strategies.md#two-axes-hsdp-and-hfsdp)
    """

    policy: MixedPrecisionPolicy | None = None
    """Dtypes of weights, gradients and communication. `None`: what `Trainer(precision=...)` stands for. If given, it replaces that, and may
    not contradict it in what is computed.

    Section: Precision
    Values: a `MixedPrecisionPolicy`; `None`: that of `Trainer(precision=...)`
    Change it: for other dtypes than the string's, such as gradients sent in bfloat16
    More: [your own policy](../precision.md#your-own-policy)
    """

    units: UnitsArgument = "auto"
    """ "auto", a list of module classes or class names, or a callable: which modules are gathered as one. See `select_units`.

    Section: What is sharded
    Values: `"auto"`, class names, classes, a function of a module
    Change it: if the table of units at the start of a fit does not show your blocks
    More: [units](../quickstart.md#your-lightningmodule)
    """

    blocks_per_unit: int | Literal["auto"] = "auto"
    """How many neighboring blocks are gathered as one. "auto": small ones together, if `units` is "auto".

    Section: What is sharded
    Values: `"auto"`, a positive number
    Change it: to 1 to save memory; to a larger number if units are so small that the host limits the speed
    More: [several blocks per unit](../performance.md#several-blocks-per-unit)
    """

    data: int | Literal["auto"] = "auto"
    """Ranks along the data axis, over which the model is sharded. "auto": all that the other axes leave.

    Section: What is sharded
    Values: `"auto"`: what the other axes leave; a number of ranks
    Change it: never, unless a wrong number of processes should be an error
    More: [mesh](../mesh.md)
    """

    outer: int = 1
    """Ranks along the outer axis: groups that each hold the whole model, such as nodes. Neighboring ranks share the data axis.

    Section: What is sharded
    Values: a divisor of the number of ranks
    Change it: on several nodes whose links are slower than those inside a node: the number of nodes
    More: [mesh](../mesh.md)
    """

    outer_size: int = 1
    """The same as `outer`.

    Section: What is sharded
    Values: another name of `outer`
    Change it: never: use `outer`
    More: [mesh](../mesh.md)
    """

    context: int = 1
    """Ranks along the context axis, which divide every sequence of a batch among themselves: activations take 1 / context of the memory.
    The model is sharded over them as well. Attention of models of transformers sees whole sequences; attention of your own uses
    `lightning_mfsdp.context_parallel.context_attention`. Losses that models compute from labels are means over all tokens.

    Fabric: As in `MFSDPStrategy`; `divided` divides the batches of your loop.
    Section: What is sharded
    Values: a number of ranks
    Change it: if one sequence's activations do not fit on a device
    More: [a context axis](../long_context.md#a-context-axis)
    """

    context_method: Literal["auto", "ulysses", "gather"] = "auto"
    """How attention sees whole sequences. "ulysses": some heads on each rank, after an all-to-all; any attention kernel. "gather": keys and
    values are gathered; any number of heads. "auto": "ulysses" if the model's heads can be divided.

    Section: What is sharded
    Change it: to `"gather"` with many context ranks and few key and value heads
    More: [a context axis](../long_context.md#a-context-axis)
    """

    context_dims: Mapping[str, int | None] | None = None
    """Sequence dim of entries of a batch, by key or, in a tuple, by position as a string; `None` for one that stays whole. Those that
    batches for transformers have are known.

    Section: What is sharded
    Values: a mapping from entries of a batch to their sequence dim, or to `None` for a whole one; `None`: known names only
    Change it: if a batch has entries along the sequence with names of your own
    More: [a context axis](../long_context.md#a-context-axis)
    """

    tensor: int = 1
    """Ranks along the tensor axis, which divide the weights of each layer among themselves and compute every batch together. What is
    divided says the plan of a model of transformers, `tensor_plan`, or the layers themselves (Megatron's, Transformer Engine's, those given
    to parallelize_module).

    Section: What is sharded
    Values: a number of ranks of one node
    Change it: if the weights of one layer, or activations within a layer, do not fit, or a batch has fewer sequences than there are ranks
    More: [a tensor axis](../tensor_parallelism.md)
    """

    tensor_plan: Mapping[str, str] | None = None
    """Names of modules or parameters to names of styles, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; see
    `lightning_mfsdp.tensor_parallel`. `None`: the own plans of models of transformers.

    Section: What is sharded
    Values: a mapping of names to styles; `None`: the own plans of transformers models
    Change it: if the model has no plan of its own
    More: [a plan of your own](../tensor_parallelism.md#a-plan-of-your-own)
    """

    sequence_parallel: bool = False
    """Between attention and MLPs, each tensor rank has a part of every sequence, so that these activations take 1 / tensor of the memory.
    For models whose layers are attention, MLPs and norms.

    Section: What is sharded
    Change it: with a tensor axis, if activations between attention and MLPs take much memory
    More: [sequences between layers](../tensor_parallelism.md#sequences-between-layers)
    """

    expert: int = 1
    """Ranks along the expert axis, which have different experts of every layer and compute for each other. They are some of the data and
    context ranks. For `GroupedExperts`, and experts of transformers' models that grouped products can compute.

    Section: What is sharded
    Values: a divisor of data x context
    Change it: if experts do not fit, or are gathered for too few tokens each
    More: [one option](../moe.md#one-option)
    """

    expert_dispatcher: Literal["all_gather", "all_to_all"] = "all_to_all"
    """How tokens reach experts of other ranks. "all_to_all": only those that are needed, and the host waits for their number. "all_gather":
    all tokens go to all ranks of the axis, and nothing waits for the host; every rank needs equally many.

    Section: What is sharded
    Change it: to `"all_gather"` inside a node if every batch has equally many tokens on all ranks: nothing waits for the host
    More: [one option](../moe.md#one-option)
    """

    shared_batches: Literal["compare", "broadcast"] = "compare"
    """The ranks of a context group or a tensor group need the same batches. "compare": the first three of each loader and every hundredth
    are compared, and a difference raises. "broadcast": the first rank of each group sends its own to the others.

    Section: What is sharded
    Change it: if a loader of your own reads different batches on ranks that compute them together
    More: [a context axis](../long_context.md#a-context-axis)
    """

    loss_count: Literal["auto", "tokens"] = "auto"
    """What a loss that a model of transformers computes from labels is divided by. "auto": with `context` above 1 by the number of targets
    on all ranks, otherwise each rank's own. "tokens": that of all ranks also without a context axis, in training.

    Section: What is sharded
    Change it: if ranks have different numbers of targets, and the loss of a transformers model should be the mean over all
    More: [a context axis](../long_context.md#a-context-axis)
    """

    data_parallel_size: int | Literal["auto"] | None = None
    """Lightning's word for outer x data x context; a number is checked. If it is given, "auto" too, `device_mesh` has the axes of
    ModelParallelStrategy, "data_parallel" and "tensor_parallel".

    Section: What is sharded
    Values: `None`, `"auto"`, a number of ranks
    Change it: if `configure_model` reads `device_mesh["data_parallel"]`, as under ModelParallelStrategy
    More: [ModelParallelStrategy](../coming_from.md#modelparallelstrategy-and-fsdp2)
    """

    tensor_parallel_size: int | Literal["auto"] | None = None
    """Lightning's word for `tensor`, with the same effect on `device_mesh`. "auto": the ranks of a node.

    Section: What is sharded
    Values: `None`, `"auto"`: the ranks of a node, a number
    Change it: if `configure_model` reads `device_mesh["tensor_parallel"]`, as under ModelParallelStrategy
    More: [ModelParallelStrategy](../coming_from.md#modelparallelstrategy-and-fsdp2)
    """

    mesh: DeviceMesh | None = None
    """A device mesh of your own instead of sizes: one axis, or two, outer first unless they are named "outer" and "data" or "shard"; and
    perhaps others named "context" and "tensor".

    Section: What is sharded
    Values: a `DeviceMesh` with one axis, or two, and perhaps others named "context" and "tensor"
    Change it: if your program has its own mesh
    More: [mesh](../mesh.md)
    """

    reshard_after_forward: bool | Literal["auto"] = True
    """Reshard weights between forward and backward. `False` saves a gather and costs memory; "auto" keeps as many units as fit into the
    memory left after two steps.

    Section: Memory
    Change it: if memory is left: `"auto"` saves all-gathers in backward for as many units as fit
    More: [speed and memory](../performance.md)
    """

    side_doors: Literal["find", "follow", "raise"] = "find"
    """ "find": where hooks or attributes of a unit's modules may keep what its forward has computed (a feature, a penalty), its weights are
    gathered again for a backward that begins there. "follow": in every unit, also where nothing is found; it costs host time. "raise":
    nowhere; such a backward raises.

    Section: Memory
    Change it: to `"follow"`, if an error says that a backward read a resharded weight; to `"raise"`, if a unit has hooks that keep nothing
    and the host limits the speed
    More: [features](../features.md)
    """

    ignored_parameters: Sequence[str | nn.Parameter] = ()
    """Parameters, or `fnmatch` patterns of their names, that stay whole; their gradients are not reduced.

    Section: What is sharded
    Values: parameters, patterns of names
    Change it: if a parameter has to stay whole and its gradient must not be reduced
    More: [FSDPStrategy](../coming_from.md#fsdpstrategy)
    """

    storage: Literal["pooled", "dynamic"] = "pooled"
    """ "pooled": unsharded weights use fixed slots; "dynamic": in the caching allocator.

    Section: Memory
    Change it: if an error asks for it, because a step runs units together that ran one after another when slots were planned: `"dynamic"`
    allocates unsharded weights as needed
    More: [life of a parameter](../life_of_a_parameter.md#3-unshard-and-reshard)
    """

    symmetric_memory: bool = False
    """Gather by copy engines, which leaves compute cores to the matrix products (NCCL 2.28, one NVLink domain).

    Section: Speed
    Change it: on GPUs that NVLink connects, if all-gathers slow down matrix products
    More: [symmetric memory](../performance.md#symmetric-memory)
    """

    offload: Literal["optimizer"] | None = None
    """ "optimizer": main weights and optimizer state stay in host memory and are staged on the device in parts in the optimizer's step.
    Needs elementwise optimizers, and excludes `cuda_graph`.

    Section: Memory
    Change it: if main weights and optimizer state do not fit on the device; optimizer steps take longer
    More: [optimizer state in host memory](../performance.md#optimizer-state-in-host-memory)
    """

    unused_parameters: Literal["none", "zero"] = "none"
    """Parameters that no rank used in a step. "none": they have no gradient and optimizers skip them, as under
    DDP(find_unused_parameters=True). "zero": their gradient is zeros, so weight decay and momentum move them; no rank ever waits to learn
    of the others. `cuda_graph` always does that, and names them.

    Section: Speed
    Change it: if ranks that leave parameters unused lose time waiting for the others: with `"zero"` none waits, but weight decay and
    momentum move those parameters
    More: [docstring](strategy.md)
    """

    compile: bool | Mapping[str, Any] = False
    """`torch.compile` the forward of every unit that has modules inside; a mapping holds options for it, such as {"mode":
    "max-autotune-no-cudagraphs"}. A compiled LightningModule (`torch.compile(model)`) counts as True.

    Section: Speed
    Values: `True`, `False`, a mapping of options of `torch.compile`
    Change it: for fused kernels inside units, if the first steps may take longer
    More: [speed and memory](../performance.md)
    """

    recompute: Recompute | Mapping[str, Any] | None = None
    """Which activations are recomputed in backward instead of being saved: a `Recompute`, or a mapping of its options.

    Section: Memory
    Values: a `Recompute`, a mapping of its options
    Change it: if activations take too much memory
    More: [activation checkpointing](../recompute.md)
    """

    broadcast_buffers: bool = True
    """Before an evaluation, a checkpoint and a state dict buffers take the values of rank 0, such as running statistics. `False` leaves
    each rank's own.

    Fabric: Buffers take the values of rank 0 before a checkpoint, a state dict and the first forward in evaluation mode after one in
    training mode. `False` leaves each rank's own, and lets one rank evaluate alone where weights are whole.
    Section: Speed
    Change it: if buffers differ between ranks on purpose
    More: [options: decisions](../design/options.md)
    """

    accumulation: Literal["local", "sharded"] = "local"
    """With `accumulate_grad_batches`, "local": no communication until the last microbatch, for a full-size gradient in memory. "sharded":
    strategies with sharded gradients reduce each microbatch over the shard axis; the outer axis waits.

    Fabric: Inside `fabric.no_backward_sync`, "local": no communication, for a full-size gradient in memory. "sharded": strategies with
    sharded gradients reduce each microbatch over the shard axis; the outer axis waits.
    Section: Memory
    Change it: if unreduced gradients do not fit during gradient accumulation: one reduction per microbatch
    More: [memory](../strategies.md#memory)
    """

    state_dict_type: Literal["sharded", "full"] = "sharded"
    """Of saved checkpoints. "sharded": a directory, every rank writes its rows; "full": one file with whole tensors, as without sharding,
    gathered one by one into the host memory of rank 0. Both kinds are read, regardless of this option.

    Section: Checkpoints
    Change it: to `"full"` for one file that plain PyTorch and other strategies read
    More: [kinds](../checkpoints.md#kinds)
    """

    shared_folder_timeout: timedelta = timedelta(seconds=30)
    """How long a node may take to see what another one has put into the folder of a sharded checkpoint. If one does not see it by then, an
    error is raised, before the first step if a ModelCheckpoint knows its folder, and at each save.

    Fabric: As in `MFSDPStrategy`, at each save.
    Section: Checkpoints
    Values: a `timedelta`
    Change it: longer if nodes see new files of others later than that
    More: [several nodes](../checkpoints.md#saving)
    """

    start_method: Literal["popen", "fork"] = "popen"
    """Of the processes that Lightning starts, if no launcher such as torchrun did. "popen": the script runs once for each device; "fork":
    they are forks of this process, the only way in a notebook, where the model has the trained weights after fit.

    Fabric: As in `MFSDPStrategy`; with "fork" pass a function to `fabric.launch(function)`, and what it returns comes back.
    Section: Processes
    Change it: in a notebook with several processes
    More: [notebooks](../notebook.md)
    """

    timeout: timedelta | None = None
    """Of collectives. `None`: PyTorch's own, 10 minutes for NCCL and 30 for gloo.

    Section: Processes
    Values: a `timedelta`; `None`: that of PyTorch, 10 minutes for NCCL and 30 for gloo
    Change it: to a few minutes while you search for the reason of a hang; longer if a rank works alone for long
    More: [it hangs](../troubleshooting.md#it-hangs-or-a-rank-died)
    """

    process_group_backend: str | None = None
    """`None`: NCCL for CUDA, gloo for CPU.

    Section: Processes
    Values: a backend of `torch.distributed`; `None`: NCCL for CUDA, gloo for CPU
    Change it: rarely
    More: [multiple processes](../quickstart.md#multiple-processes-and-nodes)
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class DeclaredTrainerOptions(DeclaredOptions):
    """The options that the Trainer's strategy has beside those of both."""

    cuda_graph: bool = False
    """Record training_step and its backward as CUDA graphs after a few steps and replay them: hardly any host time. For fixed shapes. Every
    backward is reduced, also with `accumulate_grad_batches`. What cannot be recorded is named and runs eagerly.

    Section: Speed
    Change it: if the host limits the speed, and batches have fixed shapes
    More: [CUDA graphs](../performance.md#cuda-graphs-under-the-trainer)
    """

    free_gradients: bool = False
    """Clear gradients right after the optimizer's step. Lightning clears them after the next training_step, so they take memory while
    activations accumulate. Hooks that run after the step then see no gradients.

    Section: Memory
    Change it: if gradients that wait to be cleared are too much memory in the next forward; hooks after the step then see none
    More: [speed and memory](../performance.md)
    """

    global_batch_size: int | None = None
    """Samples of an optimizer step, on all ranks: the Trainer's `accumulate_grad_batches` is set to what the data ranks and the loader's
    batch size leave of it, so that a run that is resumed on another number of ranks makes the same steps of the same samples. An error if
    it is no whole number.

    Section: Processes
    Values: a number of samples; `None`: `Trainer(accumulate_grad_batches=...)`
    Change it: if the number of nodes changes during a run
    More: [runs whose nodes come and go](../large_runs.md#nodes-that-come-and-go)
    """

    async_save: bool = False
    """Copy what is saved to the host and train on while it is written. The next save, loading and the end wait for it.

    Section: Checkpoints
    Change it: if training waits for saves, and host memory holds what is saved
    More: [saving](../checkpoints.md#saving)
    """
