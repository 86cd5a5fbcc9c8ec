"""Every form of a product gives the plain product; the fastest form is one of them."""

import time

import pytest
import torch
from torch.nn.functional import linear

from workers.products import Form, Product, _is_right, fastest_form, int8, packed, plain, weight_major


@pytest.mark.parametrize("form", [plain, packed, weight_major])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_form_gives_the_plain_product(form: Form, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32), torch.randn(num_rows, 32)
    bias = torch.randn(48) if has_bias else None
    with torch.inference_mode():
        product = form(weight, bias)(x)
    torch.testing.assert_close(product, linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_eight_bits_give_the_product_to_a_percent(has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256), torch.randn(5, 256)
    bias = torch.randn(48) if has_bias else None
    with torch.inference_mode():
        error = int8(weight, bias)(x) - linear(x, weight, bias)
    assert 0.0 < float(error.norm() / linear(x, weight).norm()) < 0.02


def test_eight_bits_take_a_row_of_zeros() -> None:
    weight = torch.zeros(3, 8)
    assert not int8(weight, None)(torch.ones(2, 8)).any()


@pytest.mark.parametrize("fast", [plain, packed, weight_major])
def test_the_form_with_the_shortest_passes_is_chosen(fast: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(form: Form) -> Form:
        def build(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
            product = form(weight, bias)

            def late(x: torch.Tensor) -> torch.Tensor:
                time.sleep(0.01)
                return product(x)

            return late

        return build

    if not _is_right(fast, torch.randn(8, 8)):
        pytest.skip(f"this build of torch lacks {fast.__name__} products")
    forms = {form.__name__: form if form is fast else slow(form) for form in (plain, packed, weight_major)}
    for name, form in forms.items():
        monkeypatch.setattr(f"workers.products.{name}", form)
    assert fastest_form([torch.randn(32, 32)]) is fast


def test_a_form_is_chosen_for_float32_alone() -> None:
    assert fastest_form([torch.randn(32, 32).bfloat16()]) is plain


def test_a_form_that_this_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    assert fastest_form([torch.randn(32, 32)]) in (plain, weight_major)


def test_eight_bits_say_that_inputs_are_not_finite_and_refuse_weights_that_are_not() -> None:
    weight = torch.randn(3, 8)
    for value in (torch.nan, torch.inf):
        assert int8(weight, None)(torch.tensor([[value] * 8, [1.0] * 8])).isnan().any()
        with pytest.raises(ValueError, match="not finite"):
            int8(torch.full((3, 8), value), None)
