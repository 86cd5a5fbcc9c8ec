"""Drawing draft tokens on the device that computes their logits, so that nothing waits for the host between.

Knows tensors; no model, slot or task. What is drawn is what `workers.counts` would draw: integer counts are
made of the logits, and the token is the one that its coin, known beforehand, selects from these very counts.
The host reads tokens and counts when all are drawn.

K draws, B sessions, C logit columns, S columns of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.counts import SPARSE_TOTAL, CountRow
from workers.distributions import IntArray
from workers.language_model import Drawn, Draws
from workers.slot_cache import sent


@dataclass(frozen=True, slots=True)
class Rules:
    """How each session's counts are made, on the device."""

    width: int  # S
    temperature: Tensor  # [B, 1] float64
    top_k: Tensor  # [B, 1] columns that stay
    top_p: Tensor | None  # [B, 1] float64; None: all of them 1
    min_p: Tensor  # [B, 1] float64
    support: Tensor  # [B, 1]
    num_columns: Tensor | None  # [B, 1] the columns from there on are impossible; None: there are none
    thresholds: Tensor  # [K, B, 1] the coins

    @classmethod
    def of(cls, draws: Sequence[Draws], num_columns: int, device: torch.device) -> "Rules":
        """The rules of B sessions, for logits of `num_columns` columns; coins that are not there are 0."""
        settings = [draw.settings for draw in draws]
        width = min(num_columns, max(max(draw.support, _counted(draw)) for draw in draws))
        num_draws = max(len(draw.coins) for draw in draws)
        coins = [[*draw.coins, *[0.0] * (num_draws - len(draw.coins))] for draw in draws]
        numbers = [
            (
                rule.temperature or 1.0,
                rule.top_k or num_columns if rule.temperature else 1,
                rule.top_p,
                rule.min_p,
                draw.support,
                draw.num_columns,
                *(int(coin * SPARSE_TOTAL) for coin in row),
            )
            for draw, rule, row in zip(draws, settings, coins, strict=True)
        ]
        table = sent(torch.tensor(numbers, dtype=torch.float64), device).T[:, :, None]
        return cls(
            width=width,
            temperature=table[0],
            top_k=table[1],
            top_p=None if all(rule.top_p == 1.0 for rule in settings) else table[2],
            min_p=table[3],
            support=table[4],
            num_columns=None if all(draw.num_columns >= num_columns for draw in draws) else table[5],
            thresholds=table[6:],
        )


def _counted(draw: Draws) -> int:
    """Columns whose weights must be known: top-p shares out the mass of those that top-k keeps."""
    some_stay = draw.settings.top_p < 1.0 and draw.settings.top_k < draw.num_columns
    return draw.settings.top_k if some_stay else 1


def draw(logits: Tensor, rules: Rules, index: int) -> Tensor:
    """Draw one token a session from logits `[B, C]`, with its coin number `index`.

    Returns `[B, 2 S + 2]` integers: S columns, ascending, their counts, the column that was drawn, and
    whether the row was a distribution; what is drawn from one that is not means nothing.
    """
    if rules.num_columns is not None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(columns >= rules.num_columns, -torch.inf)
    values, columns = logits.topk(rules.width)  # NaN counts as the largest
    usable = values[:, :1].isfinite()
    peak = values[:, :1].double()
    weights = ((values.double() - peak) / rules.temperature).exp()
    rank = torch.arange(rules.width, device=logits.device)
    kept = (rank < rules.top_k) & (rank < rules.support) & (weights >= rules.min_p)
    if rules.top_p is not None:
        everything = ((logits.double() - peak) / rules.temperature).exp().sum(1, keepdim=True)
        counted = (weights * (rank < rules.top_k)).sum(1, keepdim=True)
        mass = torch.where(rules.top_k < logits.shape[1], counted, everything)
        kept &= weights.cumsum(1) - weights < rules.top_p * mass
    columns, order = columns.sort(1)
    weights = (weights * kept).gather(1, order)
    counts = _apportioned(weights)
    place = (counts.cumsum(1) <= rules.thresholds[index]).sum(1, keepdim=True).clamp_(max=rules.width - 1)
    return torch.cat((columns, counts, columns.gather(1, place), usable), dim=1)


def _apportioned(weights: Tensor) -> Tensor:
    """Counts `[B, S]` that sum to 2^15, by largest remainder: `workers.counts.quantise`."""
    shares = weights * (SPARSE_TOTAL / weights.sum(1, keepdim=True))
    counts = shares.long()  # rounded down
    missing = SPARSE_TOTAL - counts.sum(1, keepdim=True)
    rank = (counts - shares).argsort(dim=1, stable=True).argsort(dim=1)
    counts += rank < missing
    return counts


def read_draws(
    table: IntArray, draws: Sequence[Draws], output_ids: IntArray | None = None
) -> list[list[Drawn]]:
    """What was drawn, by session, from the rows of `draw`, `[K, B, 2 S + 2]`, all of them distributions."""
    width = (table.shape[2] - 2) // 2
    drawn: list[list[Drawn]] = []
    for session, wanted in zip(table.transpose(1, 0, 2), draws, strict=True):
        tokens: list[Drawn] = []
        for row in session[: len(wanted.coins)]:
            columns, counts, column = row[:width], row[width:-2], row[-2]
            if output_ids is not None:
                columns, column = output_ids[columns], output_ids[column]
            positive = np.flatnonzero(counts)
            tokens.append(Drawn(int(column), CountRow(columns[positive], counts[positive], SPARSE_TOTAL)))
        drawn.append(tokens)
    return drawn
