"""How likely `outrider check-law` is to find each fault, at its default number of samples.

    python -m tests.study_power            # all faults, about a quarter of an hour on one core
    python -m tests.study_power residual   # those whose name contains the word

Each fault of `tests/law_faults.py` is put into a running deployment, which is checked three times, or eight
where three show a power that they cannot ascertain. The power stated is that of the strongest finding, from
all runs of the fault together and on the cautious side: the noncentrality of the chi-square, the acceptance's
distance in standard deviations and the rates of what must not occur are taken at the lower ends of 99 %
intervals; but the rate of draft tokens that are not their rows' is taken as measured. Where the power is less
than wanted, the joint law's noncentrality or that rate, as measured, say about how many samples would do. Not
part of the test suite: it takes too long.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from scipy import optimize, stats

from cluster.check_law import check_law
from cluster.joint_law import ChiSquare, chi_square
from cluster.law_report import LEVEL, LawReport, Verdict
from cluster.law_samples import CheckSettings
from tests.law_faults import FAULTS, SOUND, TOP_K, Fault, deployment

NUM_RUNS, MOST_RUNS = 3, 16
WANTED = 0.99
CAUTION = float(stats.norm.isf(0.01))


@dataclass(frozen=True)
class Power:
    """The chance of each finding, in one check."""

    zero: float
    joint: float
    pairs: float
    acceptance: float
    redraw: float
    unusable: float

    @property
    def strongest(self) -> float:
        """Of all findings."""
        return float(max(astuple(self)))

    @property
    def found_by(self) -> str:
        """The findings that suffice, or else the strongest."""
        least = max(min(self.strongest, WANTED), 0.01)
        return ", ".join(each.name for each in fields(self) if getattr(self, each.name) >= least)


def power_of(reports: Sequence[LawReport]) -> Power:
    """From checks of one deployment, all with the same cells."""
    n = len(reports)
    pooled = _pooled(reports)
    return Power(
        zero=_at_least_one(sum(len(report.impossible) for report in reports), n),
        joint=_joint(pooled.statistic, pooled.degrees_of_freedom, n),
        pairs=_normal([float(stats.norm.isf(max(report.pairs_p_value, 1e-300))) for report in reports]),
        acceptance=_normal([_deviation(report) for report in reports], two_sided=True),
        redraw=1.0 - math.exp(-sum(report.num_mismatches for report in reports) / n),
        unusable=_at_least_one(sum(report.num_unusable for report in reports), n),
    )


def samples_wanted(reports: Sequence[LawReport]) -> int | None:
    """About how many the power wanted takes; None when the runs show no effect."""
    pooled, num_samples = _pooled(reports), sum(report.num_compared for report in reports)
    num_mismatches = sum(report.num_mismatches for report in reports)
    if num_mismatches:
        return round(num_samples * -math.log(1.0 - WANTED) / num_mismatches)
    df = pooled.degrees_of_freedom
    if pooled.p_value > 0.01 or math.isinf(pooled.statistic):
        return None

    def missing(noncentrality: float) -> float:
        return WANTED - float(stats.ncx2.sf(stats.chi2.isf(LEVEL, df), df, noncentrality))

    wanted = float(optimize.brentq(missing, 1.0, 1e4))
    return round(num_samples * wanted / (pooled.statistic - df))


def _pooled(reports: Sequence[LawReport]) -> ChiSquare:
    counts = np.sum([report.counts for report in reports], axis=0)
    return chi_square(counts, reports[0].partition.masses)


def _at_least_one(count: int, num_runs: int) -> float:
    """Poisson: the chance of at least one in a run, with the rate at its lower end."""
    return 1.0 - math.exp(-stats.chi2.ppf(0.01, 2 * count) / 2 / num_runs) if count else 0.0


def _joint(statistic: float, df: int, num_runs: int) -> float:
    """Noncentral chi-square, with the noncentrality at its lower end, an n-th for each of n runs."""
    if math.isinf(statistic):
        return 1.0
    excess = max(statistic - df, 0.0)
    noncentrality = max(excess - CAUTION * math.sqrt(2 * (df + 2 * excess)), 0.0) / num_runs
    return float(stats.ncx2.sf(stats.chi2.isf(LEVEL, df), df, noncentrality)) if noncentrality else 0.0


def _deviation(report: LawReport) -> float:
    if report.acceptance_p_value is None:
        return 0.0
    sign = 1.0 if report.num_accepted > report.expected_accepted else -1.0
    return sign * float(stats.norm.isf(max(report.acceptance_p_value, 1e-300) / 2))


def _normal(deviations: Sequence[float], *, two_sided: bool = False) -> float:
    """The chance of a deviation beyond the level, with the mean at its lower end."""
    mean = float(np.mean(deviations))
    distance = (abs(mean) if two_sided else mean) - CAUTION / math.sqrt(len(deviations))
    return float(stats.norm.sf(stats.norm.isf(LEVEL / (2 if two_sided else 1)) - max(distance, 0.0)))


async def study(fault: Fault) -> list[LawReport]:
    """Checks at the default number of samples, each of a fresh deployment with the fault."""
    reports: list[LawReport] = []
    while len(reports) < NUM_RUNS or (len(reports) < MOST_RUNS and _is_open(reports)):
        settings = CheckSettings(seed=1 + len(reports) * 2**40, top_k=TOP_K)
        async with deployment(fault) as endpoints:
            reports.append(await check_law(endpoints, fault.prompt, settings, lambda _: None))
    return reports


def _is_open(reports: Sequence[LawReport]) -> bool:
    """Whether the runs show the power wanted, but not for certain."""
    wanted = samples_wanted(reports[:NUM_RUNS])
    is_certain = power_of(reports[:NUM_RUNS]).strongest >= WANTED
    return not is_certain and wanted is not None and wanted <= reports[0].num_wanted


def main() -> None:
    """Study the faults and print the table."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    print("| fault | runs that found it | power | by | samples for 0.99 |\n|---|---|---|---|---|")
    for name, fault in {**SOUND, **FAULTS}.items():
        if word not in name:
            continue
        reports = asyncio.run(study(fault))
        power = power_of(reports)
        num_found = sum(report.verdict is Verdict.INCONSISTENT for report in reports)
        more = "" if power.strongest >= WANTED else str(samples_wanted(reports) or "unknown")
        found = f"{num_found} of {len(reports)} | {power.strongest:.3f} | {power.found_by}"
        print(f"| {name} | {found} | {more} |", flush=True)


if __name__ == "__main__":
    main()
