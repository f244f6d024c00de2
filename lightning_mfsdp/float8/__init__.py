"""FP8 without Transformer Engine: linear layers that multiply 8-bit matrices with PyTorch's own product, eager and compiled."""

from lightning_mfsdp.float8.layers import Float8Linear, replace_linear_layers
from lightning_mfsdp.float8.product import MULTIPLE, float8_linear

__all__ = ["MULTIPLE", "Float8Linear", "float8_linear", "replace_linear_layers"]
