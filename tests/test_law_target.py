"""Which tokens without probability rounding may excuse, setting by setting, at a real target.

Guards against a sound target that is condemned because its kernels round differently from pass to pass, and
against an excuse for tokens that are truly outside.
"""

import time

import grpc
import numpy as np
import pytest

from cluster.law_samples import CheckSettings
from cluster.law_target import Target
from tests.law_faults import CONTROL_TOKEN
from tests.pipelines import pipeline
from workers.table_model import TableModel

# The first three make up 0.9 but for a hair; the last two are as likely but for a hair.
WEIGHTS = (0.5, 0.3, 0.10001, 0.04, 0.03, 0.02999)


@pytest.mark.parametrize(
    ("fields", "absent", "ties"),
    [
        ({"top_k": 5}, {5}, {5}),
        ({"top_k": 4}, {4, 5}, set()),
        ({"top_p": 0.9}, {3, 4, 5}, {3}),
        ({"top_p": 0.89}, {3, 4, 5}, set()),
        ({"min_p": 0.0800004}, {3, 4, 5}, {3}),
        ({"min_p": 0.081}, {3, 4, 5}, set()),
        ({"top_k": 5, "top_p": 0.9278, "min_p": 0.05}, {3, 4, 5}, {3}),
        ({"temperature": 0.0}, {1, 2, 3, 4, 5}, set()),
    ],
)
async def test_a_token_at_the_very_edge_of_a_setting_is_a_tie_and_no_other(
    fields: dict[str, float], absent: set[int], ties: set[int]
) -> None:
    model = TableModel(lambda _: np.log(np.array(WEIGHTS)), len(WEIGHTS))
    settings = CheckSettings.model_validate({"top_k": 0, "seed": 0} | fields)
    async with (
        pipeline(model, None, control_token=CONTROL_TOKEN) as running,
        grpc.aio.insecure_channel(running.target_address) as channel,
    ):
        target = await Target.meet(
            channel, running.target_address, CONTROL_TOKEN, (0,), settings.sampling, time.monotonic() + 30
        )
        [row] = await target.rows((1,), 1)
        assert set(range(len(WEIGHTS))) - set(row.ids.tolist()) == absent
        assert {token for token in absent if await target.is_tie((1,), token)} == ties
