"""How a command ends: its exit code, and what went wrong as one sentence."""

from rich.console import Console
from rich.text import Text

DONE, FAILED, REFUSED = 0, 1, 2  # exit codes


def say_error(err: Console, sentence: str, code: int) -> int:
    """Print the sentence and return the code."""
    err.print(Text("Error: ", "bold red") + Text(sentence, "not bold default"), soft_wrap=True)
    return code
