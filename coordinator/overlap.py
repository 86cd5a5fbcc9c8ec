"""Into how many groups the sessions of a drafter are split, so that drafter and target work at the same time.

Pure arithmetic over what was measured. A group is drafted for together; while the target verifies one, the
drafter is at the next. Smaller groups make smaller passes, and a pass of half the rows takes more than half
the time: whether splitting pays is what this finds out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.pass_cost import PassCost, PassShape

NUM_GROUPS = (1, 2, 3, 4, 6, 8)  # that are considered
SPLIT_GAIN = 1.05  # another number of groups must promise this much more than the last one


@dataclass(frozen=True, slots=True)
class Load:
    """What decides how long a round takes, K apart."""

    num_at_drafter: int  # sessions that share its passes
    num_at_target: int
    length: int  # positions that a session holds
    draft_wire_seconds: float  # of a round trip, beside what workers take
    target_wire_seconds: float
    can_overlap: bool = True  # drafter and target compute on different machines, or devices of one


def turn_seconds(draft: PassCost, target: PassCost, load: Load, k: int, num_groups: int) -> float:
    """How long it takes until every session has had a round of K >= 1 drafts, all groups alike.

    M groups take turns at both workers: a turn is no shorter than a group's own round, K t_d + t_v + r, nor
    than M times what either worker spends on a group.
    """
    step = draft.pass_seconds(_shape(_share(load.num_at_drafter, num_groups), load.length, 1))
    verification = target.pass_seconds(_shape(_share(load.num_at_target, num_groups), load.length, k + 1))
    wire = load.draft_wire_seconds + load.target_wire_seconds
    return max(k * step + verification + wire, num_groups * k * step, num_groups * verification)


def plain_seconds(target: PassCost, load: Load) -> float:
    """The same for K = 0, where nobody waits for a drafter."""
    return target.pass_seconds(_shape(load.num_at_target, load.length, 1)) + load.target_wire_seconds


def alone_seconds(draft: PassCost, target: PassCost, load: Load, k: int) -> float:
    """How long all others wait for one session's round with K >= 1 drafts, which misses their pass."""
    verification = target.pass_seconds(_shape(1, load.length, k + 1))
    if load.can_overlap:
        return verification
    return verification + k * draft.pass_seconds(_shape(1, load.length, 1))


def possible_groups(load: Load) -> Sequence[int]:
    """How many groups are worth a thought: one where both workers share what they compute on."""
    return [m for m in NUM_GROUPS if m == 1 or (load.can_overlap and m <= load.num_at_drafter)]


def best_groups(draft: PassCost, target: PassCost, load: Load, k: int, last: int = 1) -> int:
    """The number of groups with the shortest turn for K >= 1; the last one where none is clearly better."""
    choices = possible_groups(load)
    seconds = {m: turn_seconds(draft, target, load, k, m) for m in choices}
    best = min(choices, key=seconds.__getitem__)
    if last in seconds and seconds[last] < SPLIT_GAIN * seconds[best]:
        return last
    return best


def _share(num_sessions: int, num_groups: int) -> int:
    return -(-num_sessions // num_groups)


def _shape(num_sessions: int, length: int, num_rows: int) -> PassShape:
    num_positions = num_rows * length + num_rows * (num_rows + 1) // 2
    return PassShape(num_sessions * num_rows, num_sessions * num_positions, num_sessions)
