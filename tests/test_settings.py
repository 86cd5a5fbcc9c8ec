"""Configurations: a mistyped key is refused by its nearest right name, servers bind loopback."""

import asyncio

import grpc
import numpy as np
import pytest
from pydantic import ValidationError

from coordinator.server import CoordinatorConfig
from protos.binding import Binding
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import TableModel


def test_an_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(
        ValidationError, match=r"CoordinatorConfig has no 'num_draft_token'; did you mean num_draft_tokens"
    ):
        CoordinatorConfig.model_validate({"targets": ["127.0.0.1:1"], "num_draft_token": 3})
    with pytest.raises(ValidationError, match=r"WorkerConfig has no 'zzz'; known are .*max_pass_tokens"):
        WorkerConfig.model_validate({"zzz": 1})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_loopback_is_bound_as_it_is(host: str) -> None:
    assert Binding(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_other_hosts_must_be_called_insecure(host: str) -> None:
    with pytest.raises(ValidationError, match="loopback address unless insecure"):
        Binding(host=host)
    assert not Binding(host=host, insecure=True).is_loopback


async def test_a_server_listens_on_any_loopback_address() -> None:
    """::1 has colons of its own."""
    for host in ("127.0.0.2", "::1", "localhost"):
        model = TableModel(lambda prefix: np.zeros(2), 2)
        worker = WorkerServer("target", model, ModelIdentity("m", "", (), "table"), WorkerConfig(host=host))
        address = await worker.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                await asyncio.wait_for(channel.channel_ready(), 5)
        finally:
            await worker.stop(0.0)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        WorkerConfig().port = 1
