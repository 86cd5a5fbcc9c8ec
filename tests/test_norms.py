"""The norm in few steps is torch's."""

import pytest
import torch
from torch.nn.functional import rms_norm

from workers.norms import rms_norm_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0, 1e6])
def test_it_is_torchs(dtype: torch.dtype, epsilon: float, scale: float) -> None:
    torch.manual_seed(0)
    x, weight = scale * torch.randn(3, 5, 96, dtype=dtype), torch.randn(96, dtype=dtype)
    expected = rms_norm(x, weight.shape, weight, epsilon)
    torch.testing.assert_close(rms_norm_of(weight, epsilon)(x), expected, rtol=3e-6, atol=1e-7)
