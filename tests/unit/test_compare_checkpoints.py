"""Two checkpoints of one recipe, tensor by tensor: what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeline.compare_checkpoints import codes, compare, kind_of, table
from pipeline.errors import InputError

REAL = Path(__file__).parents[2] / "artifacts/checkpoints"
CONFIG = {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}


def _write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, object] = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layer(packed: int = 0x76543210) -> dict[str, np.ndarray]:
    return {
        "model.layers.0.mlp.up_proj.weight_packed": np.full((2, 2), packed, dtype=np.int32),
        "model.layers.0.mlp.up_proj.weight_scale": np.ones((2, 1), dtype=np.float32),
        "model.norm.weight": np.ones(4, dtype=np.float32),
    }


def test_a_checkpoint_agrees_with_itself(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "a", _layer()), _write(tmp_path / "b", _layer())
    found = compare(a, b)
    assert found["identical_tensors"] == found["tensors"] == 3
    assert found["kinds"]["weight_packed"]["elements"] == 32
    assert "3 of 3 tensors are equal in every byte" in table(found)


def test_one_code_that_rounded_to_the_other_side_is_one_code(tmp_path: Path) -> None:
    other = _layer()
    other["model.layers.0.mlp.up_proj.weight_packed"][0, 0] = 0x76543220  # the second code: 1 became 2
    found = compare(_write(tmp_path / "a", _layer()), _write(tmp_path / "b", other))
    row = found["kinds"]["weight_packed"]
    assert (row["equal_share"], row["largest_code_distance"], row["identical"]) == (31 / 32, 1, 0)
    assert row["largest_relative_rms"] is None


def test_a_changed_scale_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    other = _layer()
    other["model.layers.0.mlp.up_proj.weight_scale"] *= 1.5
    del other["model.norm.weight"]
    other["lm_head.weight"] = np.ones((2, 2), dtype=np.float32)
    found = compare(_write(tmp_path / "a", _layer()), _write(tmp_path / "b", other))
    assert found["kinds"]["weight_scale"]["largest_relative_rms"] == pytest.approx(0.5)
    assert (found["only_in_first"], found["only_in_second"]) == (["model.norm.weight"], ["lm_head.weight"])


def test_another_shape_is_unlike_and_not_compared(tmp_path: Path) -> None:
    other = _layer() | {"model.norm.weight": np.ones(5, dtype=np.float32)}
    found = compare(_write(tmp_path / "a", _layer()), _write(tmp_path / "b", other))
    assert found["unlike"] == ["model.norm.weight: F32 [4] and F32 [5]"]
    assert "norm.weight" not in found["kinds"]


def test_two_recipes_are_refused(tmp_path: Path) -> None:
    eight = {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}
    with pytest.raises(InputError, match="stores 4 bits a weight and .* 8: two recipes"):
        compare(_write(tmp_path / "a", _layer()), _write(tmp_path / "b", _layer(), eight))


def test_two_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tensor of one name"):
        compare(_write(tmp_path / "a", _layer()), _write(tmp_path / "b", {"x": np.ones(1, dtype=np.float32)}))


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_the_eight_codes_of_an_int32_come_out_in_their_order(values: list[int]) -> None:
    word = sum(v << 4 * i for i, v in enumerate(values))
    packed = np.array([word], dtype=np.uint32).view(np.int32)
    assert codes(packed, "I32", 4).tolist() == values


def test_fp8_codes_are_ordered_through_zero() -> None:
    raw = np.array([0x81, 0x80, 0x00, 0x01, 0x7E], dtype=np.uint8)
    assert codes(raw, "F8_E4M3", 8).tolist() == [-1, 0, 0, 1, 0x7E]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.input_layernorm.weight", "layernorm.weight"),
        ("model.layers.3.mlp.up_proj.weight_scale", "weight_scale"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.skipif(not (REAL / "smollm2-135m.int4").is_dir(), reason="no checkpoints here; `dvc repro` makes them")
def test_real_rounding_to_nearest_against_awq() -> None:
    found = compare(REAL / "smollm2-135m.int4", REAL / "smollm2-135m.awq")
    assert found["kinds"]["embed_tokens.weight"]["equal_share"] == 1
    assert 0.5 < found["kinds"]["weight_packed"]["equal_share"] < 1
