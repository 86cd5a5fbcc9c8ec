"""The proof on a live deployment: asks its targets for p, its public service for samples, and compares.

Knows the order of the check; rows come from `law_target`, samples from `law_samples`, the mathematics stands
in `joint_law`, the judgement in `law_report`. Nothing is drawn again and nothing that was sampled is left
out: either could bias.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc

from cluster.calls import OPTIONS
from cluster.joint_law import LawTree, Row, Tokens, total_variation
from cluster.law_report import Impossible, LawReport, report
from cluster.law_samples import CALL_SECONDS, CheckFailed, CheckSettings, Progress, Sampler, in_words
from cluster.law_target import Target
from protos.inference_pb2 import GetModelInfoRequest
from protos.inference_pb2_grpc import InferenceStub

LEAST_EXPECTED_PREFIX = 40.0  # samples that go through a prefix, for its row to be asked for beforehand
MAX_TREE_ROWS = 512
NUM_EXTRA_PREFIXES = 32  # sequences whose other rows are asked for behind the sampling
MAX_TIE_CHECKS = 64  # tokens without probability that rounding may excuse


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a deployment is asked, and what shows that one may."""

    service: str  # host:port of the public service
    targets: tuple[str, ...]  # host:port of each; the first is asked for rows
    control_token: str
    has_token_rule: bool = True  # else the block rule


async def check_law(
    endpoints: Endpoints, prompt: Sequence[int], settings: CheckSettings, progress: Progress
) -> LawReport:
    """Sample behind the prompt's token ids and compare with p.

    Raises CheckFailed, and Refused for a prompt that leaves no room for samples.
    """
    begun = time.monotonic()
    until = begun + settings.max_seconds
    async with contextlib.AsyncExitStack() as stack:
        stub = InferenceStub(await _channel(endpoints.service, stack))
        with in_words("the service"):
            info = await stub.GetModelInfo(GetModelInfoRequest(), timeout=CALL_SECONDS)
        shortest_block = 1 if endpoints.has_token_rule else 2
        sampler = Sampler(stub, info, prompt, settings, shortest_block, until, progress)
        token, give_up = endpoints.control_token, until + CALL_SECONDS
        targets = [
            await Target.meet(
                await _channel(address, stack), address, token, prompt, settings.sampling, give_up
            )
            for address in endpoints.targets
        ]
        differing = await _differing(targets)
        tree = LawTree(
            depth=settings.depth,
            least_mass=LEAST_EXPECTED_PREFIX / settings.num_samples,
            end_token_ids=info.end_token_ids,
        )
        await _grow(tree, targets[0], (begun + until) / 2, progress)
        batches = await sampler.sample()
        samples = [sample for batch in batches for sample in batch.samples]
        rows = dict(tree.rows)
        progress("Asking for rows of p behind what was sampled")
        target = replace(targets[0], give_up=time.monotonic() + CALL_SECONDS)
        await _score_more(target, samples, rows)
        num_checked, impossible = await _look_up(target, samples, rows)
    return report(
        tree,
        batches,
        impossible,
        depth=settings.depth,
        num_wanted=settings.num_samples,
        num_extra_rows=len(rows) - len(tree.rows),
        num_checked=num_checked,
        num_targets=len(targets),
        differing_targets=differing,
        longest_block=info.num_draft_tokens,
        has_token_rule=endpoints.has_token_rule,
    )


async def _channel(address: str, stack: contextlib.AsyncExitStack) -> grpc.aio.Channel:
    return await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS))


async def _differing(targets: Sequence[Target]) -> tuple[str, ...]:
    """Addresses of the targets whose p behind the prompt is another than the first one's, beyond rounding."""
    if len(targets) == 1:
        return ()
    rows = [await target.whole_row(()) for target in targets]
    return tuple(
        target.address
        for target, row in zip(targets[1:], rows[1:], strict=True)
        if total_variation(rows[0], row) > max(target.tolerance, targets[0].tolerance)
    )


async def _grow(tree: LawTree, target: Target, until: float, progress: Progress) -> None:
    """Every prefix that enough samples will go through gets its row, before anything is sampled.

    So many that there is time for: half of the check's.
    """
    while (prefix := tree.next_prefix()) is not None:
        progress(f"Asking for rows of p: {len(tree.rows) + 1}")
        [row] = await target.rows(prefix, 1)
        tree.add(prefix, row)
        if len(tree.rows) == MAX_TREE_ROWS or time.monotonic() > until:
            return


async def _score_more(target: Target, samples: Sequence[Tokens], rows: dict[Tokens, Row]) -> None:
    """Add rows behind prefixes that were sampled but are not in the tree, those of one sequence at once.

    A target that fails meanwhile costs no more than these rows: fewer tokens are then checked.
    """
    num_requests = 0
    for sample in dict.fromkeys(samples):
        unknown = [n for n in range(len(sample)) if sample[:n] not in rows]
        if unknown and num_requests < NUM_EXTRA_PREFIXES:
            num_requests += 1
            last = len(sample) - 1
            try:
                found = await target.rows(sample[:last], last - unknown[0] + 1)
            except CheckFailed:
                return
            rows |= {sample[:n]: row for n, row in zip(range(unknown[0], last + 1), found, strict=True)}


async def _look_up(
    target: Target, samples: Sequence[Tokens], rows: dict[Tokens, Row]
) -> tuple[int, list[Impossible]]:
    """How many sampled tokens have a known row, and those that it gives no probability, ties apart."""
    num_checked = 0
    ties: dict[Impossible, bool] = {}
    impossible = []
    for sample in samples:
        for n, token in enumerate(sample):
            row = rows.get(sample[:n])
            if row is None:
                continue
            num_checked += 1
            if row.p_of(token) > 0.0:
                continue
            suspect = Impossible(sample[:n], token)
            if suspect not in ties:
                ties[suspect] = len(ties) < MAX_TIE_CHECKS and await target.is_tie(sample[:n], token)
            if not ties[suspect]:
                impossible.append(suspect)
    return num_checked, impossible
