"""The error of everything between text and token ids."""


class TextError(ValueError):
    """A folder, prompt or conversation that cannot be used; the message names the field and the value."""
