"""Products of few rows with large matrices, in the form that is fastest on this machine.

A decoding step multiplies a handful of rows with every weight of a model, so its floor is reading the weights
once. Libraries reach that floor with one form of a matrix and miss it by a factor of two with another,
depending on the processor and on the number of rows: so the forms are measured, once a process, on the
model's own matrices. Knows torch; knows no model.

M rows, I inputs, O outputs.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]  # [M, I] -> [M, O]
Form = Callable[[Tensor, Tensor | None], Product]  # weight [O, I], bias [O] or None

_MEASURED_BYTES = 64 << 20  # more than most processors cache, so that the measure is of memory
_MEASURED_ROWS = (1, 3, 6)
_REPEATS = 3


def plain(weight: Tensor, bias: Tensor | None) -> Product:
    """The weight as it is stored."""
    return partial(linear, weight=weight, bias=bias)


def packed(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN's own layout of a float32 matrix: the rows of x are few, so the weight leads.

    torch offers it to its compiler only; where it does not work `fastest_form` does without.
    """
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        return multiply(x, layout, bias, "none", [], "")  # type: ignore[no-any-return]

    return product


def weight_major(weight: Tensor, bias: Tensor | None) -> Product:
    """(W xᵀ)ᵀ: the same sums by another kernel of the library."""
    if bias is None:
        return lambda x: (weight @ x.T).T
    return lambda x: torch.addmm(bias[:, None], weight, x.T).T


def int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Weights in 8 bits with a scale each output, inputs in 8 bits with one scale for the whole pass.

    Two to three times as fast as float32, whose bytes are the floor. What a row gives depends on the rows
    beside it, so this is for drafters alone. Crude: of the acceptance of a 2-layer draft it costs 2 %, of a
    30-layer one a quarter.
    """
    weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise ValueError("a weight is not finite; 8 bits cannot hold it")
    scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12).double()
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():  # torch moves its quantised tensors elsewhere, in a later version
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_channel(weight.contiguous(), scales, zeros, 0, torch.qint8)
        packed_weight = torch.ops.quantized.linear_prepack(quantised, bias)
    multiply = torch.ops.quantized.linear_dynamic

    def product(x: Tensor) -> Tensor:
        try:  # Inputs of 7 bits: AVX2 adds products in 16 bits, which the eighth would overflow.
            return multiply(x.contiguous(), packed_weight, True)  # type: ignore[no-any-return]
        except RuntimeError:  # they have no scale
            if bool(x.isfinite().all()):
                raise
            return x.new_full((len(x), len(scales)), torch.nan)

    return product


def fastest_form(weights: Sequence[Tensor]) -> Form:
    """The form with the shortest passes of a few rows over these matrices, all of one model.

    Only float32 on a CPU has a choice. Takes a fraction of a second; a form that fails or whose products
    differ from the plain ones is left out.
    """
    sample = _sample(weights)
    if sample[0].device.type != "cpu" or sample[0].dtype != torch.float32:
        return plain
    forms = [plain, *(form for form in (packed, weight_major) if _is_right(form, sample[0]))]
    return min(forms, key=lambda form: _cost([form(weight, None) for weight in sample], sample))


def _sample(weights: Sequence[Tensor]) -> list[Tensor]:
    sample, num_bytes = [], 0
    for weight in weights:
        sample.append(weight)
        num_bytes += weight.nbytes
        if num_bytes >= _MEASURED_BYTES:
            break
    return sample


def _is_right(form: Form, weight: Tensor) -> bool:
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected = linear(x, weight)
    try:
        return bool(
            torch.allclose(form(weight, None)(x), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        )
    except (RuntimeError, AttributeError):  # this build of torch lacks it
        return False


def _cost(products: Sequence[Product], weights: Sequence[Tensor]) -> float:
    """Seconds of the best pass, summed over the numbers of rows."""
    seconds = 0.0
    for num_rows in _MEASURED_ROWS:
        inputs = {size: torch.ones(num_rows, size) for size in {weight.shape[1] for weight in weights}}
        seconds += min(_pass_seconds(products, weights, inputs) for _ in range(_REPEATS))
    return seconds


def _pass_seconds(products: Sequence[Product], weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    started = time.perf_counter()
    for product, weight in zip(products, weights, strict=True):
        product(inputs[weight.shape[1]])
    return time.perf_counter() - started
