"""Cells of TensorRT-LLM: plans, packages, serving's plumbing, and bad input that ends in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_trtllm import BUNDLE, ENGINE, FakeHost
from packers import editing_json

from pipeline import manifest
from pipeline.cells import Cell
from pipeline.cli import main
from pipeline.errors import InputError, WorkError
from pipeline.package import package
from pipeline.plan import make_plan
from pipeline.report.cells import _served_docs
from pipeline.serving import Server, no_prompt_logprobs, read_log
from pipeline.trtllm import llm_yaml
from pipeline.trtllm.command import read_back
from pipeline.trtllm.deployment import deployment
from pipeline.trtllm.package import allowed_sms, why_not_quant_config
from pipeline.trtllm.probe import is_genuine, read_probe
from pipeline.trtllm.warming import result_path, warm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def _config(fake: FakeHost, **changes: Any) -> dict[str, Any]:
    return json.loads((fake.source / "config.json").read_text()) | changes


BIG = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
       "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv", "int8", "awq", "w4a8", "nvfp4"])
@pytest.mark.parametrize("target", ["h200", "l40s", "a100-80g", "b200"])
def test_every_engine_command_and_yaml_of_the_matrix_holds(recipe: str, target: str, fake: FakeHost) -> None:
    plan = deployment(Cell("tiny", recipe, "trtllm-engine", target), fake.params(), _config(fake, **BIG))
    assert plan.build is not None
    parsed = read_back("build", plan.version, plan.build)
    assert parsed["checkpoint_dir"] == f"artifacts/checkpoints/tiny.{recipe}.modelopt-trtllm"
    assert parsed["max_seq_len"] >= parsed["max_input_len"]
    assert read_back("serve", plan.version, plan.serve[1:])["backend"] == "tensorrt"
    assert list(llm_yaml.problems(plan.yaml)) == []
    assert "max_batch_size" not in plan.yaml
    bundle = deployment(Cell("tiny", recipe, "trtllm-bundle", target), fake.params(), _config(fake, **BIG))
    assert bundle.build is None
    assert read_back("serve", bundle.version, bundle.serve[1:])["served_model_name"] == "tiny"
    assert list(llm_yaml.problems(bundle.yaml)) == []
    assert bundle.yaml["kv_cache_config"]["dtype"] == ("fp8" if recipe == "fp8-kv" else "auto")


def test_tensor_parallel_reaches_the_checkpoint_the_server_and_the_yaml(fake: FakeHost) -> None:
    serving = {
        f"trtllm-{kind}-h200": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} for kind in ("engine", "bundle")
    }
    fake.raw["targets"]["h200"]["count"] = 4
    params = fake.params(serving=serving)
    engine = deployment(Cell("tiny", "fp8", "trtllm-engine", "h200"), params, _config(fake, **BIG))
    assert engine.checkpoint.name == "tiny.fp8.modelopt-trtllm.tp2pp2"
    assert engine.build_flags["workers"] == 4
    assert read_back("serve", engine.version, engine.serve[1:])["pp_size"] == 2
    bundle = deployment(Cell("tiny", "fp8", "trtllm-bundle", "h200"), params, _config(fake, **BIG))
    assert (bundle.yaml["tensor_parallel_size"], bundle.yaml["pipeline_parallel_size"]) == (2, 2)
    assert "tp_size" not in bundle.serve


def test_the_users_spelling_and_further_keys_reach_the_yaml(fake: FakeHost) -> None:
    own = {
        "dtype": "bfloat16", "max-seq-len": 4096, "cuda_graph_config": {"enable_padding": True},
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False},
    }  # fmt: skip
    plan = deployment(BUNDLE, fake.params(serving={"trtllm-bundle-l40s": own}), _config(fake, **BIG))
    assert plan.yaml["dtype"] == "bfloat16"
    assert plan.yaml["max_seq_len"] == 4096
    assert plan.yaml["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    assert plan.yaml["kv_cache_config"]["enable_block_reuse"] is False
    assert plan.yaml["cuda_graph_config"] == {"enable_padding": True}
    assert "max-seq-len" not in plan.yaml


SERVING = "trtllm-engine-cuda"
BAD = {
    "an old name": ({"serving": {SERVING: {"max_output_len": 512, "max_input_len": 1024}}}, "max_seq_len: 1536"),
    "an old name of the build": (
        {"trtllm": {"trtllm-engine": {"build": {"use_gemm_plugin": True}}}}, "write gemm_plugin: auto",
    ),
    "an unknown flag": (
        {"trtllm": {"trtllm-engine": {"build": {"gemm_plugn": "auto"}}}}, "Did you mean 'gemm_plugin'",
    ),
    "a flag that is ours": (
        {"trtllm": {"trtllm-engine": {"build": {"output_dir": "x"}}}}, "output_dir is set by this project",
    ),
    "a serving parameter among build flags": (
        {"trtllm": {"trtllm-engine": {"build": {"max_decoder_seq_len": 99}}}},
        "write it as serving.trtllm-engine-cuda.max_seq_len",
    ),
    "a version without a builder": (
        {"trtllm": {"trtllm-engine": {"version": "1.3.0rc21"}}}, "has no trtllm-build .* use the runtime trtllm-bundle",
    ),
    "a version without bundles": (
        {"trtllm": {"trtllm-bundle": {"version": "1.2.1"}}}, "use the runtime trtllm-engine",
    ),
    "build flags of a bundle": (
        {"trtllm": {"trtllm-bundle": {"build": {"workers": 1}}}}, "a bundle is not built",
    ),
    "an unknown setting": ({"trtllm": {"trtllm-engine": {"vresion": "1.2.1"}}}, "Did you mean 'version'"),
    "max_seq_len shorter than the workload": (
        {"serving": {SERVING: {"max_seq_len": 40}}}, "workload smoke-64-16 needs 80 tokens.*max_seq_len is 40",
    ),
    "max_input_len shorter than the prompt": (
        {"serving": {SERVING: {"max_input_len": 40}}}, "needs 64 tokens .its prompt. and max_input_len is 40",
    ),
    "a share above one": ({"serving": {SERVING: {"free_gpu_memory_fraction": 2}}}, "share above 0 and at most 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_params_end_before_any_work(name: str, fake: FakeHost) -> None:
    sections, message = BAD[name]
    with pytest.raises(InputError, match=message) as caught:
        fake.params(**sections)
    assert "\n" not in str(caught.value)


CANNOT = {
    "tp that does not divide heads": (
        {"tensor_parallel_size": 3}, {}, r"tensor_parallel_size 3 .*possible: 1, 2, 4, 8",
    ),
    "more ranks than GPUs": ({"pipeline_parallel_size": 2}, {}, "needs 2 GPUs and target l40s has count: 1"),
    "pp that does not divide layers": (
        {"pipeline_parallel_size": 3}, {"count": 3}, "pipeline parallel 3 does not divide 32 layers",
    ),
    "a KV budget that cannot hold one sequence": (
        {"free_gpu_memory_fraction": 0.02, "max_seq_len": 8192}, {}, "one sequence of 8192 tokens needs .*KV cache",
    ),
    "an unknown key of the YAML": (
        {"kv_cache_config": {"enable_blok_reuse": True}}, {}, "Did you mean 'kv_cache_config.enable_block_reuse'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_work_on_the_target_is_refused_with_the_numbers(name: str, fake: FakeHost) -> None:
    options, target, message = CANNOT[name]
    fake.raw["targets"]["l40s"].update(target)
    params = fake.params(serving={SERVING: options})
    with pytest.raises(InputError, match=message):
        deployment(ENGINE, params, _config(fake, **BIG))


def test_a_recipe_that_the_runtime_cannot_load_is_refused_with_the_reason(fake: FakeHost) -> None:
    params = fake.params()
    with pytest.raises(InputError, match="int8.trtllm-bundle.l40s is not packaged: .*misread"):
        package(Cell("tiny", "int8", "trtllm-bundle", "l40s"), params)
    with pytest.raises(InputError, match="no backend stores fp8-block .*Use the runtime trtllm-bundle"):
        deployment(Cell("tiny", "fp8-block", "trtllm-engine", "h200"), params, _config(fake, **BIG))
    with pytest.raises(InputError, match="needs an NVIDIA GPU; cpu is a CPU"):
        deployment(Cell("tiny", "fp8", "trtllm-engine", "cpu"), params, _config(fake, **BIG))


def test_the_plan_refuses_an_engine_that_cannot_be_exported_and_packages_the_rest(fake: FakeHost) -> None:
    row = {
        "models": ["tiny"],
        "recipes": ["fp8", "awq"],
        "runtimes": ["trtllm-engine"],
        "targets": ["l40s"],
        "package": True,
    }
    fake.raw["matrix"] = [{k: v for k, v in fake.raw["matrix"][0].items()}, row]
    experts = make_plan(fake.params(), {"tiny": _config(fake, **BIG, architectures=["MixtralForCausalLM"])})
    cells = {c["cell"]: c for c in experts["cells"]}
    assert cells[ENGINE.name]["verdict"] == "refused"
    assert "MixtralForCausalLM cannot be made here" in cells[ENGINE.name]["reason"]
    sound = make_plan(fake.params(), {"tiny": _config(fake, **BIG)})
    assert {c["cell"]: c["verdict"] for c in sound["cells"]}[ENGINE.name] == "native"
    assert sound["package"][ENGINE.name]["checkpoint"] == "artifacts/models/tiny"
    assert not any("trtllm" in name for name in sound["measure"])


def test_an_engine_is_planned_before_its_checkpoint_is_exported(fake: FakeHost) -> None:
    shutil.rmtree("artifacts/checkpoints")
    made = package(ENGINE, fake.params())
    assert made["checkpoint"]["path"] == "artifacts/models/tiny"
    assert made["trtllm"]["state"].startswith(
        "planned: run `python -m pipeline trtllm export tiny.fp8.trtllm-engine.l40s`"
    )
    assert made["trtllm"]["load_and_warm"].startswith("not measured (")
    assert manifest.verify(ENGINE.deploy)["cell"] == ENGINE.name
    fake.export()
    made = package(ENGINE, fake.params())
    assert made["checkpoint"]["path"].endswith("tiny.fp8.modelopt-trtllm")
    assert made["trtllm"]["state"].startswith("exported, not built")
    assert made["trtllm"]["allowed_sms"] == [89]


def test_a_bundle_says_what_it_needs_and_verifies(fake: FakeHost) -> None:
    made = package(BUNDLE, fake.params())
    facts = made["trtllm"]
    assert facts["container"] == "nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc4"
    assert facts["parallel"] == {"tp": 1, "pp": 1, "ep": 1}
    assert facts["allowed_sms"] == [80, 86, 89, 90, 100, 103, 120]
    assert facts["launch"].startswith("trtllm-serve artifacts/models/tiny --config ")
    assert list(llm_yaml.problems(yaml.safe_load((BUNDLE.deploy / "serve.yaml").read_text()))) == []
    assert manifest.verify(BUNDLE.deploy)["trtllm"] == facts


def test_a_modelopt_bundle_never_ships_without_its_quantization_config(fake: FakeHost) -> None:
    folder, cell = Path("artifacts/checkpoints/tiny.fp8"), Cell("tiny", "fp8", "trtllm-bundle", "l40s")
    shutil.copytree(fake.source, folder)
    Path("artifacts/results/tiny.fp8").mkdir()
    Path("artifacts/results/tiny.fp8/lint.json").write_text('{"passed": true}')
    with pytest.raises(WorkError, match="has no hf_quant_config.json; config.json alone does not say group size"):
        package(cell, fake.params())
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert package(cell, fake.params())["checkpoint"]["path"] == folder.as_posix()
    assert allowed_sms(cell, fake.params()) == [89, 90, 100, 103, 120]
    with editing_json(folder / "config.json") as config:
        config["quantization_config"] = {"quant_algo": "NVFP4"}
    with pytest.raises(WorkError, match="quant_algo is FP8, config.json says NVFP4"):
        package(cell, fake.params())
    Path("artifacts/results/tiny.fp8/lint.json").write_text('{"passed": false}')
    with editing_json(folder / "config.json") as config:
        del config["quantization_config"]
    with pytest.raises(WorkError, match="did not pass lint"):
        package(cell, fake.params())


def test_awq_needs_its_group_size_and_zero_point() -> None:
    whole = {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True}
    assert why_not_quant_config({"quantization": whole}, {}) is None
    assert why_not_quant_config({"quantization": whole | {"group_size": None}}, {}) == "W4A16_AWQ needs group_size"
    assert why_not_quant_config({}, {}) == "it has no quantization.quant_algo"


def _served(fake: FakeHost) -> Server:
    fake.is_here(tensorrt_llm="1.4.0rc4")
    params = fake.params()
    package(BUNDLE, params)
    return Server(BUNDLE, params, Path("server.log"), 1, stand_in=True)


def test_the_server_starts_answers_and_tells_that_it_is_a_stand_in(fake: FakeHost) -> None:
    with _served(fake) as server:
        server.wait_ready(30)
        assert server.request("/v1/completions", {"model": "tiny", "prompt": "x"})["choices"][0]["text"]
        with pytest.raises(WorkError, match="answered 400 .*prompt_logprobs"):
            server.request("/v1/completions", {"model": "tiny", "prompt": [1], "prompt_logprobs": 5})
        facts = server.facts()
    assert facts["genuine"] is False
    assert facts["kv_cache_tokens"] == 12345
    assert facts["trtllm"]["tensorrt_llm"] == "1.4.0rc4"
    assert "trtllm-serve artifacts/models/tiny --config" in facts["command"]


def test_a_server_that_dies_tells_the_engines_own_reason(fake: FakeHost) -> None:
    fake.mode(serve="die")
    with _served(fake) as server, pytest.raises(WorkError, match="while it started: .*Engine world size"):
        server.wait_ready(30)


def test_without_stand_ins_a_made_up_server_is_never_started(fake: FakeHost) -> None:
    _served(fake)
    with pytest.raises(WorkError, match="is not an installed TensorRT-LLM .*nothing is measured with it"):
        Server(BUNDLE, fake.params(), Path("server.log"), 1).__enter__()


def test_warming_on_another_host_is_not_measured_with_the_reason(fake: FakeHost) -> None:
    package(BUNDLE, fake.params())
    fake.is_here(gpus="")
    made = warm(BUNDLE, fake.params())
    assert made["state"].startswith("not measured (Target l40s is 1 x NVIDIA L40S; this host has no GPU")
    assert json.loads(result_path(BUNDLE).read_text())["state"] == made["state"]


def test_warming_a_stand_in_is_not_measured_and_a_mute_server_fails(fake: FakeHost) -> None:
    _served(fake)
    assert warm(BUNDLE, fake.params(), stand_in=True)["state"] == "not measured (a stand-in answered)"
    fake.mode(serve="mute")
    with pytest.raises(WorkError, match="answered with no text"):
        warm(BUNDLE, fake.params(), stand_in=True)


@pytest.mark.parametrize("side", ["server", "candidate"])
def test_the_report_never_shows_what_a_stand_in_measured(side: str, tmp_path: Path) -> None:
    server = {"genuine": False}
    for name, schema in (("eval", "quantpress.eval/2"), ("bench", "quantpress.bench/1")):
        content = {"schema": schema, "server": server if side == "server" else {"candidate": server}}
        path = tmp_path / f"artifacts/results/c/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    plan = {"verdict": "native", "measured_here": True, "target": "l40s", "cell": "c"}
    for doc in _served_docs(tmp_path, "artifacts/results/c", plan):
        assert doc.data is None
        assert "a stand-in for TensorRT-LLM answered" in str(doc.problem)


def test_what_the_api_cannot_give_is_said() -> None:
    assert no_prompt_logprobs("vllm") is None
    assert str(no_prompt_logprobs("trtllm-bundle")).startswith("not measured (")


def test_the_cache_is_read_from_either_log() -> None:
    assert read_log("Allocated 1 GiB for max tokens in paged KV cache (220480).")["kv_cache_tokens"] == 220480
    assert read_log("GPU KV cache size: 46,592 tokens")["kv_cache_tokens"] == 46592


def test_a_real_wheel_is_told_from_a_stand_in() -> None:
    real = {"tensorrt_llm": "1.2.1", "torch": "2.9.1", "cuda": "13.0", "files": 5000}
    assert is_genuine(real)
    for lack in ({"files": 3}, {"torch": None}, {"cuda": None}, {"tensorrt_llm": None}):
        assert not is_genuine(real | lack)
    with pytest.raises(Exception, match="did not answer the version probe; it said: no such image"):
        read_probe("", "pulling\nno such image\n", [])


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["trtllm", "plan", "tiny.fp8"], 2, "'tiny.fp8' is no cell"),
    (["trtllm", "plan", "tiny.fp8.vllm.l40s"], 2, "is served by vllm; this command is for trtllm-engine"),
    (["trtllm", "plan", "tiny.fp9.trtllm-engine.l40s"], 2, "There is no recipe 'fp9'"),
    (["trtllm", "check", ENGINE.name], 0, "not built (run `python -m pipeline trtllm build"),
    (["trtllm", "export", BUNDLE.name], 0, "nothing to export"),
    (["trtllm", "warm", ENGINE.name], 2, "is not packaged. Run `python -m pipeline package --model tiny"),
    (["trtllm", "plan", ENGINE.name], 0, "engine and speed: not measured (planned only)"),
])  # fmt: skip
def test_commands_end_with_their_code_and_a_sentence(
    arguments: list[str], code: int, message: str, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.params()
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == code, said
    assert message in said.out + said.err
