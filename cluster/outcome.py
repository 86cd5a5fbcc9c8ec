"""How a command ends: its exit code, and what went wrong as one sentence."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

DONE, FAILED, REFUSED = 0, 1, 2  # exit codes
MAX_SECONDS = 86_400.0  # of any wait that an option sets


class Refused(ValueError):
    """The sentence names what was refused: the field, its value and the limit, or the model."""


def require_seconds(name: str, value: float, *, lowest: float = 0.001) -> None:
    """Raise Refused for a time that is not from `lowest` seconds to a day."""
    if not lowest <= value <= MAX_SECONDS:  # NaN lies nowhere
        raise Refused(f"{name} is {value:g}; it must lie in {lowest:g}..{MAX_SECONDS:g} s")


def with_option(sentence: str, options: Mapping[str, str]) -> str:
    """The sentence with the option that was typed in place of the field that it became."""
    field, _, rest = sentence.partition(" ")
    return f"{options.get(field, field)} {rest}"


def say_error(err: Console, sentence: str, code: int) -> int:
    """Print the sentence and return the code."""
    err.print(Text("Error: ", "bold red") + Text(sentence, "not bold default"), soft_wrap=True)
    return code
