"""Whether two tokenizers give the same meaning to the same ids, and if not, where they differ.

Knows the layout of tokenizer.json, and reads nothing else: no file, no model.
"""

import hashlib
import json
from typing import Any

Json = dict[str, Any]


def fingerprint(tokenizer: Json) -> str:
    """SHA-256 in hex over what decides which text is which ids, whatever the layout of the file."""
    canonical = json.dumps(_meaning(tokenizer), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def difference(draft: Json, target: Json) -> str:
    """How two tokenizers with other fingerprints differ, as the end of a sentence."""
    ours, theirs = _meaning(draft), _meaning(target)
    tokens, other_tokens = ours["vocabulary"], theirs["vocabulary"]
    ids = sorted(
        id_ for id_ in tokens.keys() | other_tokens.keys() if tokens.get(id_) != other_tokens.get(id_)
    )
    if ids:
        examples = ", ".join(f"{tokens.get(id_)!r} and {other_tokens.get(id_)!r} at {id_}" for id_ in ids[:3])
        return (
            f"their tokenizers have {len(tokens)} and {len(other_tokens)} tokens and differ at {len(ids)} "
            f"ids (draft and target: {examples})"
        )
    parts = [part for part in ours if ours[part] != theirs[part]]
    return f"their tokenizers have the same tokens, but differ in {' and '.join(parts)}"


def tokens_by_id(tokenizer: Json) -> dict[int, str]:
    """Each id's token, added tokens included."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: [token, score] in the order of ids
        vocabulary = {entry[0]: id_ for id_, entry in enumerate(vocabulary)}
    tokens = {id_: token for token, id_ in vocabulary.items()}
    return tokens | {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or ()}


def _meaning(tokenizer: Json) -> Json:
    """The parts that count, in one form. Left out: the matching of added tokens, padding, truncation."""
    model = tokenizer.get("model") or {}
    return {
        "vocabulary": tokens_by_id(tokenizer),
        # Older files write a pair as one string; a space is in no token of theirs.
        "merges": [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()
        ],
        "normalizer": tokenizer.get("normalizer"),
        "pre-tokenizer": tokenizer.get("pre_tokenizer"),
    }
