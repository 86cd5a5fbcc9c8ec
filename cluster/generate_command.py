"""What `outrider generate` does: send one request to a deployment that is up, or to a private one that it
starts and ends, and show what comes.

Knows the order of these steps, and the two streams of a terminal. Each step stands in a module of its own;
Ray and torch are loaded by none of them, but in the processes that they start.
"""

import json
import os
import sys
from dataclasses import dataclass, replace

from rich.console import Console

from cluster.answering import NoAnswer, require_answer
from cluster.deployment import DeploymentFailed, starting_ray
from cluster.deployment_state import (
    DEFAULT_NAME,
    BadName,
    DeploymentState,
    DeploymentStateError,
    check_name,
    read_state,
)
from cluster.finding import NO_DRAFT, find
from cluster.generation import Generation, GenerationFailed, generate
from cluster.memory import DoesNotFit
from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error, with_option
from cluster.private_run import Models, Wish, check_options, full_request, load_text, prepare
from cluster.progress import Steps
from cluster.terminal import figures, legend, printable, styled
from protos.inference_pb2 import GenerateRequest, Token
from workers.checkpoints import ModelRefused


@dataclass(frozen=True, slots=True)
class Place:
    """Where to generate, as a person says it."""

    target: str | None  # None: the deployment's
    draft: str | None
    deployment: str | None  # its name; None: the default one if it is up
    is_private: bool  # on a deployment that ends with the text, even if one is up
    startup_seconds: float

    def find(self) -> DeploymentState | None:
        """The deployment to use; None: a private one. Raises Refused, or DeploymentStateError."""
        wants_private = self.is_private or self.target is not None or self.draft is not None
        if self.deployment is not None and wants_private:
            raise Refused(
                f"deployment is {self.deployment}; it cannot be used with --private, --target or --draft,"
                " which ask for a private one"
            )
        try:
            check_name(self.deployment or DEFAULT_NAME)
        except BadName as error:
            raise Refused(f"deployment {str(error).removeprefix('name ')}") from None
        state = None if wants_private else read_state(self.deployment or DEFAULT_NAME)
        if state is None and self.deployment is not None:
            raise DeploymentStateError(
                f"No deployment {self.deployment!r} is up: start it with `outrider up --name"
                f" {self.deployment}`, or leave out --deployment."
            )
        return state

    def models(self) -> Models:
        """What a private deployment runs."""
        named = {"target": self.target, "draft": self.draft}
        return Models(**{role: name for role, name in named.items() if name is not None})


def generate_text(wish: Wish, place: Place, *, as_json: bool) -> int:
    """Do it, say what happened, and return the exit code."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        wish = replace(wish, prompt=_read_prompt(wish.prompt))
        check_options(wish)
        require_seconds("startup_timeout", place.startup_seconds)
        state, screen_out = place.find(), None if as_json else out
        if state is None:
            generation = _run_privately(wish, place, screen_out, err)
        else:
            generation = _run_on(state, wish, screen_out, err)
    except Refused as error:
        return say_error(err, with_option(str(error), _OPTIONS), REFUSED)
    except GenerationFailed as error:
        return say_error(err, str(error), REFUSED if error.refused else FAILED)
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its exit
        return FAILED
    except (ModelRefused, DeploymentFailed, DeploymentStateError, NoAnswer, DoesNotFit) as error:
        return say_error(err, str(error), FAILED)
    if as_json:
        print(json.dumps(generation.as_json()))
    else:
        err.print(figures(generation), style="dim", soft_wrap=not err.is_terminal)
    return DONE


def _run_privately(wish: Wish, place: Place, out: Console | None, err: Console) -> Generation:
    """Find, prepare while Ray starts, deploy, generate; `out` gets the text as it comes."""
    models = place.models()
    if models.draft == NO_DRAFT and wish.num_draft_tokens:
        problem = f"is {wish.num_draft_tokens}; there is no drafter with --draft {NO_DRAFT}"
        raise Refused(f"num_draft_tokens {problem}")
    with Steps(err) as steps:
        if not place.is_private and (place.target or place.draft) and read_state(DEFAULT_NAME) is not None:
            steps.note("A private deployment beside the one that is up, since --target or --draft is given")
        draft = models.draft if models.num_draft_tokens(wish) else None
        found = find(models.target, draft, steps.say)
        with starting_ray() as ray:
            run = prepare(wish, models, found)
            steps.note(run.memory)
            with ray.serving(run.plan, steps.say, startup_seconds=place.startup_seconds) as deployed:
                if wish.chat is None:
                    _note_continuation(run.request, models.target, steps)
                steps.say("Reading the prompt")
                has_legend = run.plan.draft is not None
                return _show(deployed.address, run.request, out, err, steps, has_legend=has_legend)


def _run_on(state: DeploymentState, wish: Wish, out: Console | None, err: Console) -> Generation:
    """Generate on a deployment that is up."""
    with Steps(err) as steps:
        draft = "no draft" if state.draft is None else f"draft {state.draft}, {state.draft_tokens_in_words}"
        steps.note(f"On the deployment {state.name!r} at {state.address}: target {state.target}, {draft}")
        require_answer(state)
        request = full_request(wish, state.target, load_text(state.target_folder))
        if wish.chat is None:
            _note_continuation(request, state.target, steps)
        steps.say("Reading the prompt")
        return _show(state.address, request, out, err, steps, has_legend=state.draft is not None)


def _note_continuation(request: GenerateRequest, target: str, steps: Steps) -> None:
    if request.HasField("text"):
        steps.note(f"{target} has no chat template: the prompt is continued as it is, not answered")


def _show(
    address: str,
    request: GenerateRequest,
    out: Console | None,
    err: Console,
    steps: Steps,
    *,
    has_legend: bool,
) -> Generation:
    """Send the request; `out`, if there is one, gets the text as it comes."""
    if out is None:
        return generate(address, request, lambda tokens: None)
    screen = _Screen(out, err, steps, has_legend=has_legend)
    tail = ""
    try:
        generation = generate(address, request, screen.show)
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
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "deployment")
}
