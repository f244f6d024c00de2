"""Checkpoints of sharded models: every rank writes its own rows. Files that hold whole tensors can be read as well.

For models of other libraries: `load_safetensors` reads pretrained weights into shards, `export_model` and `export_checkpoint` write
what Hugging Face's `from_pretrained` reads. `load_checkpoint` is `torch.load` for directories. `convert_checkpoint` converts those of other
programs to directories.

The code, from what uses the rest to what is used:

    lightning_io    a Lightning checkpoint dictionary is written and read. Begin here
    background      saves while training goes on
    safetensors     weights to and from safetensors files
    tools           checkpoints in one process: loaded, converted, summarized, verified
    state           what is saved and loaded of a sharded model
    io              files: where they are, how they are written and read
"""

from lightning_mfsdp.checkpoint.safetensors.export import export_checkpoint, export_model
from lightning_mfsdp.checkpoint.safetensors.load import load_safetensors
from lightning_mfsdp.checkpoint.tools.convert import convert_checkpoint
from lightning_mfsdp.checkpoint.tools.load import load_checkpoint

__all__ = ["convert_checkpoint", "export_checkpoint", "export_model", "load_checkpoint", "load_safetensors"]
