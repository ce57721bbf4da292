"""TensorRT-LLM's tables: flags, spellings per version, YAML keys, and names of old releases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.trtllm import command, llm_yaml, migration, tables, version

ENGINE = ("1.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0rc2", "1.3.0rc7", "1.3.0rc20")
BUNDLE = ("1.3.0rc21", "1.3.0", "1.4.0rc4")


@pytest.mark.parametrize(("text", "has"), [
    ("1.2.1", True), ("1.2.1+cu130", True), ("1.3.0rc2", True), ("1.3.0rc9", True), ("1.3.0rc20", True),
    ("1.3.0rc20.post1", True), ("1.3.0rc21", False), ("1.3.0rc21.dev3", False), ("1.3.0rc100", False), ("1.3.0", False),
    ("1.4.0rc4", False), ("0.17", True),
])  # fmt: skip
def test_release_candidates_are_ordered_as_numbers(text: str, has: bool) -> None:
    assert version.has_engine_builder(text) is has


@given(st.integers(0, 99))
def test_every_candidate_before_21_builds_and_no_later_one(number: int) -> None:
    assert version.has_engine_builder(f"1.3.0rc{number}") is (number < 21)


def test_the_wrong_runtime_for_a_version_names_the_right_one() -> None:
    with pytest.raises(InputError, match="1.3.0rc21 has no trtllm-build .*1.3.0rc20.*trtllm-bundle"):
        version.need_engine_builder("1.3.0rc21")
    with pytest.raises(InputError, match="1.2.1 comes before 1.3.0rc21.*trtllm-engine"):
        version.need_bundle("1.2.1")
    with pytest.raises(InputError, match="read from TensorRT-LLM 1.0 to 1.3.0rc20, not 0.12"):
        version.need_engine_builder("0.12")
    with pytest.raises(InputError, match="'one' is no TensorRT-LLM version"):
        version.parse("one")


def test_the_table_has_every_flag_with_a_source() -> None:
    raw = tables.read("build")
    assert len(raw["flags"]) == 67
    flags = tables.tool("build", "1.2.1").flags
    assert flags["gemm_plugin"].choices == (
        "auto",
        "float16",
        "float32",
        "bfloat16",
        "int32",
        "fp8",
        "nvfp4",
        "disable",
    )
    assert flags["max_num_tokens"].default == 8192
    assert flags["max_seq_len"].aliases == ("max_decoder_seq_len",)
    assert all(f.source for name in tables.TOOLS for f in tables.tool(name, "1.2.1").flags.values())
    with pytest.raises(InputError, match="not for 1.4.0rc4; use the runtime trtllm-bundle"):
        tables.tool("build", "1.4.0rc4")


@pytest.mark.parametrize("text", [*ENGINE, *BUNDLE])
def test_every_spelling_of_a_parameter_exists_where_it_is_used(text: str) -> None:
    keys = tables.read("llm_args")["keys"]
    for parameter in tables.parameters(text).values():
        assert parameter.spellings.keys() <= {*tables.TOOLS, "yaml", "checkpoint"}
        if "yaml" in parameter.spellings:
            assert parameter.spellings["yaml"] in keys
        for name in tables.TOOLS:
            if name in parameter.spellings and (name != "build" or text in ENGINE):
                assert parameter.spellings[name] in tables.tool(name, text).flags, (parameter.name, name)


def test_one_parameter_has_four_spellings() -> None:
    values = {"free_gpu_memory_fraction": 0.8, "tensor_parallel_size": 2, "max_beam_width": 4}
    assert command.flags_of(values, "build", "1.2.1") == {"max_beam_width": 4}
    assert command.flags_of(values, "serve", "1.2.1") == {
        "kv_cache_free_gpu_memory_fraction": 0.8, "tp_size": 2, "max_beam_width": 4,
    }  # fmt: skip
    assert command.flags_of(values, "bench", "1.2.1") == {
        "kv_cache_free_gpu_mem_fraction": 0.8, "tp": 2, "beam_width": 4,
    }  # fmt: skip
    assert llm_yaml.document(values, "1.2.1") == {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8}, "tensor_parallel_size": 2, "max_beam_width": 4,
    }  # fmt: skip


def test_spellings_follow_the_version() -> None:
    def config(text: str) -> str:
        return tables.parameters(text)["config_file"].spellings["serve"]

    assert [config(v) for v in ("1.2.1", "1.3.0rc0", "1.4.0rc4")] == ["extra_llm_api_options", "config", "config"]
    assert "tensorrt" in tables.tool("serve", "1.3.0rc20").flags["backend"].choices
    assert "tensorrt" not in tables.tool("serve", "1.3.0rc21").flags["backend"].choices
    assert "served_model_name" not in tables.parameters("1.2.1")["served_model_name"].spellings.values()
    assert command.flags_of({"capacity_scheduler_policy": "MAX_UTILIZATION"}, "bench", "1.2.1") == {
        "scheduler_policy": "max_utilization"
    }


@pytest.mark.parametrize(("flags", "message"), [
    ({"gemm_plugn": "auto"}, "Did you mean 'gemm_plugin'"),
    ({"gemm_plugin": "fp9"}, "--gemm_plugin is 'fp9'; known: auto"),
    ({"max_batch_size": "8"}, "--max_batch_size is '8'; a whole number"),
    ({"max_batch_size": True}, "a whole number"),
    ({"max_batch_size": 8.5}, "a whole number"),
    ({"strip_plan": "yes"}, "takes no value"),
    ({"lora_dir": "a"}, "a list is expected"),
    ({"checkpoint_dir": ""}, "text is expected"),
])  # fmt: skip
def test_a_flag_that_the_tool_would_refuse_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        command.arguments("build", "1.2.1", flags)


VALUES = st.fixed_dictionaries(
    {}, optional={
        "max_batch_size": st.integers(1, 4096), "max_seq_len": st.integers(1, 10**6), "context_fmha": st.booleans(),
        "gemm_plugin": st.sampled_from(["auto", "fp8", "disable"]), "strip_plan": st.booleans(),
        "output_dir": st.text("abc/_.", min_size=1),
        "lora_target_modules": st.lists(st.text("abc_", min_size=1), min_size=1),
    },
)  # fmt: skip


@given(VALUES)
def test_what_is_written_parses_back_to_the_same(flags: dict[str, Any]) -> None:
    parsed = command.read_back("build", "1.2.1", command.arguments("build", "1.2.1", flags))
    wanted = {k: ("enable" if v else "disable") if k == "context_fmha" else v for k, v in flags.items()}
    assert parsed == {k: v for k, v in wanted.items() if v is not False}


@pytest.mark.parametrize(("made", "message"), [
    (["--max_output_len", "512"], "unrecognized arguments: --max_output_len"),
    (["--gemm_plugin", "fp9"], "invalid choice: 'fp9'"),
    (["--max_batch_size", "many"], "invalid int value"),
    (["--max_batch", "8"], "unrecognized arguments"),
    (["--checkpoint_dir"], "expected one argument"),
])  # fmt: skip
def test_a_command_that_does_not_parse_is_found(made: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        command.read_back("build", "1.2.1", made)


def test_plugins_that_raise_on_blackwell_are_named() -> None:
    flags = {"gemm_swiglu_plugin": "fp8", "low_latency_gemm_plugin": "disable", "max_batch_size": 4}
    assert command.raises_on("1.2.1", flags, 90) == []
    found = command.raises_on("1.2.1", flags, 100)
    assert len(found) == 1
    assert "gemm_swiglu_plugin fp8 raises NotImplementedError on SM100" in found[0]


OLD = tables.read("migration")["rows"]


def test_there_are_43_rows_and_each_cites_its_sources() -> None:
    assert len(OLD) == 43
    assert all(row.sources for row in migration.rows().values())


@pytest.mark.parametrize("row", OLD, ids=lambda row: row["old"])
@pytest.mark.parametrize("spelling", ["{}", "--{}", "dashes"])
def test_an_old_name_is_an_error_with_what_to_write_today(row: dict[str, Any], spelling: str) -> None:
    name = row["old"].replace("_", "-") if spelling == "dashes" else spelling.format(row["old"])
    options = {name: 512, "max_input_len": 1024}
    if row["status"] == "current":
        migration.refuse_old(options, "params.yaml")
        return
    with pytest.raises(InputError) as caught:
        migration.refuse_old(options, "params.yaml")
    assert row["old"] in str(caught.value)
    for new in row.get("becomes", {}):
        assert f"{new}: " in str(caught.value)
    if not row.get("becomes"):
        assert "leave it out" in str(caught.value)


@pytest.mark.parametrize(("options", "said"), [
    ({"max_output_len": 512, "max_input_len": 1024}, "write max_seq_len: 1536"),
    ({"max_output_len": 512}, "write max_seq_len: 1536"),  # trtllm-build's own max_input_len is 1024
    ({"max_output_len": "512", "max-input-len": 100}, "write max_seq_len: 612"),
    ({"use_gpt_attention_plugin": "float16"}, "write gpt_attention_plugin: float16"),
    ({"use_gemm_plugin": True}, "write gemm_plugin: auto"),
    ({"enable_context_fmha": False}, "write context_fmha: disable"),
    ({"paged_kv_cache": "enable"}, "write kv_cache_type: paged"),
    ({"paged_kv_cache": False}, "write kv_cache_type: continuous"),
    ({"parallel_build": True, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}, "write workers: 8"),
    ({"weight_only_precision": "int4"}, "recipes.<id>.format: int4-w4a16"),
    ({"use_fp8": True}, "recipes.<id>.format: fp8-tensor"),
    ({"fp8_kv_cache": True}, "recipes.<id>.kv_cache: fp8"),
    ({"tp_size": 2}, "write tensor_parallel_size: 2"),
    ({"builder_force_num_profiles": 3}, "BUILDER_FORCE_NUM_PROFILES: 3"),
    ({"enable_trt_overlap": True}, "disable_overlap_scheduler: false"),
    ({"kv_cache_config": {"kv_cache_free_gpu_mem_fraction": 0.8}}, "write free_gpu_memory_fraction: 0.8"),
])  # fmt: skip
def test_the_new_value_is_worked_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(").replace(".", r"\.")):
        migration.refuse_old(options, "params.yaml")


@pytest.mark.parametrize("row", OLD, ids=lambda row: row["old"])
def test_what_is_to_be_written_is_known_today(row: dict[str, Any]) -> None:
    flags, keys = tables.tool("build", "1.2.1").flags, tables.read("llm_args")["keys"]
    parameters = tables.parameters("1.2.1")
    elsewhere = ("recipes.", "quantization.", "mapping.", "ExtendedRuntimePerfKnobConfig.", "BUILDER_")
    for name in row.get("becomes", {}):
        assert name in flags or name in parameters or name in keys or name.startswith(elsewhere), name


@pytest.mark.parametrize(("content", "message"), [
    ({"kv_cache_config": {"free_gpu_memory_fracton": 0.5}}, "Did you mean 'kv_cache_config.free_gpu_memory_fraction'"),
    ({"max_batch_size": "8"}, "max_batch_size is '8', int is expected"),
    ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "a share from 0 to 1"),
    ({"scheduler_config": {"capacity_scheduler_policy": "max_utilization"}}, "known: MAX_UTILIZATION"),
    ({"scheduler_config": 3}, "a mapping is expected"),
    ({"enable_chunked_prefill": 1}, "bool is expected"),
    ({"build_config": {}}, "'build_config' is no key"),
])  # fmt: skip
def test_a_yaml_that_the_server_would_stop_at_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm_yaml.need_known(content, "serve.yaml")


def test_the_users_keys_stand_on_top_section_by_section() -> None:
    made = {"kv_cache_config": {"free_gpu_memory_fraction": 0.9, "dtype": "fp8"}}
    own = {"kv_cache_config": {"enable_block_reuse": False}, "cuda_graph_config": {"enable_padding": True}}
    merged = llm_yaml.merge(made, own)
    assert merged["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "dtype": "fp8", "enable_block_reuse": False}
    llm_yaml.need_known(merged, "serve.yaml")
