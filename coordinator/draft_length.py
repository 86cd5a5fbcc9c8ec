"""How many tokens to draft. Pure arithmetic, decided before any draw and never from the draws themselves."""


def draft_length(wanted: int, num_remaining: int, length: int, draft_max_length: int) -> int:
    """K for a round at `length` committed tokens.

    No more than `wanted`; no more than can be committed beside the token that every round adds; and no
    further than the drafter's context, which must hold all drafts but the last.
    """
    return max(0, min(wanted, num_remaining - 1, draft_max_length - length + 1))
