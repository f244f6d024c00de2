"""What a process of the tests is like before a call, so that the next call finds it so again."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_mfsdp.launch import communication

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCHLD,
)
# Their functions are what tests replace, and what is replaced for good if a test forgets to put it back.
_WATCHED = {
    *("os", "pathlib", "shutil", "signal", "time", "torch", "torch._tensor", "torch.autograd", "torch.cuda"),
    *("torch.distributed", "torch.distributed.checkpoint", "torch.distributed.distributed_c10d"),
    *("torch.distributed.tensor", "torch.distributed.tensor._api", "torch.nn.functional", "torch.nn.modules.linear"),
    *("torch.nn.modules.module", "torch.nn.parameter", "torch.optim.adamw", "torch.optim.optimizer", "torch.optim.sgd"),
    *("torch.utils.checkpoint", "lightning.pytorch.trainer.trainer", "lightning.pytorch.strategies.strategy"),
}
_MANY_CLASSES = ("torch", "torch.cuda")  # of storages, which nobody replaces parts of
_CHANGE_BY_THEMSELVES = {("torch", "Storage")}  # with the default dtype
# tqdm's, of which a process has one and which does nothing; and the engine's that ends by itself once its process group is gone.
_HARMLESS_THREADS = {"TMonitor", "mfsdp-gathers"}
_ENDING_THREADS = {"mfsdp-peers"}  # at once, when all ranks have closed their ends


class ProcessState:
    """A snapshot. `restore` puts back what it can, and says what it cannot: that process should serve no other call."""

    def __init__(self) -> None:
        self._settings = [(put, get()) for get, put in _settings()]
        self._signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self._loggers = {log: _of_logger(log) for log in _loggers()}
        self._threads = set(threading.enumerate())
        self._random = random.Random(0).getstate()
        self._numpy = numpy.random.RandomState(0).get_state()
        self._torch = torch.Generator().manual_seed(torch.default_generator.initial_seed()).get_state()
        self._names: dict[tuple[str, ...], Any] = dict(_names())
        self._known = {key[0] for key in self._names}
        self.seed()

    def seed(self) -> None:
        random.setstate(self._random)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    def restore(self) -> list[str]:
        """Put all back, after a call whose process group is gone."""
        for put, value in self._settings:
            put(value)
        for peers in communication._CONNECTED:  # as when the next process group is made
            peers.close()
        left = [*self._replaced(), *_hooks(), *self._running()]
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        for log in _loggers():  # those of modules that were imported just now are taken as they are
            level, log.handlers[:], log.disabled, log.propagate = self._loggers.setdefault(log, _of_logger(log))
            if log.level != level:
                log.setLevel(level)
        self.seed()
        _forget()
        return left

    def _replaced(self) -> Iterator[str]:
        for key, value in _names():
            if key in self._names:
                if self._names[key] is not value and not _is_hooked(value, self._names[key]):
                    yield f"{'.'.join(key)} is another"
            elif key[0] in self._known:
                if key[0].startswith("lightning_mfsdp") and not isinstance(value, types.ModuleType):
                    yield f"{'.'.join(key)} is new"
            else:  # of a module that the call was the first to import
                self._names[key] = value
        self._known.update(key[0] for key in self._names)

    def _running(self) -> Iterator[str]:
        threads = [one for one in threading.enumerate() if one not in self._threads]
        for one in threads:
            if one.name in _ENDING_THREADS:
                one.join(0.5)
        threads = [one for one in threads if one.is_alive()]
        yield from (f"thread {one.name}" for one in threads if not {type(one).__name__, one.name} & _HARMLESS_THREADS)
        yield from (f"process {one.name}" for one in multiprocessing.active_children())
        if dist.distributed_c10d._world.pg_map:
            yield f"process groups {list(dist.distributed_c10d._world.pg_names.values())}"
        if torch._C._len_torch_function_stack() or _get_current_dispatch_mode_stack():
            yield "a mode of torch functions"


def _is_hooked(step: Any, before: Any) -> bool:
    """Whether it is the step of an optimizer's class around which PyTorch has put hooks, as it does when it makes the first one."""
    return getattr(step, "hooked", False) and getattr(step, "__wrapped__", None) is before


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read a setting, and how to set it."""
    return [
        (lambda: None, torch.set_default_device),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
        (lambda: torch.get_autocast_dtype("cpu"), lambda value: torch.set_autocast_dtype("cpu", value)),
        (torch.autograd.is_multithreading_enabled, torch._C._set_multithreading_enabled),
        (torch.is_warn_always_enabled, torch.set_warn_always),
        (torch.serialization.get_safe_globals, _set_safe_globals),
        (torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion),
        (os.getcwd, os.chdir),
        (lambda: list(sys.argv), lambda value: _set_list(sys.argv, value)),
        (lambda: list(sys.path), lambda value: _set_list(sys.path, value)),
        *(
            (functools.partial(getattr, sys, name), functools.partial(setattr, sys, name))
            for name in ("stdout", "stderr", "excepthook", "unraisablehook")
        ),
        (lambda: threading.excepthook, functools.partial(setattr, threading, "excepthook")),
        (lambda: list(warnings.filters), _set_filters),
        (lambda: logging.root.manager.disable, logging.disable),
        (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
        (gc.get_threshold, lambda value: gc.set_threshold(*value)),
    ]


def _set_safe_globals(allowed: list[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)


def _set_list(target: list[str], value: list[str]) -> None:
    target[:] = value


def _set_filters(filters: list[Any]) -> None:
    """Also tells all modules to forget what they have warned of."""
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(log for log in named if isinstance(log, logging.Logger))]


def _of_logger(log: logging.Logger) -> tuple[int, list[logging.Handler], bool, bool]:
    return log.level, list(log.handlers), log.disabled, log.propagate


def _hooks() -> Iterator[str]:
    """Those that see every module or optimizer of the process."""
    for name, hooks in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict) and hooks:
            yield f"torch.nn.modules.module.{name}"
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        if getattr(sys.modules[torch.optim.Optimizer.__module__], name):
            yield f"torch.optim.optimizer.{name}"


def _forget() -> None:
    """Empty what is kept by names of process groups, or once for a process."""
    # What `debug._clear_sharding_prop_cache` of torch 2.11 does; torch 2.10 has no function for both.
    debug._clear_python_sharding_prop_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()
    torch.compiler.reset()
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_mfsdp"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _names() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Functions and classes of the watched modules, and what those classes have."""
    for name, module in list(sys.modules.items()):
        if name in _WATCHED or name.startswith("lightning_mfsdp"):
            for attribute, value in list(vars(module).items()):
                if callable(value) and (name, attribute) not in _CHANGE_BY_THEMSELVES:
                    yield (name, attribute), value
                if issubclass(type(value), type) and value.__module__ == name and name not in _MANY_CLASSES:
                    for part, inner in list(vars(value).items()):
                        if callable(inner) or isinstance(inner, property | classmethod | staticmethod):
                            yield (name, attribute, part), inner
