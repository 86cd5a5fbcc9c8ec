"""Tokens of different origins look different with and without colour, and no figure is made up."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from cluster.generation import Generation
from cluster.terminal import STYLES, figures, legend, printable, styled
from protos.inference_pb2 import (
    ORIGIN_ACCEPTED,
    ORIGIN_BONUS,
    ORIGIN_PLAIN,
    ORIGIN_RECOVERED,
    Origin,
    Token,
    Usage,
)

ORIGINS = [ORIGIN_ACCEPTED, ORIGIN_RECOVERED, ORIGIN_BONUS, ORIGIN_PLAIN]
DRAFTED = Generation(
    tokens=[Token(id=1, text="a", origin=ORIGIN_ACCEPTED)] * 3,
    finish_reason="length",
    seed=77,
    seconds=2.0,
    first_token_seconds=0.5,
    usage=Usage(
        num_completion_tokens=3,
        num_rounds=2,
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=1,
        acceptance_rate=0.25,
        mean_acceptance_length=1.5,
        num_q_bytes=800,
    ),
)


def _drawn(text: Text, **options: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", **options)  # type: ignore[arg-type]
    console.print(text, end="", soft_wrap=True)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_text_is_the_tokens_joined_whatever_their_origins() -> None:
    tokens = [
        Token(text=text, origin=origin)
        for text, origin in zip(["a [b]", "\n", " c", "d\n"], ORIGINS, strict=True)
    ]
    assert styled(tokens).plain == "a [b]\n cd\n"
    assert _drawn(styled([Token(text="x\n\n y\n", origin=ORIGIN_PLAIN)])) == "x\n\n y\n"


@pytest.mark.parametrize("no_color", [False, True])
def test_every_origin_looks_different(no_color: bool) -> None:
    looks = {_drawn(styled([Token(text="x", origin=origin)]), no_color=no_color) for origin in ORIGINS}
    assert len(looks) == len(ORIGINS)


def test_every_origin_of_the_interface_but_unspecified_has_a_style() -> None:
    assert set(STYLES) == set(Origin.values()) - {0}


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    text = printable("a\x1b[2Jb\x07\x9b\x7f\tc\n")
    assert text == "a␛[2Jb␇\ufffd␡\tc\n"


def test_the_legend_names_what_can_occur() -> None:
    assert all(f"{word}: " in legend().plain for word in ("accepted", "recovered", "bonus", "plain"))


def test_the_figures_say_what_was_measured() -> None:
    line = figures(DRAFTED).plain
    for part in (
        "3 tokens in 2.00 s from the request to the last token",
        "the first after 0.50 s",
        "1.5 tokens/s",
        "2 rounds",
        "1 of 4 draft tokens accepted (25.0%)",
        "mean acceptance length 1.50",
        "200 bytes of q a draft token",
        "seed 77",
    ):
        assert part in line


def test_a_rate_is_absent_when_nothing_was_drafted() -> None:
    usage = Usage(num_completion_tokens=1, num_rounds=1)
    plain = Generation(tokens=DRAFTED.tokens[:1], seconds=1.0, first_token_seconds=1.0, usage=usage)
    assert "accept" not in figures(plain).plain
    assert "acceptance_rate" not in plain.as_json()["usage"]
    assert "1 token in" in figures(plain).plain


def test_no_tokens_have_no_times() -> None:
    line = figures(Generation(finish_reason="stop")).plain
    assert "tokens/s" not in line
    assert "first" not in line
    assert "seconds" not in Generation().as_json()


def test_rounds_whose_drafter_failed_are_not_kept_silent() -> None:
    usage = Usage(num_fallbacks=2)
    assert "2 rounds without the drafter" in figures(Generation(usage=usage)).plain
