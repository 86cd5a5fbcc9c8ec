"""More clients than places: a short form of `overload_run`.

Guards against requests that are admitted and then fail, refusals that do not say when to come back, clients
that are never served, and sessions that stay behind.
"""

from tests.fault_site import MOST_LEFT
from tests.overload_run import overload

NUM_CLIENTS = 32


async def test_beyond_its_places_a_service_refuses_and_serves_everybody_in_the_end() -> None:
    findings = await overload(NUM_CLIENTS, lambda so_far, client: so_far.served[client] > 0)
    assert not findings.failures
    assert findings.refused_seconds
    assert findings.left.total() <= MOST_LEFT
