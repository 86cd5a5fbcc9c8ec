"""What `outrider generate` does: find the models, deploy them, send one request, show what comes, end
everything.

Knows the order of these steps, and the two streams of a terminal. Each step stands in a module of its own;
Ray and torch are loaded by none of them, but in the processes that they start.
"""

import json
import os
import sys
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from cluster.deployment import DeploymentFailed, private_deployment
from cluster.generation import Generation, GenerationFailed, generate
from cluster.memory import DoesNotFit
from cluster.private_run import Refused, Wish, check_options, prepare
from cluster.progress import Steps
from cluster.terminal import figures, legend, printable, styled
from protos.inference_pb2 import Token
from workers.checkpoints import ModelRefused

DONE, FAILED, REFUSED = 0, 1, 2  # exit codes


def generate_text(wish: Wish, *, startup_seconds: float, as_json: bool) -> int:
    """Do it, say what happened, and return the exit code."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        wish = replace(wish, prompt=_read_prompt(wish.prompt))
        check_options(wish)
        if not startup_seconds > 0:
            raise Refused(f"startup_timeout is {startup_seconds}; it must lie above 0")
        generation = _run(wish, startup_seconds, None if as_json else out, err)
    except Refused as error:
        return _say_error(err, _with_options(str(error)), REFUSED)
    except GenerationFailed as error:
        return _say_error(err, str(error), REFUSED if error.refused else FAILED)
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its exit
        return FAILED
    except (ModelRefused, DeploymentFailed, DoesNotFit) as error:
        return _say_error(err, str(error), FAILED)
    if as_json:
        print(json.dumps(generation.as_json()))
    else:
        err.print(figures(generation), style="dim", soft_wrap=not err.is_terminal)
    return DONE


def _run(wish: Wish, startup_seconds: float, out: Console | None, err: Console) -> Generation:
    """Prepare, deploy, generate; `out` gets the text as it comes."""
    with Steps(err) as steps:
        run = prepare(wish, steps.say)
        steps.note(run.memory)
        with private_deployment(run.plan, steps.say, startup_seconds=startup_seconds) as deployed:
            steps.say("Reading the prompt")
            if out is None:
                return generate(deployed.address, run.request, lambda tokens: None)
            screen = _Screen(out, err, steps, has_legend=run.plan.draft is not None)
            tail = ""
            try:
                generation = generate(deployed.address, run.request, screen.show)
                tail = generation.tail
                return generation
            finally:
                screen.close(tail)


class _Screen:
    """The text on standard output as it comes: in colours on a terminal, as it is elsewhere."""

    def __init__(self, out: Console, err: Console, steps: Steps, *, has_legend: bool) -> None:
        self._out = out
        self._err = err
        self._steps = steps
        self._has_legend = has_legend
        self._begun = False

    def show(self, tokens: list[Token]) -> None:
        """Show what a round committed."""
        if not self._begun:
            self._begun = True
            self._steps.end()
            if self._out.is_terminal and self._has_legend:
                self._err.print(legend())
        if self._out.is_terminal:
            self._out.print(styled(tokens), end="", soft_wrap=True)
        else:
            self._write("".join(token.text for token in tokens))

    def close(self, tail: str) -> None:
        """Show what was held back, and end the line if there is one."""
        if self._begun:
            self._write((printable(tail) if self._out.is_terminal else tail) + "\n")

    def _write(self, text: str) -> None:
        self._out.file.write(text)
        self._out.file.flush()


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise Refused(f"prompt on standard input is not UTF-8 at byte {error.start}") from None


_OPTIONS = {"num_draft_tokens": "--draft-tokens", "startup_timeout": "--startup-timeout"} | {
    name: "--" + name.replace("_", "-")
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
}


def _with_options(sentence: str) -> str:
    """The sentence with the option that was typed in place of the field that it became."""
    field, _, rest = sentence.partition(" ")
    return f"{_OPTIONS.get(field, field)} {rest}"


def _say_error(err: Console, error: str, code: int) -> int:
    err.print(Text("Error: ", "bold red") + Text(error, "not bold default"), soft_wrap=True)
    return code
