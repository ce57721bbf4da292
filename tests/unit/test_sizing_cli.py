"""`python -m pipeline memory` and `serving`: what they print, and the sentence for each wrong input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packers import make_pair

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
LLAMA = str(CONFIGS / "llama-3-70b.json")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command of the pipeline."""
    command = [sys.executable, "-m", "pipeline", *arguments]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def answer(*arguments: str) -> dict[str, Any]:
    """Run `memory --json` and return what it printed."""
    done = run("memory", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_llama_3_70b_in_bf16() -> None:
    found = answer(LLAMA)
    assert found["kv_cache_bytes_per_token"] == 327_680
    assert found["weight_bytes"] == 2 * 70_553_706_496


def test_every_option_at_once() -> None:
    found = answer(
        LLAMA, "--format", "int4-w4a16", "--group-size", "128", "--kv-dtype", "fp8",
        "--tensor-parallel", "2", "--target", "l40s",
    )  # fmt: skip
    assert found["kv_cache_bytes_per_token"] == 2 * 8 * 128 * 80 // 2
    assert found["weight_bytes"] == pytest.approx(39.5e9 / 2, rel=0.01)
    assert [f["tensor_parallel"] for f in found["target"]["fits"]] == [1, 2, 4, 8]
    assert found["target"]["calibration_gpus"]["any method with ModelOpt"]["gpus"] == 4


def test_a_folder_with_weights_is_exact(tmp_path: Path) -> None:
    made = make_pair(tmp_path, "ct-int4", tied=False)
    exact, said = answer(str(made)), answer(str(made), "--format", "int4-w4a16", "--group-size", "64")
    assert (exact["weight_bytes_kind"], said["weight_bytes_kind"]) == ("exact", "predicted")
    assert exact["weight_bytes"] == pytest.approx(said["weight_bytes"], rel=0.001)
    (made / "model.safetensors").unlink()
    assert answer(str(made))["weight_bytes_kind"] == "predicted"


def test_what_is_not_modelled_is_null_with_a_reason() -> None:
    found = answer(str(CONFIGS / "qwen3-next-80b-a3b.json"), "--target", "h200")
    assert found["weight_bytes"] is None and found["weight_bytes_kind"].startswith("not predicted (")
    assert found["not_modelled"] == ["36 linear_attention layers"]


def test_it_reads_well() -> None:
    text = run("memory", LLAMA, "--target", "l40s").stdout
    assert "327,680 bytes a token" in text and "141,107,412,992 bytes (131.42 GiB), bf16, predicted" in text
    assert "does not fit: weights and overhead need 133.3 GiB" in text
    assert "sliding window" in run("memory", str(CONFIGS / "gemma-2-9b.json")).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((LLAMA, "--format", "fp8-tenser"), "no format 'fp8-tenser' in stored.yaml. Did you mean 'fp8-tensor'?"),
        ((LLAMA, "--kv-dtype", "fb8"), "no KV cache type 'fb8' in pipeline/memory/kv.py. Did you mean 'fp8'?"),
        ((LLAMA, "--target", "l40"), "no target 'l40' in params.yaml. Did you mean 'l40s'?"),
        ((LLAMA, "--tensor-parallel", "3"), "3 does not divide the 64 attention heads; possible: 1, 2, 4, 8, 16"),
        ((LLAMA, "--tensor-parallel", "0"), "--tensor-parallel is 0"),
        ((LLAMA, "--format", "int4-w4a16", "--group-size", "-8"), "group size -8"),
        (("nowhere/config.json",), "There is no nowhere/config.json"),
    ],
)
def test_wrong_arguments_get_the_nearest_name(arguments: tuple[str, ...], says: str) -> None:
    done = run("memory", *arguments)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "lacks the key 'hidden_size'"),
        ('{"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 9}', "lacks the key 'num_attention_heads'"),
        ('{"hidden_size": 6.5}', "has hidden_size 6.5, which must be a whole number above zero"),
        ('{"text_config": {"hidden_size": 64}}', "lacks the key 'num_hidden_layers'"),
    ],
)
def test_a_broken_config_is_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    done = run("memory", str(tmp_path))
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    done = run("memory", str(tmp_path))
    assert done.returncode == 2 and "There is no" in done.stderr and "config.json" in done.stderr


def test_serving_prints_values_reasons_and_predictions() -> None:
    done = run("serving", "--cell", "smollm2-135m.fp8.vllm.h100")
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs" in done.stdout and "predicted (a bound" in done.stdout
    cpu = run("serving", "--cell", "smollm2-135m.int8.vllm.cpu").stdout
    assert "yours, from params.yaml" in cpu and "not predicted (the target gives no bandwidth_gb_s)" in cpu
    found = json.loads(run("serving", "--cell", "smollm2-135m.fp8.vllm.h100", "--json").stdout)
    assert {item["name"] for item in found["serving"]} >= {"max_model_len", "tensor_parallel_size"}


def test_serving_of_an_unknown_or_unfetched_cell(tmp_path: Path) -> None:
    done = run("serving", "--cell", "smollm2-135m.fp8.vllm.h10")
    assert done.returncode == 2 and "Did you mean 'smollm2-135m.fp8.vllm.h100'?" in done.stderr
    shutil.copy(ROOT / "params.yaml", tmp_path)
    done = run("serving", "--cell", "smollm2-135m.fp8.vllm.h100", cwd=tmp_path)
    assert done.returncode == 2 and "uv run dvc repro fetch@smollm2-135m" in done.stderr


def test_serving_names_every_option_of_the_package_with_its_source() -> None:
    for cell in (
        "llama-8b-random.fp8-dynamic.vllm.h200",
        "smollm2-135m.fp8-kv.vllm.h200",
        "smollm2-135m.int8.vllm.cpu",
    ):
        options = yaml.safe_load((ROOT / f"artifacts/packages/{cell}/deploy/serve.yaml").read_text(encoding="utf-8"))
        found = json.loads(run("serving", "--cell", cell, "--json").stdout)
        named = {item["name"].replace("_", "-"): item["value"] for item in found["serving"]}
        assert named == options
        assert all(item["reason"] for item in found["serving"])
        text = run("serving", "--cell", cell).stdout
        assert all(item["name"] in text for item in found["serving"])
