"""What the server of processes imports before it forks any: all that is heavy, and nothing that starts a thread."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil

from lightning.fabric.utilities import registry

import lightning_mfsdp
import tests.helpers.distributed
import tests.helpers.process_state  # noqa: F401

for found in pkgutil.walk_packages(lightning_mfsdp.__path__, f"{lightning_mfsdp.__name__}."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ImportError:  # of a package that is not there, Triton for one
            continue

# What many models of tests are made of, where it is installed.
for name in ("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "peft"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue

# Each Trainer asks all installed packages for callbacks: in processes that make hundreds of Trainers they answer once.
registry.entry_points = functools.cache(registry.entry_points)

# A collection in a forked process looks at what the process made, and copies no page for what was there before.
gc.collect()
gc.freeze()
