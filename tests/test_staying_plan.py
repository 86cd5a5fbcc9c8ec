"""A deployment's defaults fit the machine, and what cannot be is refused by name, value and limit."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import finding, staying_plan
from cluster.finding import find
from cluster.memory import DoesNotFit
from cluster.outcome import Refused
from cluster.plan import Plan
from cluster.staying_plan import StayingPlan, StayingWish, check_wish, prepare_staying
from tests.tiny_models import MAX_LENGTH, save_tiny

WISH = StayingWish(
    target="demo",
    draft="demo",
    num_targets=1,
    num_drafters=None,
    num_draft_tokens=None,
    rule="token",
    num_slots=None,
    max_length=None,
    num_threads=None,
    port=7480,
)
GB = 10**9


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> StayingWish:
    folder = tmp_path_factory.mktemp("models")
    target = str(save_tiny(folder / "target", num_hidden_layers=5))
    draft = str(save_tiny(folder / "draft", num_hidden_layers=2))
    return replace(WISH, target=target, draft=draft)


def _plan(wish: StayingWish) -> Plan:
    check_wish(wish)
    return _prepare(wish).plan


def _prepare(wish: StayingWish) -> StayingPlan:
    return prepare_staying(wish, find(wish.target, wish.draft, print))


def test_the_defaults_are_one_of_each_within_the_models_context(wish: StayingWish) -> None:
    plan = _plan(wish)
    assert [name for name, _, _ in plan.workers()] == ["target-0", "drafter-0"]
    assert plan.draft is not None
    assert (plan.target.num_slots, plan.draft.num_slots) == (32, 32)
    assert (plan.target.max_length, plan.num_draft_tokens, plan.port) == (MAX_LENGTH, "auto", 7480)


def test_every_session_of_the_targets_finds_a_place_at_a_drafter(wish: StayingWish) -> None:
    plan = _plan(replace(wish, num_targets=2, num_drafters=3, num_slots=8))
    assert plan.draft is not None
    assert plan.draft.num_slots == 6  # 16 / 3, rounded up
    assert len(plan.workers()) == 5


@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 8), (2, 4), (3, 2), (9, 1)])
def test_workers_share_the_cores(
    wish: StayingWish, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_threads: int
) -> None:
    monkeypatch.setattr(staying_plan, "usable_cores", lambda: 8)
    undrafted = replace(wish, draft="none", num_targets=num_workers)
    assert _plan(undrafted).target.num_threads == num_threads
    assert _plan(replace(undrafted, num_threads=5)).target.num_threads == 5


def test_a_deep_draft_shares_the_cores_with_the_targets(
    wish: StayingWish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying_plan, "usable_cores", lambda: 8)
    for draft, expected in ((wish.target, (2, 2)), (wish.draft, (4, 1))):
        plan = _plan(replace(wish, draft=draft, num_targets=2, num_drafters=2))
        assert plan.draft is not None
        assert (plan.target.num_threads, plan.draft.num_threads) == expected


def test_a_shallow_draft_takes_one_thread_of_as_many_as_there_are(
    wish: StayingWish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying_plan, "usable_cores", lambda: 8)
    for num_threads in (None, 3):
        draft = _plan(replace(wish, num_threads=num_threads)).draft
        assert draft is not None
        assert draft.num_threads == 1


def test_without_a_draft_there_are_no_drafters_and_no_draft_tokens(wish: StayingWish) -> None:
    plan = _plan(replace(wish, draft="none"))
    assert (plan.draft, plan.num_draft_tokens, len(plan.workers())) == (None, 0, 1)


def test_slots_by_default_are_as_many_as_fit_and_slots_that_do_not_fit_are_refused(
    wish: StayingWish, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _prepare(replace(wish, num_slots=1))
    needed = staying_plan._estimate  # of the whole deployment
    monkeypatch.setattr(
        staying_plan, "_estimate", lambda *plan: replace(needed(*plan), ray=GB + plan[-1] * 10**8)
    )
    monkeypatch.setattr(finding, "available_memory", lambda: 4 * GB)
    assert 1 < _plan(wish).target.num_slots < 32
    assert one.plan.target.num_slots == 1
    with pytest.raises(DoesNotFit, match="--slots"):
        _plan(replace(wish, num_slots=32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_targets": 0}, "num_targets is 0; it must lie in 1..64"),
        ({"num_drafters": 65}, "num_drafters is 65; it must lie in 1..64"),
        ({"num_draft_tokens": 65}, "num_draft_tokens is 65; it must lie in 0..64"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"port": 65536}, "port is 65536; it must lie in 1..65535"),
        ({"draft": "none", "num_drafters": 2}, "num_drafters is 2; there is no drafter"),
        ({"draft": "none", "num_draft_tokens": 2}, "num_draft_tokens is 2; there is no drafter"),
        ({"max_length": 129}, "max_length is 129; .* has 128 positions"),
    ],
)
def test_what_cannot_be_is_refused_by_name_value_and_limit(
    wish: StayingWish, change: dict[str, int], sentence: str
) -> None:
    with pytest.raises(Refused, match=sentence):
        _plan(replace(wish, **change))  # type: ignore[arg-type]


def test_a_plan_draws_its_token_and_hides_it() -> None:
    settings = {"name": "x", "folder": Path("x"), "num_slots": 1, "max_length": 9, "num_threads": 1}
    plans = [Plan.model_validate({"target": settings, "draft": None, "num_draft_tokens": 0}) for _ in "ab"]
    assert len({plan.control_token for plan in plans}) == 2
    assert plans[0].control_token not in repr(plans[0])
    assert Plan.model_validate_json(plans[0].model_dump_json()) == plans[0]
