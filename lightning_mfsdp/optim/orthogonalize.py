"""orthogonalize: turns a matrix into one nearby whose singular values are about one, by the Newton-Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, as in `torch.optim.Muon`; the same operations
in the same order, so the results are the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthogonalize", "orthogonalize_stack", "work_of"]


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring all singular values near one.

    Args:
        matrix: `[R, C]`, bfloat16, contiguous. Overwritten.
        coefficients: Of x, x^3 and x^5 in the polynomial that each step applies to the singular values.
        steps: How often.
        eps: Smallest norm that the matrix is divided by.

    Returns:
        `[R, C]`, bfloat16; transposed in memory where R > C.
    """
    linear, cubic, quintic = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    current = matrix.T if is_tall else matrix
    current.div_(current.norm().clamp(min=eps))  # no singular value is above one then
    for _ in range(steps):
        gram = current @ current.T
        polynomial = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        current = torch.addmm(current, polynomial, current, beta=linear)
    return current.T if is_tall else current


def orthogonalize_stack(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """`orthogonalize` for each matrix of a stack, in few launches.

    Args:
        matrices: `[E, R, C]`, bfloat16, contiguous. Overwritten.
        coefficients: As there.
        steps: As there.
        eps: As there, of each matrix.

    Returns:
        `[E, R, C]`, bfloat16.
    """
    if (
        len(matrices) == 1
    ):  # PyTorch multiplies a batch of one otherwise than a matrix, and otherwise than larger batches
        return orthogonalize(matrices[0], coefficients, steps, eps)[None]
    linear, cubic, quintic = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    current = matrices.mT if is_tall else matrices
    current.div_(torch.linalg.vector_norm(current, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = current @ current.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        current = torch.baddbmm(current, polynomial, current, beta=linear)
    return current.mT if is_tall else current


def work_of(shape: torch.Size) -> int:
    """Multiplications in one step, to balance the work: a product with the shorter side squared three times, once with itself."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)
