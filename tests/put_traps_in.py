"""Puts every known trap into a copy of the code, one at a time, and sees that the tests notice.

    python -m tests.put_traps_in            # all, a few minutes
    python -m tests.put_traps_in residual   # those whose name contains the word

A trap is a small edit that makes speculative decoding silently inexact, or its cache wrong. One that no test
notices is printed and fails the run. Not part of the test suite: it runs parts of the suite many times.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Trap:
    """An edit, and the test files of which one must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LAW, CORE = "test_law", "test_verification test_traps"
TRAPS = [
    Trap(
        "p and q swapped in the ratio",
        "workers/verification.py",
        "accept[i] * q[i].q_of(token) < p[i].of(token)",
        "accept[i] * p[i].of(token) < q[i].q_of(token)",
        CORE,
    ),
    Trap(
        "a token with p = 0 accepted at u = 0",
        "workers/verification.py",
        "accept[i] * q[i].q_of(token) < p[i].of(token)",
        "accept[i] * q[i].q_of(token) <= p[i].of(token)",
        CORE,
    ),
    Trap(
        "recovered from p instead of the residual",
        "workers/verification.py",
        "weights = residual(following, q[num_accepted], scale)",
        "weights = following.probabilities",
        CORE,
    ),
    Trap(
        "block residual without its weight w",
        "workers/verification.py",
        "weights = residual(following, q[num_accepted], scale)",
        "weights = residual(following, q[num_accepted], 1.0)",
        CORE,
    ),
    Trap(
        "block rule stops at the first failure",
        "workers/verification.py",
        "            num_accepted, scale = i, weight\n",
        "            num_accepted, scale = i, weight\n        else:\n            break\n",
        CORE,
    ),
    Trap(
        "the ratio in another precision than the draw",
        "workers/counts.py",
        "return self.counts / float(self.total)",
        "return (self.counts / float(self.total)).astype(np.float16).astype(np.float64)",
        "test_verification test_counts",
    ),
    Trap(
        "sampled at another temperature than shipped",
        "workers/jobs.py",
        "self._tokens.append(row.draw(self._coin(len(self._tokens))))",
        "other = self._make_row(Distribution(q.ids, q.probabilities**2))\n"
        "        self._tokens.append(other.draw(self._coin(len(self._tokens))))",
        "test_jobs",
    ),
    Trap(
        "greedy draft with a soft q",
        "workers/jobs.py",
        "self._tokens.append(row.draw(self._coin(len(self._tokens))))",
        "self._tokens.append(int(row.ids[row.counts.argmax()]))",
        "test_jobs",
    ),
    Trap(
        "sampled from the full q, shipped truncated",
        "workers/jobs.py",
        "self._tokens.append(row.draw(self._coin(len(self._tokens))))",
        "whole = distribution(logits[0], settings_of(self._task.sampling))\n"
        "        self._tokens.append(quantise_full(whole.probabilities).draw(self._coin(len(self._tokens))))",
        "test_jobs",
    ),
    Trap(
        "tokens not drawn from their rows go unnoticed",
        "workers/jobs.py",
        "Purpose.DRAFT)) != token",
        "Purpose.DRAFT)) != token and False",
        "test_jobs",
    ),
    Trap(
        "a drawn token dropped because its q is low",
        "workers/jobs.py",
        "        self._rows.append(row)\n",
        "        self._rows.append(row)\n        if row.q_of(self._tokens[-1]) < 0.3:\n"
        "            self._tokens.pop()\n            self._rows.pop()\n            return self._reply()\n",
        "test_jobs test_law",
    ),
    Trap(
        "a late drafter drops what it drew",
        "workers/jobs.py",
        "if self._task.num_draft_tokens == 0 or self._out_of_time():\n",
        "if self._task.num_draft_tokens == 0 or self._out_of_time():\n"
        "            self._tokens, self._rows = [], []\n",
        "test_jobs",
    ),
    Trap(
        "a malformed row spoils the whole proposal",
        "workers/rows.py",
        "            rows.append(one_hot(token))\n            num_unusable += 1\n",
        "            return [one_hot(t) for t in tokens], len(tokens)\n",
        "test_rows",
    ),
    Trap(
        "accept and recover share a number",
        "workers/randomness.py",
        "    RECOVER = 3\n",
        "    RECOVER = 2\n",
        "test_randomness test_traps",
    ),
    Trap(
        "draft and accept share a number",
        "workers/randomness.py",
        "    ACCEPT = 2\n",
        "    ACCEPT = 1\n",
        "test_randomness test_traps",
    ),
    Trap(
        "uniforms keyed by position alone",
        "workers/randomness.py",
        'struct.pack("<IQQB", choice, base_length, position, purpose)',
        'struct.pack("<IQQB", choice, 0, position, purpose)',
        "test_randomness test_traps",
    ),
    Trap(
        "uniforms keyed by position alone, seen through the pipeline",
        "workers/randomness.py",
        'struct.pack("<IQQB", choice, base_length, position, purpose)',
        'struct.pack("<IQQB", choice, 0, position, purpose)',
        "test_law -k cut_short",
    ),
    Trap(
        "the samples of one prompt share their keys",
        "workers/randomness.py",
        'struct.pack("<IQQB", choice, base_length, position, purpose)',
        'struct.pack("<IQQB", 0, base_length, position, purpose)',
        "test_law -k independent",
    ),
    Trap(
        "the drafter gets the seed",
        "coordinator/sessions.py",
        'self.draft_key = hashlib.blake2b(seed, digest_size=16, person=b"outrider draft").digest()',
        "self.draft_key = seed",
        "test_sessions",
    ),
    Trap(
        "proposal B answered with the verdict on A",
        "workers/slots.py",
        "key != slot.last_key",
        "False",
        "test_slots",
    ),
    Trap(
        "the verdict's digest goes unchecked",
        "coordinator/verifying.py",
        "result.digest != task.digest",
        "False",
        "test_faults",
    ),
    Trap(
        "cache cut one too long",
        "workers/jobs.py",
        "self._slots.cut(self.slot, self._task.state.base_length + verdict.num_accepted)",
        "self._slots.cut(self.slot, self._task.state.base_length + verdict.num_accepted + 1)",
        "test_jobs",
    ),
    Trap(
        "cache cut one too short: right text, wasted work",
        "workers/jobs.py",
        "self._slots.cut(self.slot, self._task.state.base_length + verdict.num_accepted)",
        "self._slots.cut(self.slot, self._task.state.base_length + verdict.num_accepted - 1)",
        "test_jobs",
    ),
    Trap(
        "the model's cache is not cut",
        "workers/slots.py",
        "        self._model.truncate(slot.index, length)\n",
        "        pass\n",
        "test_slots test_jobs",
    ),
    Trap(
        "the last committed token is not fed again",
        "workers/slots.py",
        "state.base_length - num_again)\n        missing",
        "state.base_length)\n        missing",
        "test_slots",
    ),
    Trap(
        "drafts become the prefix of another session",
        "workers/slots.py",
        "min(len(self.tokens), self.num_committed)",
        "len(self.tokens)",
        "test_prefix_sharing",
    ),
    Trap(
        "p of a position sees later drafts",
        "workers/slot_attention.py",
        "hidden = seen > row\n",
        "hidden = seen > row + 1\n",
        "test_transformers_model",
    ),
    Trap(
        "p of a position sees later drafts, in the decoder",
        "workers/slot_cache.py",
        "hidden = seen > row\n",
        "hidden = seen > row + 1\n",
        "test_language_model",
    ),
    Trap(
        "a row sees its neighbour's slot, in the decoder",
        "workers/slot_cache.py",
        "seen = self._cache.block[:, run.slots, :, ",
        "seen = self._cache.block[:, : run.num_slots, :, ",
        "test_language_model",
    ),
    Trap(
        "a row sees its neighbour's slot",
        "workers/slot_attention.py",
        "keys[slot : slot + 1, :, seen]",
        "keys[0:1, :, seen]",
        "test_transformers_model",
    ),
    Trap(
        "padding of the vocabulary is scored",
        "workers/engine.py",
        "chosen = num_tokens(source), precision_of",
        "chosen = None, precision_of",
        "test_engine",
    ),
    Trap(
        "token id 0 taken for none",
        "coordinator/sessions.py",
        "for token in drafts[: verdict.num_accepted]]",
        "for token in drafts[: verdict.num_accepted] if token]",
        "test_sessions",
    ),
    Trap(
        "generation goes on behind an accepted end token",
        "coordinator/sessions.py",
        "block = block[: i + 1]",
        "block = block[:]",
        "test_sessions",
    ),
]


def notices(trap: Trap) -> str | None:
    """The first test that fails, or cannot even be set up, with the trap in; None when all pass."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "outrider"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info"),
        )
        file = copy / trap.file
        code = file.read_text()
        if code.count(trap.old) != 1:
            raise SystemExit(f"{trap.name}: {trap.file} has {code.count(trap.old)} places to put it")
        file.write_text(code.replace(trap.old, trap.new))
        words = trap.tests.split()
        files = [f"tests/{word}.py" for word in words if word.startswith("test_")]
        chosen = words[words.index("-k") :] if "-k" in words else []
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "--tb=no", "-m", "not demo", *files, *chosen],
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=600,
        )
    lines = run.stdout.splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith(("FAILED", "ERROR tests"))]
    if run.returncode == 1 and failed:
        return failed[0].split("::")[-1]
    if run.returncode == 0:
        return None
    raise SystemExit(f"{trap.name}: the tests could not be run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")


def main() -> None:
    """Put the traps in and print who noticed."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    table = Table("trap", "the first test that fails")
    num_missed = 0
    console = Console()
    for trap in [trap for trap in TRAPS if word in trap.name]:
        noticed = notices(trap)
        num_missed += noticed is None
        console.print(f"{trap.name}: {noticed or 'NOBODY NOTICED'}", markup=False, soft_wrap=True)
        table.add_row(trap.name, noticed or "NOBODY NOTICED")
    console.print(table)
    sys.exit(f"{num_missed} traps went unnoticed" if num_missed else 0)


if __name__ == "__main__":
    main()
