"""How many requests at once are told: tables that line up, and one sentence for each number of them."""

from cluster.bench import TRANSFORMERS, Drafting, outrider
from cluster.bench_closed_form import FormFigures, Prediction
from cluster.bench_load_report import form_table, load_sentences, load_table, rule_table
from cluster.bench_ratios import LoadFigures, RuleFigures
from cluster.bench_statistics import Estimate

RATIO = Estimate(1.04, 0.99, 1.09)


def _figures(engine: str, speed: float, num_requests: int, **ratios: Estimate | None) -> LoadFigures:
    k = engine.rpartition(" ")[2]
    return LoadFigures(
        engine=engine,
        drafting=None if engine == TRANSFORMERS else Drafting("auto" if k == "auto" else int(k)),
        temperature=1.0,
        num_requests=num_requests,
        num_blocks=8,
        tokens_per_second=speed,
        of_plain=ratios.get("of_plain"),
        of_generate=ratios.get("of_generate"),
        auto_of_it=ratios.get("auto_of_it"),
        share_drafted=0.5 if k == "auto" else None,
        acceptance_rate=None,
        mean_acceptance_length=None,
    )


LOADS = [
    _figures(TRANSFORMERS, 60.0, 16),
    _figures(outrider(0), 100.0, 16, of_generate=Estimate(1.7, 1.6, 1.8), auto_of_it=RATIO),
    _figures(outrider(1), 90.0, 16, auto_of_it=Estimate(1.2, 1.1, 1.3)),
    _figures(outrider("auto"), 104.0, 16, of_plain=RATIO, of_generate=Estimate(1.75, 1.7, 1.8)),
]
LOAD_TABLE = """\
| T | requests | blocks | engine             | tokens/s |          of K = 0 |       of generate |        auto of it | drafted | accepted | length |
|---|----------|--------|--------------------|----------|-------------------|-------------------|-------------------|---------|----------|--------|
| 1 |       16 |      8 | transformers       |     60.0 |                 – |                 – |                 – |       – |        – |      – |
| 1 |       16 |      8 | Outrider, K = 0    |    100.0 |                 – | 1.70 [1.60, 1.80] | 1.04 [0.99, 1.09] |       – |        – |      – |
| 1 |       16 |      8 | Outrider, K = 1    |     90.0 |                 – |                 – | 1.20 [1.10, 1.30] |       – |        – |      – |
| 1 |       16 |      8 | Outrider, K = auto |    104.0 | 1.04 [0.99, 1.09] | 1.75 [1.70, 1.80] |                 – |    0.50 |        – |      – |"""  # noqa: E501


def test_a_line_an_engine_with_dashes_for_what_is_absent() -> None:
    assert load_table(LOADS) == LOAD_TABLE


def test_the_ratios_that_decide_stand_in_one_sentence() -> None:
    assert load_sentences(LOADS) == [
        "16 requests at temperature 1: K = auto is 1.04 [0.99, 1.09] times K = 0, 1.04 [0.99, 1.09] times the"
        " best fixed one, K = 0, 1.75 [1.70, 1.80] times transformers' generate of 16"
        " (K = 0: 1.70 [1.60, 1.80])."
    ]


def test_one_request_is_called_so_and_what_was_not_measured_goes_unsaid() -> None:
    [sentence] = load_sentences([_figures(outrider("auto"), 20.0, 1, of_plain=Estimate(1.1, None, None))])
    assert sentence == "One request at temperature 1: K = auto is 1.10 times K = 0."
    assert load_sentences([_figures(outrider(0), 20.0, 1), _figures(outrider("auto"), 20.0, 2)]) == []


def test_rules_and_the_closed_form_have_a_line_each() -> None:
    rules = rule_table([RuleFigures(3, 1.0, 4, 8, Estimate(1.01, 1.0, 1.02), RATIO)])
    assert "| 1 |        4 |      8 | 3 | 1.010 [1.000, 1.020] | 1.040 [0.990, 1.090] |" in rules
    form = form_table(
        [
            FormFigures(
                engine=outrider(1),
                temperature=1.0,
                middle=Prediction(
                    share_drafted=0.98,
                    num_draft_tokens=1.0,
                    tokens_a_round=1.29,
                    step_seconds=0.0048,
                    plain_seconds=0.043,
                    verify_seconds=0.055,
                    wire_seconds=0.0037,
                    predicted=20.0,
                    measured=19.0,
                ),
                reached=RATIO,
            )
        ]
    )
    cells = [cell.strip() for cell in form.splitlines()[-1].split("|")]
    assert cells[3:-2] == ["0.98", "1.00", "1.29", "4.8", "43.0", "55.0", "3.7", "20.0", "19.0"]
