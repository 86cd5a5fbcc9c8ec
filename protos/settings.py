"""The base of every configuration: frozen, and an unknown key is refused with the nearest right one."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """A component's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, values: Any) -> Any:
        """Refuse the first unknown key, naming the one that was probably meant."""
        known = sorted(cls.model_fields)
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"{cls.__name__} has no {key!r}; {hint}")
        return values
