"""Which GPU is which target's: the model's words, the SM and the memory all count."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import host

A100_80 = {"name": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0", "memory": "81920 MiB"}
A100_40 = {"name": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0", "memory": "40960 MiB"}
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory": "143771 MiB"}
RTX_4090 = {"name": "NVIDIA GeForce RTX 4090", "compute_capability": "8.9", "memory": "24564 MiB"}
RTX_3060 = {"name": "NVIDIA GeForce RTX 3060", "compute_capability": "8.6", "memory": "12288 MiB"}
L40S = {"name": "NVIDIA L40S", "compute_capability": "8.9", "memory": "46068 MiB"}


@pytest.mark.parametrize(("target", "gpu", "same"), [
    (("NVIDIA A100 SXM 80GB", 80, 80), A100_80, True),
    (("NVIDIA A100 SXM 80GB", 80, 80), A100_40, False),
    (("NVIDIA H200", 90, 141), H200, True),
    (("NVIDIA H100 SXM", 90, 80), H200, False),
    (("NVIDIA GeForce RTX 4090", 89, 24), RTX_4090, True),
    (("NVIDIA GeForce RTX 4090", 89, 24), RTX_3060, False),
    (("NVIDIA L40S", 89, 48), L40S, True),
    (("NVIDIA L40S", 89, 48), RTX_4090, False),
])  # fmt: skip
def test_a_gpu_matches_its_target_only(target: tuple[str, int, float], gpu: dict[str, str], same: bool) -> None:
    assert host.matches(*target, gpu) is same


def test_the_fingerprint_is_stable() -> None:
    assert host.fingerprint() == host.fingerprint()
    assert host.usable_cores() >= 1


def test_who_copied_the_tree_says_which_commit_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUANTPRESS_COMMIT", raising=False)
    assert host.git_commit(tmp_path) == "unknown"
    monkeypatch.setenv("QUANTPRESS_COMMIT", "7bfe3a4")
    assert host.git_commit(tmp_path) == "7bfe3a4"
