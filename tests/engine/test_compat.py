"""Each private PyTorch API of compat.py exists in this version and does what the engine relies on."""

from __future__ import annotations

import ast
import sys
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_mfsdp.base import compat
from tests.engine.cases import run_cases
from tests.engine.packed import Nibbles, packed
from tests.helpers.distributed import run_distributed


def test_code_that_takes_part_in_loading_is_found():
    class Own(nn.Linear):
        def _load_from_state_dict(self, *rest):
            super()._load_from_state_dict(*rest)

    def hook(*_):
        pass

    module = Own(2, 2)
    before, after = module.register_load_state_dict_pre_hook(hook), module.register_load_state_dict_post_hook(hook)
    assert compat.load_code(module) == ([hook, module._load_from_state_dict], [hook])
    before.remove()
    after.remove()
    assert compat.load_code(nn.Linear(2, 2)) == ([], [])


def which_storages_tensors_lie_in(rank: int, world: int) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    plain = torch.ones(4)
    parts = DTensor.from_local(plain, mesh, [Shard(0)])
    pending = funcol.all_reduce(torch.ones(2), "sum", mesh)
    assert compat.memory_of(plain[1:]) == compat.memory_of(parts) != compat.memory_of(torch.ones(4))
    assert compat.memory_of(pending) is None
    assert compat.storage_of(plain) == compat.memory_of(plain)
    with compat.tensors_without_memory():
        one, other = torch.ones(4), torch.ones(4)
    assert compat.memory_of(one[1:]) == compat.memory_of(one) != compat.memory_of(other)
    return torch.equal(pending, torch.full((2,), float(world)))


def test_the_memory_of_a_wrapper_is_that_of_its_part_or_none() -> None:
    assert run_distributed(which_storages_tensors_lie_in, 1) == [True]


def test_data_is_read_and_set_as_on_a_plain_parameter():
    class Noting(nn.Parameter):
        asked = 0

        @property
        def data(self):
            self.asked += 1
            return compat.get_data(self)

    parameter, value = Noting(torch.ones(2)), torch.zeros(2)
    compat.set_data(parameter, value)
    assert compat.get_data(parameter).data_ptr() == value.data_ptr()
    assert parameter._version == 0
    assert parameter.asked == 0


def test_a_backward_says_whether_its_graph_stays():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: seen.append(compat.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_the_forward_of_an_autograd_function_is_told_from_no_grad():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(compat.in_function_forward())
            return x.clone()

    Looks.apply(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        seen.append(compat.in_function_forward())
    with torch.inference_mode():
        seen.append(compat.in_function_forward())
    assert seen == [True, False, False]
    assert not compat.in_function_forward()


def test_errors_of_lost_ranks_are_told_from_others():
    assert compat.is_lost_connection(dist.DistError("any"))
    assert compat.is_lost_connection(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert not compat.is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def process_groups_are_broken_off(rank, world):
    assert isinstance(dist.distributed_c10d._get_default_store(), compat.Store)
    assert issubclass(compat.PrefixStore, compat.Store)
    compat.abort_process_groups()
    assert not dist.is_initialized()
    compat.abort_process_groups()


def test_process_groups_are_broken_off_and_forgotten():
    failures = run_cases({"broken off": process_groups_are_broken_off}, 2)
    assert not failures["broken off"], failures["broken off"]


def test_a_tensor_is_shown_as_one_of_a_subclass_over_the_same_memory():
    class Marked(torch.Tensor):
        pass

    memory = torch.ones(())
    made = compat.as_kind(Marked, memory.expand(3, 4))
    assert type(made) is Marked
    assert made.shape == (3, 4)
    assert made.data_ptr() == memory.data_ptr()


def test_a_backward_has_an_identity_and_there_is_none_outside():
    seen = []
    x = torch.ones(2, requires_grad=True)
    assert compat.backward_task() == -1
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda _: seen.append(compat.backward_task()))
        y.sum().backward()
    assert compat.backward_task() == -1
    assert len(set(seen)) == 2
    assert min(seen) >= 0


def test_a_callback_runs_once_after_the_last_node_of_the_backward_and_after_gradients_are_there():
    events = []
    x = torch.ones(2, requires_grad=True)
    early, late = x * 1, x * 2
    x.register_hook(lambda _: events.append("leaf"))
    late.register_hook(lambda _: compat.on_backward_end(lambda: events.append(("end", x.grad is not None))))
    early.register_hook(lambda _: events.append("early"))
    (early + late).sum().backward()
    assert events[-1] == ("end", True)
    assert events.count(("end", True)) == 1
    assert "early" in events
    assert "leaf" in events


def test_a_callback_outside_a_backward_is_refused():
    with pytest.raises(RuntimeError, match="backward"):
        compat.on_backward_end(lambda: None)


def test_a_subclass_behaves_as_a_plain_tensor_without_torch_function():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError, match="called"):
        torch.add(loud, 1)
    with compat.without_torch_function():
        assert torch.add(loud, 1).sum() == 4


def test_foreach_functions_convert_and_keep_the_target_dtype():
    low = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)]
    high = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)]
    compat.foreach_copy_(low, high)
    assert [tensor.dtype for tensor in low] == [torch.bfloat16] * 2
    compat.foreach_add_(high, low)
    assert [tensor.tolist() for tensor in high] == [[2.0, 4.0, 6.0], 8.0]
    assert high[0].dtype is torch.float32
    compat.foreach_add_(low, high)
    assert low[0].dtype is torch.bfloat16
    assert low[0].tolist() == [3.0, 6.0, 9.0]
    compat.foreach_mul_([*high, *low], torch.tensor(0.5))
    assert [tensor.tolist() for tensor in high] == [[1.0, 2.0, 3.0], 4.0]
    assert low[1].item() == 6.0
    moved = [torch.tensor([0.0, 4.0])]
    compat.foreach_lerp_(moved, [torch.tensor([8.0, 0.0])], 0.25)
    assert moved[0].tolist() == [2.0, 3.0]
    norms = compat.foreach_norm([torch.tensor([3.0, -4.0]), torch.tensor([[1.0, 1.0]])], float("inf"))
    assert [norm.item() for norm in norms] == [4.0, 1.0]
    compat.foreach_zero_([*high, *low])
    assert not any(tensor.any() for tensor in [*high, *low])


def test_a_parameter_may_point_into_other_memory_and_saved_tensors_follow_a_refill():
    """What the gather relies on: `.data = view` keeps the version counter, and refilling the memory is no in-place change."""
    memory = torch.arange(6.0)
    weight = nn.Parameter(torch.empty(0))
    weight.data = memory[:6].view(2, 3)
    y = (weight * weight).sum()
    memory.zero_()
    memory.copy_(torch.ones(6))
    y.backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))


def test_the_step_between_the_hooks_of_an_optimizer_is_found():
    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            return closure()

    calls = []
    weight = nn.Parameter(torch.ones(1))
    for kind in (torch.optim.AdamW, torch.optim.SGD, Own):
        optimizer = kind([weight])
        optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        loss = compat.undecorated_step(kind)(optimizer, lambda: torch.is_grad_enabled())
        assert loss is (kind is not Own), "decorators of the class's own are kept"
        assert compat.takes_closure(optimizer)
        optimizer.step(lambda: 1.0)
    assert calls == ["hook"] * 3
    assert compat.undecorated_step(torch.optim.Optimizer) is None

    class Without(torch.optim.SGD):
        def step(self):
            pass

    assert not compat.takes_closure(Without([weight]))


def test_a_hook_can_be_put_before_earlier_ones():
    calls = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.register_step_post_hook(lambda *_: calls.append("earlier"))
    compat.before_other_hooks(optimizer.register_step_post_hook(lambda *_: calls.append("later")))
    optimizer.step()
    assert calls == ["later", "earlier"]


def test_hooks_before_a_step_can_be_looked_at():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def hook(*_):
        return None

    optimizer.register_step_pre_hook(hook)
    assert compat.step_pre_hooks(optimizer) == [hook]


def test_an_optimizer_whose_constructor_leaves_out_that_of_optimizer_has_no_hooks():
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner):
            self.param_groups, self.state = inner.param_groups, inner.state

    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert compat.has_hooks(inner)
    assert not compat.has_hooks(Wrapping(inner))


def test_names_that_ddp_was_told_to_ignore_are_found():
    module = nn.BatchNorm1d(2)
    assert compat.ddp_ignores(module) == frozenset()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["running_mean"])
    assert compat.ddp_ignores(module) == {"running_mean"}


def test_compiling_is_noticed_where_a_subclass_is_taken_apart():
    """As DTensors are; `ShardedTensor` says then that it cannot be."""
    seen = []

    class Taken(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            seen.append(compat.is_traced())
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, _, size, stride):
            return Taken(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            return func(*(one.inner if isinstance(one, Taken) else one for one in args), **(kwargs or {}))

    Taken(torch.ones(2)).__tensor_flatten__()
    assert seen == [False]
    torch.compile(lambda one: one + 1, backend="eager")(Taken(torch.ones(2)))
    assert any(seen)


def test_an_untraced_function_runs_as_it_is_where_nothing_is_compiled_and_is_never_compiled():
    seen: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    counted = CompileCounter()

    @compat.untraced
    def untraced(x: Tensor) -> Tensor:
        return inner(x) * 2

    assert torch.equal(untraced(torch.ones(2)), torch.full((2,), 4.0))
    frames: list[str] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        untraced(torch.ones(2))
    finally:
        sys.setprofile(None)
    assert frames == ["called", "is_dynamo_compiling", "untraced", "inner", "is_dynamo_compiling"], frames

    compiled = torch.compile(lambda x: untraced(x.sin()).cos(), backend=counted)
    for size in (2, 3, 4):
        torch.testing.assert_close(compiled(torch.ones(size)), (2 * (torch.ones(size).sin() + 1)).cos())
    assert seen == [False] * 5
    assert counted.frame_count >= 2
    assert counted.op_count >= 2


def test_a_storage_can_be_emptied_and_refilled_at_views_that_stay():
    memory = torch.empty(16, dtype=torch.uint8)
    view = memory.view(torch.float32)[1:3]
    memory.untyped_storage().resize_(0)
    assert memory.untyped_storage().size() == 0
    memory.untyped_storage().resize_(16)
    memory.view(torch.float32).copy_(torch.arange(4.0))
    assert view.tolist() == [1.0, 2.0]


def test_versions_of_several_tensors_are_set_and_shared_with_views():
    memory = torch.zeros(8)
    parameters = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
    for parameter, view in zip(parameters, memory.split(4), strict=True):
        compat.set_data(parameter, view)
    compat.set_versions(parameters, (7, 1 << 31))
    memory.zero_()
    assert [compat.version_of(parameter) for parameter in parameters] == [7, 1 << 31]
    assert compat.version_of(parameters[0][:2]) == 7
    with torch.no_grad():
        parameters[0].zero_()
    assert compat.version_of(parameters[0]) == 8


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", 20.0),
        ("wait timeout after 1500ms, keys: /default_pg/0", 1.5),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=600000) ran",
            600.0,
        ),
        ("[pair.cc:547] Connection closed by peer [127.0.0.1]:1", None),
    ],
)
def test_a_time_out_tells_its_length(message: str, seconds: float | None):
    assert compat.timed_out_after(RuntimeError(message)) == seconds


def test_users_of_a_storage_are_counted():
    memory = torch.empty(8)
    before = compat.storage_users(memory)
    view = memory[2:4]
    assert compat.storage_users(memory) == compat.storage_users(view) == before + 1
    del view
    assert compat.storage_users(memory) == before


def test_tensors_of_one_memory_are_told_from_others_even_where_it_is_empty():
    memory, empty = torch.empty(8), torch.empty(0)
    assert compat.share_storage(memory[2:4], memory.detach())
    assert compat.share_storage(empty, empty.detach())
    assert not compat.share_storage(memory, memory.clone())
    assert not compat.share_storage(empty, torch.empty(0))


def test_a_backward_tells_what_it_accumulates_from_what_it_returns():
    weight = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            seen.append(compat.accumulates(weight))
            return grad, grad

    Spy.apply(x, weight).sum().backward()
    torch.autograd.grad(Spy.apply(x, weight).sum(), x)
    torch.autograd.grad(Spy.apply(x, weight).sum(), [x, weight])
    Spy.apply(x, weight).sum().backward(inputs=[weight])
    assert seen == [True, False, False, True]


def test_a_backward_tells_which_nodes_it_comes_to():
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    left, right = x * 2, y * 2
    seen = []
    left.grad_fn.register_prehook(lambda _: seen.append([compat.is_due(one.grad_fn) for one in (left, right)]))
    (left + right).sum().backward(retain_graph=True)
    torch.autograd.grad((left + right).sum(), x, retain_graph=True)
    left.sum().backward()
    assert seen == [[True, True], [True, False], [True, False]]


def test_hooks_after_accumulation_are_noticed():
    weight = torch.nn.Parameter(torch.ones(3))
    assert not compat.has_accumulation_hooks(weight)
    handle = weight.register_post_accumulate_grad_hook(lambda _: None)
    assert compat.has_accumulation_hooks(weight)
    handle.remove()
    assert not compat.has_accumulation_hooks(weight)


def test_hooks_after_accumulation_move_to_another_parameter_with_their_handles():
    weight, other, seen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3)), []
    handle = weight.register_post_accumulate_grad_hook(lambda _: seen.append("moved"))
    hooks = compat.take_accumulation_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("later"))
    compat.give_accumulation_hooks(other, hooks)
    for each in (weight, other):
        each.sum().backward()
    assert seen == ["later", "moved"]
    handle.remove()
    other.sum().backward()
    assert seen == ["later", "moved"]
    assert not compat.take_accumulation_hooks(torch.nn.Parameter(torch.ones(3)))


def test_transforms_are_noticed():
    seen = []

    def spy(x):
        seen.append(compat.is_transformed())
        return x.sum()

    spy(torch.ones(2))
    torch.func.grad(spy)(torch.ones(2))
    torch.vmap(spy)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        spy(torch.ones(2))
    spy(torch.ones(2))
    assert seen == [False, True, True, True, False]


def test_hooks_for_all_modules_are_noticed():
    assert not compat.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert compat.has_global_hooks()
    handle.remove()
    assert not compat.has_global_hooks()


def test_tensors_that_are_made_of_others_are_noticed():
    assert compat.has_inner_tensors(Nibbles(*packed(torch.ones(2, 4))))
    assert not compat.has_inner_tensors(torch.ones(2))


def collectives(count: int, rank: int, world: int) -> None:
    group = dist.group.WORLD
    pieces = [torch.full((2,), float(rank + index)) for index in range(count)]
    gathered = [torch.empty(2 * world) for _ in range(count)]
    if count == 1:
        compat.all_gather_flat(gathered[0], pieces[0], group)
    else:
        compat.all_gather_coalesced(gathered, pieces, group)
    for index, output in enumerate(gathered):
        assert output.tolist() == [float(other + index) for other in range(world) for _ in range(2)]
    sums = [torch.empty(2) for _ in range(count)]
    if count == 1:
        compat.reduce_scatter_flat(sums[0], gathered[0], dist.ReduceOp.SUM, group)
    else:
        compat.reduce_scatter_coalesced(sums, gathered, dist.ReduceOp.SUM, group)
    for index, piece in enumerate(sums):
        assert piece.tolist() == [float(world * (rank + index))] * 2
    compat.all_reduce_coalesced(sums, dist.ReduceOp.SUM, group)
    for index, total in enumerate(sums):
        assert total.tolist() == [float(sum(world * (other + index) for other in range(world)))] * 2


def reduce_in_place(rank: int, world: int) -> None:
    """The result may be this rank's own part of the source."""
    source = torch.arange(2.0 * world) + rank
    compat.reduce_scatter_flat(source[2 * rank : 2 * rank + 2], source, dist.ReduceOp.SUM, dist.group.WORLD)
    expected = world * torch.arange(2.0 * world) + sum(range(world))
    assert torch.equal(source[2 * rank : 2 * rank + 2], expected[2 * rank : 2 * rank + 2])


def gather_in_place(rank: int, world: int) -> None:
    """A rank's piece may be its own part of the output."""
    output = torch.zeros(2 * world)
    piece = output[2 * rank : 2 * rank + 2]
    piece.fill_(rank + 1.0)
    compat.all_gather_flat(output, piece, dist.group.WORLD)
    assert output.tolist() == [other + 1.0 for other in range(world) for _ in range(2)]


def uneven_dtensor(rank: int, world: int) -> None:
    """A DTensor over uneven, row-aligned local rows of one memory, and its private `_local_tensor` and `_spec`."""
    mesh = dist.init_device_mesh("cpu", (world,))
    local = torch.ones(3 if rank else 1, 2)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1))
    assert tensor.shape == (4, 2)
    assert tensor._local_tensor.data_ptr() == local.data_ptr()
    assert DTensor(local, tensor._spec, requires_grad=True).requires_grad


def gloo_is_not_nccl(rank: int, world: int) -> None:
    """A group's own backend decides, and CPU tensors never travel by NCCL."""
    assert not compat.uses_nccl(dist.group.WORLD, torch.device("cpu"))
    assert not compat.uses_nccl(dist.group.WORLD, torch.device("cuda"))
    assert not compat.averages(dist.group.WORLD, "cpu"), "gloo refuses ReduceOp.AVG"


def every_name_of_nccl_is_nccl(rank: int, world: int) -> None:
    for name, expected in (
        ("nccl", True),
        ("nccl2", True),
        ("nccl-legacy", True),
        ("cpu:gloo,cuda:nccl", True),
        ("gloo", False),
    ):
        with mock.patch.object(dist, "get_backend", return_value=name):
            assert compat.uses_nccl(dist.group.WORLD, torch.device("cuda")) is expected, name


def equal_parts(rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    own = DTensor.from_local(torch.zeros(5 - rank, 2), mesh, [Shard(0)], run_check=False, shape=(9, 2), stride=(2, 1))
    assert compat.equal_part(own) == ((5 - rank, 2), (5 * rank, 0))


CASES = {
    "equal parts": equal_parts,
    "every name of NCCL is NCCL": every_name_of_nccl_is_nccl,
    "gloo is not taken for NCCL": gloo_is_not_nccl,
    "flat collectives": partial(collectives, 1),
    "coalesced collectives, also where the backend has none": partial(collectives, 3),
    "gather in place": gather_in_place,
    "reduce in place": reduce_in_place,
    "uneven DTensor": uneven_dtensor,
}


@pytest.fixture(scope="module")
def outcomes():
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", CASES)
def test_distributed_apis_do_what_is_relied_on(outcomes, case):
    assert not outcomes[case], outcomes[case]


def test_a_dispatch_mode_sees_what_a_function_is_made_of():
    seen = []

    class Watching(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            assert torch.Tag.pointwise in torch.ops.aten.mul.Tensor.tags
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.nn.functional.normalize(torch.ones(2, 2))
    assert "linalg_vector_norm" in seen
    assert "div" in seen


def test_a_tensor_inside_transforms_has_a_level_for_each_and_is_alone_outside():
    plain = torch.tensor([3.0, 5.0], requires_grad=True)
    levels = []

    def loss(value):
        levels.extend(compat.at_all_levels(value))
        return value.square()

    gradient = torch.func.vmap(torch.func.grad(loss))(plain)
    assert [type(level) for level in levels] == 3 * [Tensor]
    assert levels[2] is plain
    assert [level.shape for level in levels] == [(), (), (2,)]
    assert gradient.tolist() == [6.0, 10.0]
    assert compat.at_all_levels(plain)[0] is plain
    assert len(compat.at_all_levels(plain)) == 1


def test_setting_data_is_told_from_reading_it():
    assert torch.Tensor.data.__set__ == compat.set_data
    assert torch.Tensor.data.__get__ != compat.set_data
    assert torch.Tensor.grad.__set__ != compat.set_data


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a build with NCCL")
def test_nccl_can_scale_before_the_sum():
    assert compat.premul_sum(0.5) is not None


@pytest.mark.parametrize(
    ("version", "backend", "reason"),
    [((2, 27, 3), None, "NCCL 2.28, this is 2.27.3"), ((2, 28, 9), "NVSHMEM", "provided by NVSHMEM")],
)
def test_what_symmetric_memory_lacks_is_said(version, backend, reason):
    with (
        mock.patch("torch.cuda.nccl.version", return_value=version),
        mock.patch.object(compat.symm_mem, "get_backend", return_value=backend),
        mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(NCCL_CTA_POLICY_ZERO=2), create=True),
    ):
        assert reason in compat.no_symmetric_memory_because(torch.device("cuda"))


def test_a_place_in_a_file_is_what_pytorch_writes_into_its_tables(tmp_path):
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.save({"weights": torch.arange(6.0)}, checkpoint_id=tmp_path)
    table = dcp.FileSystemReader(tmp_path).read_metadata()
    (written,) = table.storage_data.values()
    assert compat.storage_info(written.relative_path, written.offset, written.length) == written


def test_every_function_of_compat_is_tested_here_or_on_gpus():
    here = Path(__file__)
    tested = {
        node.attr
        for path in (here, here.parents[1] / "gpu" / "test_symmetric.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "compat"
    }
    assert set(compat.__all__) <= tested, sorted(set(compat.__all__) - tested)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_of_8_bits_is_that_of_the_numbers_times_both_scales(dtype):
    torch.manual_seed(0)
    for left, rows in ((torch.float8_e4m3fn, 16), (torch.float8_e5m2, 7)):
        one, other = torch.randn(rows, 32).to(left), torch.randn(48, 32).to(torch.float8_e4m3fn)
        found = compat.scaled_mm(one, other.t(), torch.tensor(0.5), torch.tensor(3.0), dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(found, (1.5 * one.float() @ other.float().t()).to(dtype))


def test_a_grouped_product_multiplies_each_group_by_its_own_matrix():
    torch.manual_seed(0)
    rows, weights = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(3, 8, 16, dtype=torch.bfloat16)
    ends = torch.tensor([4, 4, 16], dtype=torch.int32)
    found = compat.grouped_mm(rows, weights, ends)
    expected = torch.cat((rows[:4] @ weights[0], rows[4:] @ weights[2]))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    outer = compat.grouped_mm(rows.t(), rows, ends)
    torch.testing.assert_close(outer[2], rows[4:].t() @ rows[4:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/a/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Timed out waiting 20000ms for send operation to complete"), True),
        (ValueError("Default process group has not been initialized"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 0"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (KeyError("process group"), False),
    ],
)
def test_errors_for_want_of_other_ranks_are_told_from_others(error, lost):
    assert compat.is_lost_connection(error) is lost


def aborted(rank, world):
    compat.abort_process_groups()
    assert not dist.is_initialized()
    compat.abort_process_groups()  # once more does nothing


def test_process_groups_can_be_aborted():
    run_distributed(aborted, 1)


def test_a_part_of_a_store_has_keys_of_its_own():
    store: compat.Store = dist.HashStore()
    compat.PrefixStore("one", store).set("key", "value")
    assert store.check(["one/key"])
    assert not compat.PrefixStore("two", store).check(["key"])


def meeting(rank, world):
    assert compat.carries_data(dist.group.WORLD)
    store = compat.default_store()
    for group in (compat.new_group(), compat.new_group([rank], backend="gloo")):
        assert rank in dist.get_process_group_ranks(group)
    store.add("met", 1)
    dist.barrier()
    return store.add("met", 0)


def test_ranks_meet_in_the_default_store():
    assert run_distributed(meeting, 2) == [2, 2]


def test_own_shards_say_what_this_rank_has():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)

    def placement(module: nn.Module, number: int = 0, *, is_first: bool = True) -> compat.OwnShard:
        return compat.OwnShard(1, lambda: range(2, 5), is_first=is_first, owner=(weakref.ref(module), number))

    assert placement(one).is_shard(1)
    assert placement(one)._local_shard_size_and_offset(9, 4, 1) == (3, 2)
    assert placement(one, is_first=False)._local_shard_size_and_offset(3, 4, 1) == (3, 0)
    assert placement(one) == Shard(1) == placement(one) != Shard(0)
    assert len({placement(one), placement(one), placement(one, 1), placement(other)}) == 3


def test_tensors_of_a_module_are_converted_by_the_rule_of_its_class():
    module = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    for part in module:
        compat.apply_to_tensors(part, lambda tensor: tensor.double(), recurse=True)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}


def test_distributed_data_parallel_looks_for_names_to_leave_alone():
    module = nn.Linear(2, 2)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert getattr(module, compat.IGNORED_BY_DDP) == ["bias"]


def test_operators_are_found_with_their_kernels():
    found = compat.overloads_of(torch.ops.aten.add)
    assert torch.ops.aten.add.Tensor in found
    assert all(isinstance(operator, compat.OpOverload) for operator in found)
    assert compat.overloads_of(None) == []
    assert compat.is_composite(torch.ops.aten.matmul.default)
    assert not compat.is_composite(torch.ops.aten.mm.default)


def test_batch_norms_have_one_class():
    assert all(isinstance(kind(2), compat.BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))


def test_what_lies_between_tensors_leaves_both_as_they_are():
    starts, ends = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.full((3,), 3.0)]
    found = compat.foreach_lerp(starts, ends, 0.5)
    assert [one.tolist() for one in found] == [[0.5, 0.5], [2.0, 2.0, 2.0]]
    assert starts[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("last", "flag"), [(3.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_unscaling_says_what_is_not_finite(last, flag):
    tensors, found_inf = [torch.ones(2), torch.tensor([last])], torch.zeros(())
    compat.foreach_unscale_(tensors, found_inf, torch.tensor(0.5))
    assert tensors[0].tolist() == [0.5, 0.5]
    assert found_inf == flag


def test_hooks_on_saved_tensors_are_found_and_transforms_admit_none():
    assert compat.saved_tensors_hooks_around() is None
    assert compat.allows_saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(abs, id):
        assert compat.saved_tensors_hooks_around() == (abs, id)
    allowed = []

    def inside(x):
        allowed.append((compat.allows_saved_tensors_hooks(), compat.in_transform()))
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    assert allowed == [(False, True)]
    assert not compat.in_transform()


def test_work_of_the_engine_is_plain_inside_a_transform():
    seen = []

    def inside(x):
        compat.outside_transforms(lambda y: seen.append(torch.zeros(2).data_ptr() + len(y)), "y")
        seen.append(compat.memory_of(x))
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    assert seen[0]
    assert seen[1] is None


def test_memory_that_a_program_refers_to_waits_for_the_stream():
    memory = mock.Mock(device=torch.device("cuda"))
    with mock.patch("torch.cuda.current_stream", return_value="stream"):
        compat.free_after_work_so_far(memory)
    memory.record_stream.assert_called_once_with("stream")


def test_a_gradient_has_a_second_name_for_classes_that_override_the_first():
    """The engine uses it in every unit, where a function of `compat` would be a call more for each parameter."""
    parameter = nn.Parameter(torch.ones(2))
    assert parameter._grad is None
    (2 * parameter).sum().backward()
    assert parameter._grad is parameter.grad
    parameter._grad = None
    assert parameter.grad is None


def test_a_profiler_that_records_is_found():
    assert not compat.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiled()
    assert not compat.is_profiled()


def _what_a_collective_is_given(rank, world):
    given = []

    class Answers(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace != "c10d":
                return func(*args, **(kwargs or {}))
            given.append((compat.group_of(args[1]).size(), compat.reduce_op_of(args[2]) == dist.ReduceOp.MAX))
            return args[0], compat.finished_work()

    tensor = torch.ones(2)
    with Answers():
        dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).wait()
    return given, tensor.tolist()


def test_an_operator_of_collectives_says_its_group_and_reduction_and_may_be_answered():
    for given, values in run_distributed(_what_a_collective_is_given, 2):
        assert given == [(2, True)]
        assert values == [1.0, 1.0]
