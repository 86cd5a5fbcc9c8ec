"""Root-mean-square norms, x / sqrt(mean(x^2) + epsilon) * weight, in few steps.

Knows torch only. A decoding step has two norms a layer of a few hundred numbers each: what they cost is the
number of calls.

N rows, I numbers of a row.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Norm = Callable[[Tensor], Tensor]  # [..., I] -> [..., I]


def rms_norm_of(weight: Tensor, epsilon: float) -> Norm:
    """The norm over the last dimension with this weight `[I]`.

    torch has one kernel for it on GPUs and eight on CPUs; there, in float32, four do: with |x| the Euclidean
    norm, it is x / hypot(|x|, sqrt(I * epsilon)) * (sqrt(I) * weight).
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: rms_norm(x, weight.shape, weight, epsilon)
    size = weight.numel()
    scaled, least = math.sqrt(size) * weight, torch.tensor(math.sqrt(size * epsilon))

    def norm(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(length.hypot_(least)).mul_(scaled)

    return norm
