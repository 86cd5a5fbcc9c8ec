"""The estimate adds up, the refusal says what to change, and control groups' limits count."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.machine import available_memory, cores_of_groups, left_in_groups, usable_cores
from cluster.memory import DoesNotFit, estimate, model_memory
from workers.checkpoints import CheckpointInfo

INFO = CheckpointInfo(
    folder=Path("model"),
    model_type="llama",
    vocab_size=1000,
    context_length=4096,
    num_layers=10,
    num_kv_heads=5,
    head_dim=20,
    weight_bytes=2_000_000_000,  # bfloat16 on disk
    num_parameters=1_000_000_000,
    end_token_ids=(0,),
    tokenizer_fingerprint="",
    output_ids=None,
)


def test_weights_count_in_float32_whatever_they_are_stored_in() -> None:
    assert model_memory("target", INFO, num_slots=1, max_length=1).weights == 4_000_000_000


def test_the_weights_of_a_gguf_file_stay_as_they_are_stored() -> None:
    info = replace(INFO, gguf=Path("model.gguf"))
    assert model_memory("draft", info, num_slots=1, max_length=1).weights == 2_000_000_000


def test_a_cache_holds_a_key_and_a_value_for_each_layer_slot_and_position() -> None:
    cache = model_memory("target", INFO, num_slots=3, max_length=7).cache
    assert cache == 3 * 7 * 10 * 2 * 5 * 20 * 4


def test_the_total_has_both_models_and_ray() -> None:
    target = model_memory("target", INFO, num_slots=1, max_length=1024)
    draft = model_memory("draft", replace(INFO, num_parameters=10**8), num_slots=1, max_length=1024)
    total = estimate([target, draft])
    assert total.total == target.total + draft.total + total.ray
    assert total.total > target.weights + target.cache + draft.weights + draft.cache


def test_what_fits_exactly_is_not_refused() -> None:
    total = estimate([model_memory("target", INFO, num_slots=1, max_length=1024)])
    total.require(total.total)
    with pytest.raises(DoesNotFit):
        total.require(total.total - 1)


def test_a_refusal_names_what_is_needed_what_there_is_and_what_to_change() -> None:
    models = [model_memory(role, INFO, num_slots=1, max_length=1024) for role in ("target", "draft")]
    with pytest.raises(DoesNotFit) as refusal:
        estimate(models).require(3_000_000_000)
    sentence = str(refusal.value)
    assert "3.0 GB are available" in sentence
    assert "the draft takes 4.0 GB of weights" in sentence
    assert "--draft none" in sentence


def test_without_a_draft_nobody_is_told_to_drop_it() -> None:
    with pytest.raises(DoesNotFit) as refusal:
        estimate([model_memory("target", INFO, num_slots=1, max_length=1)]).require(0)
    assert "draft" not in str(refusal.value)


def test_a_version_2_group_around_ours_limits_the_memory(tmp_path: Path) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    _write(tmp_path / "pod", {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1"})
    _write(inner, {"memory.max": "max", "memory.current": "600", "memory.stat": "anon 1"})
    assert left_in_groups("0::/pod/container\n", tmp_path) == [300]


def test_file_cache_that_can_be_dropped_counts_as_left(tmp_path: Path) -> None:
    _write(tmp_path, {"memory.max": "1000", "memory.current": "900", "memory.stat": "inactive_file 250"})
    assert left_in_groups("0::/", tmp_path) == [350]


def test_a_version_1_group_is_found_where_a_container_mounts_it(tmp_path: Path) -> None:
    limits = {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "2000"}
    _write(tmp_path / "memory", limits | {"memory.stat": "total_inactive_file 10"})
    assert left_in_groups("4:memory:/docker/0123456789\n1:cpu:/\n", tmp_path) == [3010]


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    limits = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "2000"}
    _write(tmp_path / "memory", limits | {"memory.stat": ""})
    assert left_in_groups("4:memory:/\n", tmp_path) == []


def test_a_quota_of_processor_time_limits_the_cores(tmp_path: Path) -> None:
    _write(tmp_path / "pod", {"cpu.max": "150000 100000"})
    assert cores_of_groups("0::/pod", tmp_path) == [2]
    _write(tmp_path / "pod", {"cpu.max": "max 100000"})
    assert cores_of_groups("0::/pod", tmp_path) == []


def test_this_machine_has_memory_and_cores() -> None:
    assert available_memory() > 0
    assert usable_cores() >= 1


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
