"""The check of the law on running deployments: sound ones pass, faulty ones do not, and by the right finding.

Few samples and strong faults: how likely each is found at the default number is `study_power`'s business.
"""

import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from cluster.check_law import check_law
from cluster.law_report import LEVEL, LawReport, Verdict
from cluster.law_samples import CheckFailed, CheckSettings
from cluster.law_table import law_as_json, law_tables
from cluster.law_target import Target
from cluster.outcome import Refused
from coordinator.drafting import Drafter
from coordinator.sessions import Session
from protos.status import TaskError
from protos.worker_pb2 import ScoreReply, ScoreRequest
from tests.law_faults import ENDING, FAULTS, SOUND, TOP_K, USUAL, Fault, Pair, deployment, nothing
from tests.study_power import power_of
from workers.language_model import Feed, Logits
from workers.server import WorkerServer
from workers.table_model import TableModel


async def checked(
    fault: Fault,
    num_samples: int = 384,
    *,
    token: str | None = None,
    said: list[str] | None = None,
    **fields: Any,
) -> LawReport:
    """A check of a deployment with a fault in it."""
    settings = CheckSettings(**{"num_samples": num_samples, "top_k": TOP_K, "seed": 0} | fields)
    async with deployment(fault) as endpoints:
        if token is not None:
            endpoints = replace(endpoints, control_token=token)
        return await check_law(endpoints, fault.prompt, settings, (said if said is not None else []).append)


def by_number(ids: Sequence[int]) -> str:
    """Tokens by their numbers."""
    return " ".join(map(str, ids))


def said_of(report: LawReport) -> str:
    """The report for people, as one line."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(law_tables(report, by_number))
    return " ".join(console.export_text().split())


@pytest.mark.parametrize("name", SOUND)
async def test_a_sound_deployment_is_consistent(name: str) -> None:
    report = await checked(SOUND[name])
    assert (report.verdict, report.faults, report.doubts) == (Verdict.CONSISTENT, (), ())
    assert report.num_samples == sum(report.counts) == 384
    assert report.chi_square.degrees_of_freedom >= 10
    assert report.share_verified > 0.5
    assert report.num_rows > 10
    assert 0 < report.num_checked <= report.num_tokens


async def test_the_whole_vocabulary_can_be_checked_and_a_single_text() -> None:
    whole = await checked(SOUND["sound, token rule"], top_k=0, top_p=0.95, min_p=0.01, temperature=0.7)
    assert whole.verdict is Verdict.CONSISTENT
    greedy = await checked(SOUND["sound, token rule"], num_samples=32, temperature=0.0)
    assert greedy.verdict is Verdict.CONSISTENT
    assert greedy.chi_square.degrees_of_freedom == 0
    assert greedy.num_checked == greedy.num_tokens


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("residual not normalised, search clamped to the last id", "zero"),
        ("greedy draft with a soft q", "joint"),
        ("p and q swapped in the ratio", "acceptance"),
        ("the samples of a request share their keys", "pairs"),
        ("drawn at half the temperature, redrawn by the target", "redraw"),
    ],
)
async def test_each_finding_condemns_a_fault_of_its_kind(name: str, finding: str) -> None:
    report = await checked(FAULTS[name])
    assert report.verdict is Verdict.INCONSISTENT
    assert {
        "zero": len(report.impossible) > 0,
        "joint": report.chi_square.p_value < LEVEL,
        "acceptance": (report.acceptance_p_value or 1.0) < LEVEL,
        "pairs": report.pairs_p_value < LEVEL,
        "redraw": report.num_mismatches > 0,
    }[finding]


async def test_the_power_that_the_study_states_is_high_for_a_strong_fault_and_nothing_for_none() -> None:
    sound = [await checked(SOUND["sound, token rule"], 256, seed=seed) for seed in (0, 1000)]
    faulty = [await checked(FAULTS["greedy draft with a soft q"], 256, seed=seed) for seed in (0, 1000)]
    assert max(astuple(power_of(sound))) < 0.01
    assert power_of(faulty).joint > 0.99


async def test_without_the_control_token_it_says_so() -> None:
    with pytest.raises(CheckFailed, match="UNAUTHENTICATED from the target"):
        await checked(SOUND["sound, token rule"], token="another")


async def test_when_time_is_up_what_was_begun_is_compared_and_the_verdict_is_open() -> None:
    report = await checked(SOUND["sound, token rule"], num_samples=2**14, max_seconds=1e-3)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert 0 < report.num_samples < 2**14
    assert sum(report.counts) == report.num_samples


async def test_a_deployment_that_does_not_draft_says_nothing_about_drafting() -> None:
    plain = await checked(Fault(nothing, config={"num_draft_tokens": 0}), num_samples=64)
    assert (plain.verdict, plain.share_verified) == (Verdict.CONSISTENT, 0.0)
    assert "consistent with the target's law. Nothing was drafted, so" in said_of(plain)
    assert "Nothing was drafted" not in said_of(await checked(SOUND["sound, token rule"], num_samples=64))


async def test_some_rounds_have_the_deployments_k_and_all_of_it() -> None:
    report = await checked(Fault(nothing, config={"num_draft_tokens": 6}))
    assert report.verdict is Verdict.CONSISTENT
    assert len(report.num_accepted_per_pos) == 6
    assert all(report.num_accepted_per_pos[:4])
    assert sum(report.num_accepted_per_pos) == report.num_accepted
    usual = await checked(SOUND["sound, token rule"])
    assert len(usual.num_accepted_per_pos) == 3 == len([n for n in usual.num_accepted_per_pos if n > 0])


async def test_a_drafter_that_stays_away_leaves_the_verdict_open() -> None:
    def never(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(Drafter, "_is_ready", lambda drafter, session: False)

    report = await checked(Fault(never), num_samples=64)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.doubts == ("Only 0% of the compared tokens come from rounds with drafts.",)


async def test_it_waits_for_places_and_keeps_to_the_services_limits() -> None:
    """One choice a request, and a queue that refuses what finds no place."""
    busy = Fault(nothing, config={"max_choices": 1, "max_waiting_sessions": 0})
    said: list[str] = []
    report = await checked(busy, num_samples=160, said=said)
    assert report.verdict is Verdict.CONSISTENT
    assert report.num_samples == 160
    assert any(sentence.startswith("Sampling: 160 of 160") for sentence in said)


async def test_a_sample_that_ends_early_is_a_fault() -> None:
    def two_less(patched: pytest.MonkeyPatch) -> None:
        num_remaining = vars(Session)["num_remaining"].fget
        patched.setattr(Session, "num_remaining", property(lambda session: num_remaining(session) - 2))

    report = await checked(Fault(two_less), num_samples=64)
    assert "64 samples end early, without an end token." in report.faults
    assert report.verdict is Verdict.INCONSISTENT
    assert "64 samples end early" in said_of(report)


@pytest.mark.parametrize(("num_free", "is_refused"), [(5, False), (4, True)])
async def test_a_prompt_must_leave_room_for_the_longest_sample(num_free: int, is_refused: bool) -> None:
    """K + 2 = 5 tokens."""
    fault = SOUND["sound, token rule"]
    prompt = [1] * (4096 - num_free)
    settings = CheckSettings(num_samples=16, seed=0)
    async with deployment(fault) as endpoints:
        if is_refused:
            with pytest.raises(Refused, match=r"prompt has 4092 tokens, a sample up to 5 more; .* 4096"):
                await check_law(endpoints, prompt, settings, lambda _: None)
        else:
            report = await check_law(endpoints, prompt, settings, lambda _: None)
            assert report.faults == ()


async def test_a_busy_target_is_asked_again() -> None:
    refusals = [TaskError.exhausted("all slots are at work", 1.0), TaskError.unavailable("not yet")]

    def busy(patched: pytest.MonkeyPatch) -> None:
        score = WorkerServer.score

        async def refuse_first(worker: WorkerServer, request: ScoreRequest, seconds: float) -> ScoreReply:
            if refusals:
                raise refusals.pop()
            return await score(worker, request, seconds)

        patched.setattr(WorkerServer, "score", refuse_first)

    report = await checked(Fault(busy), num_samples=64)
    assert report.verdict is Verdict.CONSISTENT
    assert not refusals


async def test_without_the_rows_behind_the_samples_fewer_tokens_are_checked() -> None:
    def single_rows(patched: pytest.MonkeyPatch) -> None:
        score = WorkerServer.score

        async def refuse_many(worker: WorkerServer, request: ScoreRequest, seconds: float) -> ScoreReply:
            if request.num_rows > 1:
                raise TaskError.internal("one row at a time")
            return await score(worker, request, seconds)

        patched.setattr(WorkerServer, "score", refuse_many)

    whole = await checked(SOUND["sound, token rule"])
    report = await checked(Fault(single_rows))
    assert report.verdict is Verdict.CONSISTENT
    assert report.num_rows < whole.num_rows
    assert report.num_checked < whole.num_checked


@pytest.mark.parametrize(("pair", "is_alike"), [(USUAL, True), (ENDING, False)])
async def test_targets_must_have_the_same_p(pair: Pair, is_alike: bool) -> None:
    settings = CheckSettings(num_samples=64, top_k=TOP_K, seed=0)
    fault = SOUND["sound, token rule"]
    async with deployment(fault) as endpoints, deployment(Fault(nothing, pair=pair)) as others:
        both = replace(endpoints, targets=endpoints.targets + others.targets)
        report = await check_law(both, fault.prompt, settings, lambda _: None)
    assert report.differing_targets == (() if is_alike else others.targets)
    assert report.verdict is (Verdict.CONSISTENT if is_alike else Verdict.INCONSISTENT)
    assert f"targets │ 2, of which {int(not is_alike)} give another row" in said_of(report)


async def test_beyond_some_suspects_nothing_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    excused = []

    async def excuse(target: Target, prefix: tuple[int, ...], token: int) -> bool:
        excused.append((*prefix, token))
        return True

    monkeypatch.setattr("cluster.check_law.MAX_TIE_CHECKS", 1)
    monkeypatch.setattr(Target, "is_tie", excuse)
    report = await checked(FAULTS["residual not normalised, search clamped to the last id"])
    assert len(excused) == 1
    assert report.impossible
    assert not {(*each.prefix, each.token) for each in report.impossible} & set(excused)


async def test_the_tree_grows_no_longer_than_half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.check_law.MAX_TREE_ROWS", 4)
    monkeypatch.setattr("cluster.check_law.NUM_EXTRA_PREFIXES", 0)
    assert (await checked(SOUND["sound, token rule"])).num_rows == 4
    assert (await checked(SOUND["sound, token rule"], max_seconds=1e-3)).num_rows == 1


class Rounds(TableModel):
    """The 8th and the 9th likeliest token are as likely but for rounding, which differs between passes."""

    passes = itertools.count()

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        sign = 1e-5 if next(self.passes) % 2 else -1e-5
        return [self._rounded(logits, sign) for logits in super().forward(feeds)]

    def _rounded(self, rows: NDArray[np.floating], sign: float) -> Logits:
        for row in rows:
            order = np.argsort(row)
            row[order[-TOP_K - 1]] = row[order[-TOP_K]] + sign
        return rows


async def test_a_tie_that_rounding_decides_is_no_impossible_token() -> None:
    report = await checked(Fault(nothing, model=Rounds), num_samples=512)
    assert not report.impossible
    assert report.verdict is Verdict.CONSISTENT


async def test_a_report_can_be_read_by_people_and_by_programs() -> None:
    report = await checked(FAULTS["residual not normalised, search clamped to the last id"], num_samples=128)
    text = said_of(report)
    assert "NOT consistent" in text
    assert f"{len(report.impossible)} sampled tokens have probability zero" in text
    assert text.count("FAULT") >= 1
    found = json.loads(json.dumps(law_as_json(report, by_number)))
    assert found["verdict"] == "inconsistent"
    assert sum(cell["observed"] for cell in found["cells"]) == report.num_samples
    assert sum(cell["expected"] for cell in found["cells"]) == pytest.approx(report.num_samples)
