"""Which GPU is which target's: the model's words, the SM and the memory all count."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import host
from pipeline.specs import Target

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


def test_a_host_with_more_gpus_and_cores_is_the_same_kind_for_one_of_them() -> None:
    gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory": "143771 MiB", "driver": "580.159.04"}
    other = gpu | {"driver": "580.95.05"}
    one = {"cpu": "C", "cores": 16, "gpus": [gpu]}
    two = {"cpu": "C", "cores": 32, "gpus": [other, gpu]}
    target = Target(device="cuda", gpu="NVIDIA H200", sm=90, memory_gib=141)
    assert host.kind(target, one) == host.kind(target, two)
    pair = target.model_copy(update={"count": 2})
    assert len(host.kind(pair, two)["gpus"]) == 2 and host.kind(pair, two) != host.kind(target, two)
    assert host.kind(target, one | {"gpus": [gpu | {"driver": "590.1"}]}) != host.kind(target, one)
    cpu = Target(device="cpu")
    assert host.kind(cpu, one | {"gpus": []}) != host.kind(cpu, two | {"gpus": []})
