"""What a model's name stands for: folders, files, and what the hub does not give."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors

from workers.checkpoints import ModelRefused, ModelUnreachable
from workers.model_cache import cache_folder
from workers.model_names import DEMO_NAMES, resolve


def no_progress(message: str) -> None:
    pass


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    assert cache_folder().name == "outrider"
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), "model", "./model", "~/model"):
        assert resolve(name, role="draft", progress=no_progress) == folder


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "~/nowhere", "nowhere", "../a/b", "a/b/c", "a/b@"]
)
def test_a_path_that_does_not_exist_is_refused_with_the_demo_names(name: str) -> None:
    with pytest.raises(ModelRefused, match="does not exist") as refusal:
        resolve(name, role="target", progress=no_progress)
    assert all(demo in str(refusal.value) for demo in DEMO_NAMES)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelRefused, match="is a file: give the folder"):
        resolve(str(file), role="target", progress=no_progress)


def test_a_hub_id_is_fetched_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    messages: list[str] = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options["revision"]))
        assert "config.json" in options["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name in ("org/name", "org/name@v1.0", "org/name@refs/pr/3"):
        assert resolve(name, role="target", progress=messages.append) == tmp_path
    assert asked == [("org/name", None), ("org/name", "v1.0"), ("org/name", "refs/pr/3")]
    assert len(messages) == 3


def test_offline_the_hub_is_not_asked_and_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "model_info", None)

    def download(repository: str, **options: Any) -> str:
        assert options["local_files_only"]
        raise errors.LocalEntryNotFoundError("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelUnreachable, match=r"'org/name' .*cache has no copy.*without --offline"):
        resolve("org/name", role="target", progress=no_progress)


def hub_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    return kind("no", response=Mock(headers={}))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (hub_error(errors.GatedRepoError), "'org/name@v1' is gated: accept its terms"),
        (
            hub_error(errors.RepositoryNotFoundError),
            "'org/name@v1' is not on the hub.*local folder, or 'demo'",
        ),
        (hub_error(errors.RevisionNotFoundError), "'org/name' has no revision 'v1'"),
        (hub_error(errors.HfHubHTTPError), "could not be fetched from the hub .no"),
        (errors.LocalEntryNotFoundError("no connection"), "does not answer.*local folder, or 'demo'"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_does_not_give_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def download(repository: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelUnreachable, match=sentence):
        resolve("org/name@v1", role="target", progress=no_progress)
