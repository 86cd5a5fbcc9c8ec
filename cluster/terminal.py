"""How a generation looks on a terminal: tokens told apart by where they came from, and a line of figures.

Pure functions from messages to rich's Text. Knows no console and prints nothing.
"""

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from cluster.generation import Generation
from protos.inference_pb2 import (
    ORIGIN_ACCEPTED,
    ORIGIN_BONUS,
    ORIGIN_PLAIN,
    ORIGIN_RECOVERED,
    Token,
)

# Colours of Okabe and Ito's palette, which people with any colour vision tell apart; the second attribute
# of each serves where there is no colour. Mid tones, readable on light and dark.
STYLES = {
    ORIGIN_ACCEPTED: Style(color="#0090d0", underline=True),
    ORIGIN_RECOVERED: Style(color="#d55e00", bold=True),
    ORIGIN_BONUS: Style(color="#009e73", italic=True),
    ORIGIN_PLAIN: Style(),
}
_MEANINGS = {
    ORIGIN_ACCEPTED: ("accepted", "drafted, kept"),
    ORIGIN_RECOVERED: ("recovered", "instead of a rejected draft"),
    ORIGIN_BONUS: ("bonus", "behind a draft kept whole"),
    ORIGIN_PLAIN: ("plain", "no draft"),
}
# Control characters could move the cursor or worse; they are shown as their pictures instead.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """The text with control characters, other than line feed and tab, replaced by pictures of them."""
    return text.translate(_PICTURES)


def styled(tokens: Iterable[Token]) -> Text:
    """The tokens' text, each in the style of its origin."""
    text = Text()
    for token in tokens:
        text.append(printable(token.text), STYLES.get(token.origin, Style()))
    return text


def legend() -> Text:
    """What the styles mean, in one line."""
    text = Text()
    for name, meaning, style in [(*_MEANINGS[origin], STYLES[origin]) for origin in _MEANINGS]:
        text.append(" · " if text else "")
        text.append(name, style)
        text.append(f": {meaning}")
    return text


def figures(generation: Generation) -> Text:
    """Counts, times and rates of a finished generation, in one line; a rate of nothing is left out."""
    usage = generation.usage
    parts = [plural(usage.num_completion_tokens, "token")]
    if generation.seconds is not None and generation.first_token_seconds is not None:
        parts[0] += f" in {generation.seconds:.2f} s from the request to the last token"
        parts.append(f"the first after {generation.first_token_seconds:.2f} s")
    if generation.tokens_per_second is not None:
        parts.append(f"{generation.tokens_per_second:.1f} tokens/s")
    parts.append(plural(usage.num_rounds, "round"))
    if usage.num_draft_tokens:
        parts.append(f"{usage.num_drafts} with a draft")
        parts.append(
            f"{usage.num_accepted_tokens} of {usage.num_draft_tokens} draft tokens accepted"
            f" ({usage.acceptance_rate:.1%})"
        )
        parts.append(f"mean acceptance length {usage.mean_acceptance_length:.2f}")
        parts.append(f"{usage.num_q_bytes / usage.num_draft_tokens:.0f} bytes of q a draft token")
    if usage.num_fallbacks:
        parts.append(f"{plural(usage.num_fallbacks, 'round')} without the drafter, which failed")
    parts.append(f"finished by {_FINISHES.get(generation.finish_reason, generation.finish_reason)}")
    parts.append(f"seed {generation.seed}")
    return Text(", ".join(parts))


_FINISHES = {"stop": "an end token", "length": "max_tokens or the context's end", "abort": "an abort"}


def plural(count: int, noun: str) -> str:
    """The count and what is counted."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
