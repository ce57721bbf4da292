"""Making and packaging: what is recorded, what is refused, what is copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from pipeline import jsonio, package
from pipeline.checkpoint import Checkpoint
from pipeline.errors import InputError, WorkError
from pipeline.making import check, copy_side_files, load_calibration, what_changed
from pipeline.package import Cell, launch_script, serve_options
from pipeline.params import load_params
from pipeline.specs import Params
from pipeline.support import need_served_architecture

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def params() -> Params:
    return load_params(ROOT / "params.yaml")


def _checkpoint(folder: Path, weight: np.ndarray) -> Checkpoint:
    folder.mkdir(parents=True)
    tensors = {
        "model.embed_tokens.weight": np.ones((32, 64), np.float16),
        "model.norm.weight": np.ones(64, np.float16),
        f"{LAYER}.weight": weight,
    }
    save_file(tensors, folder / "model.safetensors")
    jsonio.write_json(folder / "config.json", CONFIG)
    return Checkpoint.open(folder)


def test_a_backend_that_quantized_nothing_is_a_failure(tmp_path: Path) -> None:
    before = _checkpoint(tmp_path / "a", np.ones((64, 64), np.float16))
    same = _checkpoint(tmp_path / "b", np.ones((64, 64), np.float16))
    with pytest.raises(WorkError, match="No linear layer was quantized"):
        what_changed(before, same)


def test_effective_bits_count_everything_that_is_stored(tmp_path: Path) -> None:
    before = _checkpoint(tmp_path / "a", np.ones((64, 64), np.float16))
    after = _checkpoint(tmp_path / "b", np.ones((64, 64), np.int8))
    found = what_changed(before, after)
    assert found["quantized_layers"] == 1
    assert found["left_alone"] == ["lm_head (tied to embed_tokens)"]
    stored_bits = 8 * (32 * 64 * 2 + 64 * 2 + 64 * 64)
    assert found["effective_bits_per_weight"] == pytest.approx(stored_bits / (32 * 64 + 64 + 64 * 64), abs=1e-3)


def test_side_files_become_the_sources_byte_for_byte(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    _checkpoint(source, np.ones((64, 64), np.float16))
    (source / "tokenizer.json").write_bytes(b'{"a":1}')
    (source / "chat_template.jinja").write_bytes(b"{{ x }}")
    out.mkdir()
    (out / "tokenizer.json").write_bytes(b'{"a": 1, "backend": "other"}')
    (out / "config.json").write_bytes(b"{}")
    copy_side_files(source, out)
    assert (out / "tokenizer.json").read_bytes() == b'{"a":1}'
    assert (out / "chat_template.jinja").read_bytes() == b"{{ x }}"
    assert (out / "config.json").read_bytes() == b"{}"
    assert not list(out.glob("*.safetensors"))


def test_unknown_ids_and_a_missing_source_end_in_one_sentence(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no model 'smollm'.*Did you mean 'smollm2-135m'"):
        check(params, "smollm", "int4")
    with pytest.raises(InputError, match="no recipe 'int5'"):
        check(params, "smollm2-135m", "int5")
    with pytest.raises(InputError, match="holds no checkpoint. Run `uv run dvc repro fetch@smollm2-135m`"):
        check(params, "smollm2-135m", "int4")


def test_an_empty_calibration_set_is_refused(params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jsonio.write_json(Path("calib_data/docs.m/card.json"), {"warnings": [], "digest": "x"})
    jsonio.write_json(Path("calib_data/docs.m/tokens.json"), {"input_ids": []})
    with pytest.raises(InputError, match=r"is empty.*dvc repro -f calibrate@docs\.m"):
        load_calibration(params.recipes["int8"], "m")


def test_fewer_samples_than_the_set_has_are_recorded(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonio.write_json(Path("calib_data/docs.m/card.json"), {"warnings": ["w"], "digest": "x"})
    jsonio.write_json(Path("calib_data/docs.m/tokens.json"), {"input_ids": [[1, 2]] * 128})
    ids, record = load_calibration(params.recipes["awq"], "m")
    assert record is not None
    assert (len(ids), record["samples"], record["tokens"]) == (32, 32, 64)
    assert record["warnings"] == ["w", "the recipe uses the first 32 of 128 samples"]


@pytest.mark.parametrize(("config", "message"), [
    ({"architectures": ["LlamaForCausalML"]}, "says LlamaForCausalML.*nearest that is served is LlamaForCausalLM"),
    ({}, "names no architecture"),
])  # fmt: skip
def test_an_architecture_that_nothing_serves(config: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        need_served_architecture("m", config)
    need_served_architecture("m", CONFIG)


def test_lint_errors_block_the_package(params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _checkpoint(Path("artifacts/checkpoints/smollm2-135m.int4"), np.ones((64, 64), np.int8))
    jsonio.write_json(Path("artifacts/results/smollm2-135m.int4/lint.json"), {"passed": False})
    cell = Cell("smollm2-135m", "int4", "vllm", "cpu")
    with pytest.raises(WorkError, match="did not pass lint"):
        package.package(cell, params)
    assert not cell.deploy.exists()


def test_a_package_holds_the_checkpoint_by_digest_and_serves_from_its_own_options(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("artifacts/checkpoints/smollm2-135m.int4")
    _checkpoint(folder, np.ones((64, 64), np.int8))
    jsonio.write_json(Path("artifacts/results/smollm2-135m.int4/lint.json"), {"passed": True})
    cell = Cell("smollm2-135m", "int4", "vllm", "cpu")
    made = package.package(cell, params)
    assert set(made["checkpoint"]["files"]) == {"config.json", "model.safetensors"}
    options = yaml.safe_load((cell.deploy / "serve.yaml").read_text())
    assert options["served-model-name"] == "smollm2-135m"
    assert options["max-model-len"] == 2048
    script = (cell.deploy / "launch.sh").read_text()
    assert script == launch_script(cell, params.targets["cpu"], folder)
    assert "stages/vllm_cpu/.venv/bin/python -m vllm" in script
    assert "HF_HUB_OFFLINE=1" in script


def test_remote_code_is_off_unless_a_model_allows_it(params: Params) -> None:
    cell = Cell("smollm2-135m", "int4", "vllm", "cpu")
    assert "trust-remote-code" not in serve_options(cell, params)
    model = params.models["smollm2-135m"].model_copy(update={"trust_remote_code": True})
    allowed = params.model_copy(update={"models": {"smollm2-135m": model}})
    assert serve_options(cell, allowed)["trust-remote-code"] is True
