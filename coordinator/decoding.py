"""The decoding loop: propose, verify, commit, until the session is finished.

Knows the order of things and nothing of how they are done. With K = 0 the proposal is empty and the same
loop is plain decoding.
"""

from collections.abc import Callable, Sequence

from coordinator.draft_length import draft_limit
from coordinator.draft_policy import DraftPolicy
from coordinator.drafting import Drafter
from coordinator.migrating import Target, UnreadableProposal
from coordinator.sessions import Session
from protos.inference_pb2 import Origin
from protos.wire import unpack_tokens
from protos.worker_pb2 import Proposal

Emit = Callable[[Sequence[tuple[int, "Origin"]]], None]


async def decode(
    session: Session, drafter: Drafter | None, target: Target, policy: DraftPolicy, emit: Emit
) -> None:
    """Run rounds until `session.finish_reason` is set, giving `emit` each round's committed tokens.

    `policy` fixes K where the session leaves it open. Slots are freed however it ends. Raises TaskError when
    no target goes on.
    """
    try:
        while session.finish_reason is None:
            session.begin_round()
            proposal = await _propose(session, drafter, target, policy)
            try:
                verdict = await target.verify(session, proposal)
            except UnreadableProposal as fault:
                assert drafter is not None, "somebody made the proposal"
                drafter.blame(session, str(fault))
                continue
            drafts = unpack_tokens(proposal.tokens, "proposal.tokens")
            emit(session.commit(drafts, len(proposal.rows), verdict))
            policy.learn(session, len(drafts), verdict.num_accepted, verdict.sum_min_pq)
            if drafter is not None:
                drafter.learn(session, len(drafts), verdict)
    finally:
        policy.forget(session)
        target.forget(session)
        if drafter is not None:
            drafter.forget(session)


async def _propose(
    session: Session, drafter: Drafter | None, target: Target, policy: DraftPolicy
) -> Proposal:
    """K is fixed before the first draw, from committed history and measured times alone."""
    if drafter is None:
        return Proposal()
    limit = draft_limit(session.num_remaining, len(session.tokens), drafter.max_length)
    k = policy.choose(session, drafter, target.verifier, min(session.num_draft_tokens, limit))
    return await drafter.propose(session, k)
