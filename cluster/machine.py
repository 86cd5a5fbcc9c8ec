"""What this machine, or the container around it, leaves to this process: memory and cores.

Knows the operating system's accounts (psutil, control groups of both versions), and what names the machine.
Decides nothing.
"""

import math
import os
import platform
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


def available_memory() -> int:
    """Bytes that can still be taken without swapping, within the limits of the control groups around us."""
    available = int(psutil.virtual_memory().available)
    return min([available, *left_in_groups(_read(_OWN_GROUPS), _ROOT)])


def usable_cores() -> int:
    """Physical cores that this process may use at once: affinity and control groups' quotas count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min([allowed, physical, *cores_of_groups(_read(_OWN_GROUPS), _ROOT)]))


def processor_name(device: str) -> str:
    """What a process here computes on, this machine's cores or a device: those who share it have one name."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "all"
    machine = _read(_BOOT).strip() or platform.node()
    return f"{machine} cores {cores}" if device == "cpu" else f"{machine} {device}"


def left_in_groups(own_groups: str, root: Path) -> list[int]:
    """Bytes left below the limit of each memory group around us. Cache that can be dropped counts as left."""
    left = []
    for folder in _group_folders(own_groups, root, "memory"):
        version_2 = (folder / "memory.max").exists()
        limit = _number(folder / ("memory.max" if version_2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if version_2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        statistics = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
        droppable = int(statistics.get("inactive_file" if version_2 else "total_inactive_file", 0))
        left.append(max(0, limit - used + droppable))
    return left


def cores_of_groups(own_groups: str, root: Path) -> list[int]:
    """The quota of each processor group around us in whole cores, rounded up."""
    cores = []
    for folder in _group_folders(own_groups, root, "cpu"):
        words = _read(folder / "cpu.max").split()
        quota = words[0] if words else _read(folder / "cpu.cfs_quota_us").strip()
        period = words[1] if len(words) > 1 else _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            cores.append(max(1, math.ceil(int(quota) / int(period))))
    return cores


def _group_folders(own_groups: str, root: Path, controller: str) -> list[Path]:
    """Our group's folder and all around it; in a container the path may lie outside of what is mounted."""
    folders = []
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root
        elif controller in controllers.split(","):
            top = root / controller
        else:
            continue
        group = top / path.lstrip("/")
        if not group.exists():
            group = top
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return folders


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
