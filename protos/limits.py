"""Bounds that both ends of the wire hold, and the defaults that go with them."""

from typing import Annotated, Literal

from pydantic import Field

MAX_DRAFT_TOKENS = 64  # K of a round
DEFAULT_SUPPORT = 64  # ids of a sparse q row; ARCHITECTURE.md has the table it was chosen from
MAX_SUPPORT = 4096

AUTO: Literal["auto"] = "auto"  # K is chosen round by round
NumDraftTokens = Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]

MAX_GROUPS = 64
NumGroups = Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_GROUPS)]  # "auto": by what pays
