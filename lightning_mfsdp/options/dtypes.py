"""ShardedPrecision: what a precision string means: a policy, autocast, dtypes of inputs, loss scaling.

The Trainer's plugin and Fabric's derive from it. It handles dtypes only, and is independent of units, meshes, checkpoints and its callers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp._lightning_api import (
    DoublePrecision,
    FabricDoublePrecision,
    FabricHalfPrecision,
    FabricMixedPrecision,
    FabricPrecision,
    FabricTransformerEnginePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_mfsdp.base.module_patterns import check_patterns
from lightning_mfsdp.engine import MixedPrecisionPolicy, is_sharded
from lightning_mfsdp.float8 import Float8Linear, replace_linear_layers
from lightning_mfsdp.options.loss_scaling import agreeing_scaler, unscales_by_itself
from lightning_mfsdp.options.policy_and_precision import refuse_contradiction, replaced_fields
from lightning_mfsdp.te import (
    Fp8Compute,
    Fp8Options,
    enter_around,
    fuse_weight_gradients,
    has_engine_modules,
    refuse_prepared,
)

__all__ = ["PrecisionName", "ShardedPrecision", "default_policy", "translate"]

PrecisionName = Literal[
    "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true", "transformer-engine", "fp8"
]

_FP8_SCALING = "fp8_scaling"  # in checkpoints
_FP8_CAPABILITY = (8, 9)
_FLOAT8_CHOICE = "_mfsdp_float8_choice"  # on a model: what was to keep high precision when its layers were chosen
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_AUTOCAST_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "transformer-engine": torch.bfloat16,  # for everything that the library's modules do not compute in 8 bits
    "fp8": torch.bfloat16,  # for everything but products of linear layers
}

# Under autocast these compute in float32 with float32 weights. Rounding their few weights would save nothing and change results.
_NORMALIZATION: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def default_policy(precision: PrecisionName) -> MixedPrecisionPolicy:
    """The policy a precision string stands for.

    | precision            | main weights | compute and gathers      | gradients on the wire and accumulated |
    |----------------------|--------------|--------------------------|---------------------------------------|
    | "32-true"            | float32      | as built                 | float32                               |
    | "bf16-mixed"         | float32      | bfloat16 + autocast      | float32                               |
    | "16-mixed"           | float32      | float16 + autocast       | float32, scaled loss                  |
    | "bf16-true"          | bfloat16     | bfloat16                 | float32, rounded once for the step    |
    | "16-true"            | float16      | float16                  | float32, scaled loss                  |
    | "64-true"            | float64      | float64                  | float64                               |
    | "transformer-engine" | float32      | as "bf16-mixed", and FP8 | float32                               |
    | "fp8"                | float32      | as "bf16-mixed", and FP8 | float32                               |
    """
    if precision in _AUTOCAST_DTYPES:
        return MixedPrecisionPolicy(
            compute_dtype=_AUTOCAST_DTYPES[precision], fp32_modules=_NORMALIZATION, cast_forward_inputs=False
        )
    if precision == "64-true":
        return MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float64)
    if precision in _TRUE_DTYPES:
        return MixedPrecisionPolicy(main_params_dtype=None)
    return MixedPrecisionPolicy()


class ShardedPrecision(FabricPrecision):
    """Precision of a run whose model is sharded.

    Args:
        precision: One of "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true", "transformer-engine", "fp8". See
            `default_policy` for the dtypes.
        policy: Replaces the dtypes the string stands for; autocast, the model's own dtype and the inputs' still follow the string. Besides
            "32-true" any policy is accepted: without autocast, the policy alone decides.
        scaler: Loss scaler for float16 compute. `None` makes a `DistributedGradScaler` where one is needed. A plain
            `torch.amp.GradScaler` provides the settings for one; any other class must itself make ranks agree on skipping a step.
        keep_high_precision: For "fp8", as documented in `replace_linear_layers`, and "transformer-engine", as in `Fp8Options`.
        recipe, replace_layers, overrides, fp8_weights, keep_transpose_cache, fuse_weight_gradients, keep_quantized: For
            "transformer-engine", as documented in `Fp8Options`.

    Raises:
        ValueError: An unknown precision, a policy that contradicts it, a scaler where nothing computes in float16, or options of FP8
            where nothing computes in it.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        policy: MixedPrecisionPolicy | None = None,
        scaler: torch.amp.GradScaler | None = None,
        recipe: Any = None,
        replace_layers: bool | Literal["auto"] = False,
        keep_high_precision: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        fp8_weights: bool = False,
        keep_transpose_cache: bool = False,
        fuse_weight_gradients: bool = False,
        keep_quantized: bool = False,
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"{type(self).__name__}(precision={precision!r}): expected one of {', '.join(map(repr, get_args(PrecisionName)))}"
            )
        self.precision: PrecisionName = precision  # type: ignore[assignment]  # Lightning has no "fp8"
        self.policy_is_explicit = policy is not None
        self.policy = policy or default_policy(precision)
        self.scaler = scaler
        self.fp8: Fp8Compute | None = None
        fp8: dict[str, Any] = {
            "replace_layers": replace_layers,
            "overrides": {} if overrides is None else overrides,
            "fp8_weights": fp8_weights,
            "keep_transpose_cache": keep_transpose_cache,
            "fuse_weight_gradients": fuse_weight_gradients,
            "keep_quantized": keep_quantized,
        }
        if precision == "transformer-engine":
            recipe = "current" if recipe is None else recipe
            self.fp8 = Fp8Compute(Fp8Options(recipe=recipe, keep_high_precision=keep_high_precision, **fp8))
            self.policy = self.known_as(self.policy)
        elif recipe is not None or any(fp8.values()):
            raise ValueError(
                f"{type(self).__name__}({precision!r}): recipe, {', '.join(fp8)} are about FP8 by Transformer Engine, which this precision "
                'does not use. Leave them out, or use "transformer-engine"'
            )
        elif keep_high_precision and precision != "fp8":
            raise ValueError(
                f"{type(self).__name__}({precision!r}): keep_high_precision is about FP8, which this precision does not use. Leave it out, "
                'or use "fp8" or "transformer-engine"'
            )
        check_patterns("keep_high_precision", keep_high_precision)
        self.keep_high_precision = tuple(keep_high_precision)
        if precision != "32-true":
            refuse_contradiction(precision, self.policy, type(self).__name__)
        self._device_type = "cpu"
        if scaler is not None and not self.needs_scaler:
            raise ValueError(
                f"{type(self).__name__}({precision!r}, scaler={type(scaler).__name__}): nothing computes in float16, so the scaler would "
                'do nothing. Leave it out, or use precision="16-mixed" or a policy with compute_dtype=torch.float16'
            )

    def known_as(self, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """The policy as this precision uses it: for FP8 it includes the codec of quantized weights."""
        return policy if self.fp8 is None else self.fp8.policy(policy)

    def policy_beside_precision(self) -> str:
        """A sentence on how a user's policy differs from the string's; empty if it does not."""
        return replaced_fields(self.precision, self.policy, self.known_as(default_policy(self.precision)))

    @property
    def needs_scaler(self) -> bool:
        """Whether float16 gradients could underflow, so that losses have to be scaled."""
        return self.precision.startswith("16") or self.policy.compute_dtype == torch.float16

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products; the string's if the policy leaves weights as they were built."""
        return self.policy.compute_dtype or _TRUE_DTYPES.get(self.precision, torch.float32)

    # -- module, inputs and contexts -----------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module as a strategy of Lightning wants it, and Fabric: for "fp8" with replaced layers. Ours do that and more themselves."""
        if self.precision == "fp8":
            self._choose_float8_layers(module)
        return module

    def prepare_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Complete a module's setup for FP8. The strategy calls it once processes exist, before each use of a module, sharded or not."""
        if self.fp8 is None:
            refuse_prepared(module, self.precision)
            self._choose_float8_layers(module)
            return
        # A mesh of two axes covers all ranks, too, and a DeviceMesh has a group for each axis only.
        done = self.fp8.prepare(module, mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD)
        if done:
            rank_zero_info(done)

    def _choose_float8_layers(self, module: nn.Module) -> None:
        """For "fp8" replace layers; otherwise say if some are there, which compute in FP8 in any precision."""
        if self.precision != "fp8":
            found = [name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)]
            if found:
                rank_zero_info(
                    f"precision={self.precision!r}: {len(found)} linear layers of class Float8Linear compute in FP8 in any precision: "
                    f"{', '.join(found[:4])}"
                )
            return
        self._check_device_multiplies()
        before = vars(module).get(_FLOAT8_CHOICE)
        if any(is_sharded(part) for part in module.modules()):
            self._check_float8_choice(module, before)
            return
        chosen = replace_linear_layers(module, keep_high_precision=self.keep_high_precision)
        if before != self.keep_high_precision:
            rank_zero_info(
                f"FP8: {len(chosen)} linear layers, {', '.join(chosen[:4])}{', ...' if len(chosen) > 4 else ''}"
            )
        vars(module)[_FLOAT8_CHOICE] = self.keep_high_precision

    def _check_float8_choice(self, module: nn.Module, before: tuple[str, ...] | None) -> None:
        """Of a model that is sharded, where no layer can change."""
        if before == self.keep_high_precision:
            return
        so_far = "without" if before is None else f"with keep_high_precision={list(before)} for"
        raise ValueError(
            f'precision "fp8", keep_high_precision={list(self.keep_high_precision)}: {type(module).__name__} was sharded {so_far} FP8, and '
            "layers cannot change then. Build it again, or call unshard_model(module) first; what configure_model gives to fully_shard it "
            'gives to replace_linear_layers before, with precision="bf16-mixed"'
        )

    def _check_device_multiplies(self) -> None:
        if self._device_type == "cuda" and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
            raise RuntimeError(
                f"{type(self).__name__}({self.precision!r}): {torch.cuda.get_device_name()} has no products of 8-bit matrices: expected "
                'compute capability 8.9 (Ada), 9.0 (Hopper) or more; use precision="bf16-mixed"'
            )

    def cast_module(self, module: nn.Module) -> nn.Module:
        """The module in the dtype of a "*-true" precision; the policy decides everything else."""
        dtype = _TRUE_DTYPES.get(self.precision)
        if dtype is None:
            return module
        # `to(dtype)` would take the real part of what is complex.
        return {torch.float64: module.double, torch.float16: module.half, torch.bfloat16: module.bfloat16}[dtype]()

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors of a batch in the dtype of a "*-true" precision."""
        dtype = _TRUE_DTYPES.get(self.precision)
        if dtype is None:
            return data

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, convert)

    @contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        """New tensors have the dtype of a "*-true" precision, and new modules have FP8 weights if those were requested."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(_TRUE_DTYPES.get(self.precision, previous))
        try:
            with self.fp8.building() if self.fp8 is not None else nullcontext():
                yield
        finally:
            torch.set_default_dtype(previous)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As `tensor_init_context`; the name by which Fabric calls it."""
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast for "*-mixed", the default dtype for "*-true", and FP8 inside of autocast."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        if dtype is None:
            with self.tensor_init_context():
                yield
        else:
            fp8 = self.fp8.forward() if self.fp8 is not None else nullcontext()
            with torch.autocast(self._device_type, dtype=dtype, cache_enabled=False), fp8:
                yield

    def backward_context(self) -> AbstractContextManager[Any]:
        """Context around a backward: what is recomputed there needs FP8 as in its first forward."""
        return self.fp8.backward() if self.fp8 is not None else nullcontext()

    def take_sharded_module(self, module: nn.Module) -> None:
        """Have a module that has just been sharded compute in this precision wherever it is called.

        Its calls outside of steps, from a hook or after training, run under autocast as well, because weights have the compute dtype, and
        in FP8 as in a step, also under an autocast of the user's own.
        """
        if has_engine_modules(module):
            _fuse_weight_gradients(module)
        if self.precision not in _AUTOCAST_DTYPES:
            return

        def context() -> AbstractContextManager[Any]:
            inside = torch.is_autocast_enabled(self._device_type) and (self.fp8 is None or self.fp8.is_in_forward)
            return nullcontext() if inside else self.forward_context()

        enter_around(module, context)

    def connect_device(self, device_type: str) -> None:
        """Set the device of autocast and loss scaling: "cpu" or "cuda"."""
        self._device_type = device_type
        if self.needs_scaler:
            self.scaler = agreeing_scaler(self.scaler, device_type)

    # -- the step ------------------------------------------------------------------------------------------------------

    def check_clipping(self, optimizer: object) -> None:
        """Raise a RuntimeError for an optimizer whose gradients would still be scaled when they are clipped."""
        if self.scaler is not None and unscales_by_itself(optimizer):
            raise RuntimeError(
                f"clipping gradients of {type(optimizer).__name__}(fused=True) under loss scaling: the optimizer removes the scale inside "
                'its step, after clipping. Use fused=False, or precision="bf16-mixed", which needs no scaling'
            )

    def fp8_scaling(self, models: Mapping[str, nn.Module]) -> dict[str, Any]:
        """What a checkpoint holds of FP8: scales and histories, under delayed scaling, of models by their names in it."""
        scaling = self.fp8.scaling(models) if self.fp8 is not None else {}
        return {_FP8_SCALING: scaling} if scaling else {}

    def take_fp8_scaling(self, models: Mapping[str, nn.Module], rest: dict[str, Any]) -> None:
        """Restore what `fp8_scaling` put into a checkpoint, and remove it there. A run without FP8 does not need it."""
        scaling = rest.pop(_FP8_SCALING, {})
        unused = self.fp8.load_scaling(models, scaling) if self.fp8 is not None else []
        if unused:
            rank_zero_info(
                f"the checkpoint holds scales of delayed scaling for {len(unused)} modules that do not use it here: {unused[:4]}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, if there is one."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler's state; without a scaler nothing happens."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


_NAMED = (
    MixedPrecision,
    HalfPrecision,
    DoublePrecision,
    FabricMixedPrecision,
    FabricHalfPrecision,
    FabricDoublePrecision,
)
_PLAIN = (Precision, FabricPrecision)

PrecisionT = TypeVar("PrecisionT", bound=ShardedPrecision)


def translate(plugin: FabricPrecision, policy: MixedPrecisionPolicy | None, into: type[PrecisionT]) -> PrecisionT:
    """The plugin Lightning built from a precision string, as one of ours.

    Args:
        plugin: Lightning's `Precision`, `HalfPrecision`, `MixedPrecision` or `DoublePrecision`, or one of ours.
        policy: Replaces the dtypes of the string.
        into: Class of the result.

    Raises:
        TypeError: A plugin that has no counterpart here.
        ValueError: Two different policies, or one that contradicts the precision.
    """
    if isinstance(plugin, ShardedPrecision):
        if policy is not None and plugin.policy_is_explicit and plugin.policy != plugin.known_as(policy):
            raise ValueError(
                f"two policies: the strategy was given policy={policy}, {type(plugin).__name__} policy={plugin.policy}. Give one of them"
            )
        explicit_policy = plugin.policy if plugin.policy_is_explicit else None
        if isinstance(plugin, into) and (policy is None or plugin.policy_is_explicit):
            return plugin
        if policy is not None and not plugin.policy_is_explicit and plugin.precision == "32-true":
            refuse_contradiction(plugin.precision, policy, into.__name__)
        fp8 = {"keep_high_precision": plugin.keep_high_precision} if plugin.fp8 is None else vars(plugin.fp8.options)
        return into(plugin.precision, policy=policy or explicit_policy, scaler=plugin.scaler, **fp8)
    if isinstance(plugin, FabricTransformerEnginePrecision):
        return into("transformer-engine", policy=policy, **_fp8_options(plugin))
    if isinstance(plugin, _NAMED):
        scaler = plugin.scaler if isinstance(plugin, (MixedPrecision, FabricMixedPrecision)) else None
        return into(cast(PrecisionName, plugin.precision), policy=policy, scaler=scaler)
    if type(plugin) in _PLAIN:
        if policy is not None:
            refuse_contradiction("32-true", policy, into.__name__)
        return into("32-true", policy=policy)
    raise TypeError(
        f"mfsdp cannot work with the precision plugin {type(plugin).__name__}. Use precision=... with one of "
        f"{', '.join(map(repr, get_args(PrecisionName)))}, or plugins=[{into.__name__}(...)]"
    )


def _fp8_options(plugin: FabricTransformerEnginePrecision) -> dict[str, Any]:
    """The settings of Lightning's plugin, which is also what Lightning builds from the string."""
    if {plugin.weights_dtype, plugin.fallback_compute_dtype} != {torch.bfloat16}:
        raise TypeError(
            f"TransformerEnginePrecision(weights_dtype={plugin.weights_dtype}, fallback_compute_dtype={plugin.fallback_compute_dtype}): "
            "mfsdp computes in bfloat16 what is not in FP8 (float16 would need loss scaling), and keeps float32 main weights. Use "
            'precision="transformer-engine", or plugins=[MFSDPPrecision("transformer-engine", policy=...)] for other dtypes'
        )
    # The string specifies no recipe, and a plugin without one cannot be distinguished from it.
    recipe = "current" if plugin.recipe == type(plugin.recipe)() else plugin.recipe
    if recipe == "current":
        rank_zero_info(
            'precision="transformer-engine": FP8 with current scaling. For Lightning\'s delayed scaling, use '
            'plugins=[MFSDPPrecision("transformer-engine", recipe="delayed", replace_layers="auto")]'
        )
    return {"recipe": recipe, "replace_layers": "auto" if plugin.replace_layers is None else plugin.replace_layers}


def _fuse_weight_gradients(module: nn.Module) -> None:
    """Report which modules write gradients themselves, and which leave them to autograd."""
    built = [name for name, layer in module.named_modules() if getattr(layer, "fuse_wgrad_accumulation", False)]
    fused = fuse_weight_gradients(module)
    if fused:
        rank_zero_info(f"{len(fused)} modules write gradients of their weights by themselves")
    left = [name or type(module).__name__ for name in built if not module.get_submodule(name).fuse_wgrad_accumulation]
    if left:
        rank_zero_info(f"{len(left)} modules leave gradients of ignored_parameters to autograd: {', '.join(left)}")
