"""How many runs a benchmark has, and a guess of how long they take. Pure arithmetic."""

from cluster.bench_load import Load
from cluster.bench_plan import BenchPlan, BenchWish

_TYPICAL_TOKENS_PER_SECOND = 13  # of one request, as two cores do it with the demo pair
_TYPICAL_GROWTH = 0.6  # of N requests together: their number to this power as much


class BenchSize:
    """One benchmark's."""

    def __init__(self, plan: BenchPlan, wish: BenchWish) -> None:
        """As they say."""
        self._loads = plan.loads
        self._num_ours = len(plan.drafting)
        self._wish = wish
        num_texts = wish.num_repeats * len(plan.prompts) * len(wish.temperatures)
        self.num_single_blocks = num_texts if 1 in wish.num_requests else 0

    @property
    def num_runs(self) -> int:
        """Of all engines."""
        num_single = self.num_single_blocks * self._num_engines(1)
        return num_single + sum(
            self.num_blocks(load) * self._num_engines(load.num_requests) for load in self._loads
        )

    @property
    def seconds(self) -> float:
        """A guess, without what comes before the first run."""
        loads = sum(self.num_blocks(load) * self.block_seconds(load) for load in self._loads)
        return self.num_single_blocks * self.single_block_seconds + loads

    @property
    def single_block_seconds(self) -> float:
        """A guess for a block of a single request."""
        return self._num_engines(1) * self._wish.num_tokens / _TYPICAL_TOKENS_PER_SECOND

    def num_blocks(self, load: Load) -> int:
        """At all temperatures."""
        return load.num_blocks * len(self._wish.temperatures)

    def block_seconds(self, load: Load) -> float:
        """A guess for a block of several requests at once."""
        speed = _TYPICAL_TOKENS_PER_SECOND * load.num_requests**_TYPICAL_GROWTH
        return float(self._num_engines(load.num_requests) * load.num_texts * self._wish.num_tokens / speed)

    def _num_engines(self, num_requests: int) -> int:
        """Beside ours: `generate` plain and assisted for one request, batched for some numbers of them."""
        return self._num_ours + (2 if num_requests == 1 else num_requests in self._wish.batched)
