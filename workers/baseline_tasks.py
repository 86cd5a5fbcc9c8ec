"""What goes to the process of transformers' own generation (`workers.baseline`) and what comes back.

Values only, for both ends of its pipes; torch is not needed to read them.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from protos.settings import Settings


class BaselineModels(Settings):
    """The first line: what to load, in float32."""

    target: Path
    assistant: Path | None  # None: no assisted task will come
    num_threads: int = Field(ge=1)  # torch's


class BaselineReady(Settings):
    """The answer to it, once all is loaded."""

    # The draft's own or transformers' default, as are the next two; None: no assistant.
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None


class BaselineTask(Settings):
    """One text to write, end tokens or not, to its full length."""

    kind: Literal["plain", "assisted"]
    prompt: tuple[int, ...] = Field(min_length=1)
    num_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)  # 0: greedy
    seed: int = Field(ge=0)


class BaselineText(Settings):
    """What came of a task. Passes are counted: each of the assistant draws a draft token, each of the
    target commits a token beside the accepted ones.
    """

    tokens: tuple[int, ...]
    seconds: float  # of the whole call, the prompt's pass included
    num_rounds: int  # the target's passes
    num_drafts: int  # of them, those with draft tokens
    num_draft_tokens: int

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were kept."""
        return len(self.tokens) - self.num_rounds


class BaselineBatch(Settings):
    """Texts to write in one `generate`, each as in BaselineTask; the prompts are padded on the left."""

    kind: Literal["batch"] = "batch"
    prompts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    num_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    seed: int = Field(ge=0)


class BaselineTexts(Settings):
    """What came of a batch."""

    texts: tuple[tuple[int, ...], ...]
    seconds: float  # of the whole call, the prompts' pass included


class GapTask(Settings):
    """Asks how near to a tie the target's next token is."""

    kind: Literal["gap"] = "gap"
    prompt: tuple[int, ...] = Field(min_length=1)


class Gap(Settings):
    """By how much the best logit exceeds the second."""

    gap: float


class BaselineRequest(Settings):
    """A line for the process once it is ready."""

    task: BaselineTask | BaselineBatch | GapTask = Field(discriminator="kind")
