"""What the name of a model stands for: a demo model, a local folder or file, or a model of the hub.

Knows how each is found or fetched, and the sentences where it is not; `workers.checkpoints` tells whether it
is fit. Does not know torch or transformers, which the processes that import this must not load.
"""

import re
from collections.abc import Callable
from pathlib import Path

from workers.checkpoints import GGUF_SUFFIX, ModelUnreachable, Role, refused
from workers.model_cache import DRAFT_NAME, TARGET_NAME, is_offline

DEMO_NAMES = ("demo", TARGET_NAME, DRAFT_NAME)
HUB_SECONDS = 10.0
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocabulary.json",
)


def resolve(name: str, *, role: Role, progress: Callable[[str], None]) -> Path:
    """The local folder or GGUF file of a model, fetched first if need be.

    `name` is a demo name ('demo' is the demo target or the demo draft, by role), a local folder or *.gguf
    file, or a hub id with an optional revision, `org/name@revision`. Raises ModelUnreachable when it cannot
    be fetched, or may not be (see `is_offline`), ModelRefused when it names nothing.
    """
    if name in DEMO_NAMES:
        from workers import demo_models  # loads numpy, which a command that starts does without

        is_target = name == TARGET_NAME or (name == "demo" and role == "target")
        return demo_models.demo_target(progress) if is_target else demo_models.demo_draft(progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        if folder.suffix != GGUF_SUFFIX:
            raise refused(name, "is a file", "give the folder that holds its config.json, or a *.gguf file")
        return folder.absolute()  # not resolved: the hub's cache links to files without a suffix
    if name.endswith(GGUF_SUFFIX) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", name):
        demos = ", ".join(f"'{demo}'" for demo in DEMO_NAMES)
        sources = f"a local folder or *.gguf file, a hub id 'org/name' or one of {demos}"
        raise refused(name, "does not exist", f"give {sources}")
    return _fetch_from_hub(name, progress)


def _fetch_from_hub(name: str, progress: Callable[[str], None]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging as hub_logging

    repository, _, revision = name.partition("@")
    instead = "give a local folder, or 'demo'"
    progress(
        f"Finding {name} in the hub's cache"
        if is_offline()
        else f"Fetching {name} from the hub, or from its cache"
    )
    hub_logging.set_verbosity_error()  # its retries are no news to a user
    try:
        # Only the top folder: repositories keep other formats of the same weights below it.
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=["*/*"],
            local_files_only=is_offline() or not _hub_answers(repository, revision),
        )
    except errors.GatedRepoError:
        raise ModelUnreachable(
            f"Model {name!r} is gated: accept its terms on the hub and run `hf auth login`, or {instead}."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelUnreachable(
            f"Model {repository!r} has no revision {revision!r} on the hub: give another, or none."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelUnreachable(
            f"Model {name!r} is not on the hub, or is private: check the spelling, run `hf auth login`, "
            f"or {instead}."
        ) from None
    except errors.LocalEntryNotFoundError:
        if is_offline():
            raise ModelUnreachable(
                f"Model {name!r} is no local folder, the hub's cache has no copy, and nothing may be fetched "
                f"offline: run once without --offline and OUTRIDER_OFFLINE, or {instead}."
            ) from None
        raise ModelUnreachable(
            f"Model {name!r} is no local folder, the hub does not answer, and its cache has no copy: "
            f"check the connection, or {instead}."
        ) from None
    except (OSError, errors.RevisionResolutionError) as error:  # no network, refused by a proxy, disk full
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ModelUnreachable(
            f"Model {name!r} is no local folder and could not be fetched from the hub ({reason}): "
            f"check the connection, or {instead}."
        ) from error
    return Path(folder)


def _hub_answers(repository: str, revision: str) -> bool:
    """Asked once and briefly: a download without a network would be tried for half a minute."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.model_info(repository, revision=revision or None, timeout=HUB_SECONDS)
    except errors.HfHubHTTPError:  # no such model or revision, or gated: an answer, which says why
        raise
    except Exception:  # the network's errors are those of whichever library the hub's uses
        return False
    return True
