"""Every on-disk form that lint knows, one entry each. Each was read on a real checkpoint of its library.

Sources: compressed-tensors 0.19 (compressors/), ModelOpt 0.47's unified export, GPTQModel 7.6 (qlinear/),
AutoAWQ 0.2.9 (awq/modules/linear/gemm.py). `W[out, in]` is the source weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline import decoders
from pipeline.checkpoint import Checkpoint
from pipeline.decoders import Dims, Floats
from pipeline.layout_parts import FLOAT_SCALE, GROUP, Layout, Part

Decode = Callable[[Checkpoint, str, slice, Dims], Floats]
_WEIGHTS, _INPUTS = "config_groups.*.weights.", "config_groups.*.input_activations"


def _compressed(
    fmt: str, form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, decode: Decode, *parts: Part
) -> Layout:
    """Return a compressed-tensors layout: `weights` and `inputs` are the arguments of its scheme.

    An argument that is a tuple allows each of its values.
    """
    arguments = {"group_size": None, "symmetric": True} | weights
    config: dict[str, tuple[Any, ...]] = {"format": (form,), "quantization_status": ("compressed",)}
    config |= {f"{_WEIGHTS}{key}": v if isinstance(v, tuple) else (v,) for key, v in arguments.items()}
    if inputs is None:
        config[_INPUTS] = (None,)
    else:
        config |= {f"{_INPUTS}.{key}": (value,) for key, value in inputs.items()}
    return Layout("compressed-tensors", fmt, parts, config, decode, symmetric=f"{_WEIGHTS}symmetric")


def _modelopt(
    fmt: str, algo: str, decode: Decode, *parts: Part, grouped: bool = False, block: int | None = None
) -> Layout:
    """Return a layout of ModelOpt's unified export.

    config.json loses the group size and the zero points, so hf_quant_config.json is asked for them.
    """
    mirror = {"quantization.quant_algo": "quant_algo", "quantization.exclude_modules": "ignore"}
    there: dict[str, tuple[Any, ...]] = {"producer.name": ("modelopt", None)}
    if grouped:
        there |= {"quantization.group_size": (GROUP,), "quantization.has_zero_point": (False,)}
    elif block:
        there["quantization.group_size"] = (block, None)
    return Layout(
        "modelopt",
        fmt,
        parts,
        {"quant_algo": (algo,)},
        decode,
        mirror=("hf_quant_config.json", mirror),
        mirror_config=there,
    )


_SYM, _ORDER = "config_groups.*.weights.symmetric", "config_groups.*.weights.actorder"
_F8 = Part("weight", "packed", ("F8_E4M3",), ("out", "in"))
_I8 = Part("weight", "packed", ("I8",), ("out", "in"))
_PER_ROW = Part("weight_scale", "scale", FLOAT_SCALE, ("out", 1))
_ROWS = Part("weight_scale", "scale", ("F32", "BF16"), ("out",))
_ONE = Part("weight_scale", "scale", ("F32",), ())
_INPUT = Part("input_scale", "activation-scale", ("F32",), ())
_PRE = Part("pre_quant_scale", "pre-scale", ("BF16", "F16", "F32"), ("in",))
# AWQ folds the factors of the inputs into a norm where one feeds the layer; round to nearest has none.
_MAYBE_PRE = Part("pre_quant_scale", "pre-scale", ("BF16", "F16", "F32"), ("in",), optional=True)
_E8M0 = Part("weight_scale", "exponent", ("U8",), ("out", "in/32"))
_SHAPE = Part("weight_shape", "shape-record", ("I64", "I32"), (2,))
_PACKED4 = (
    Part("weight_packed", "packed", ("I32",), ("out", "in/8")),
    Part("weight_scale", "scale", FLOAT_SCALE, ("out", "groups")),
    _SHAPE,
)
_FP4 = Part("weight_packed", "packed", ("U8",), ("out", "in/2"))
_FP4_MO = Part("weight", "packed", ("U8",), ("out", "in/2"))
_PAIRS = (
    Part("weight", "packed", ("U8",), ("out/2", "in")),
    Part("weight_scale", "scale", ("F32",), ("out", "groups")),
)
_TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FLOAT8 = {"num_bits": 8, "type": "float"}


def _mx_inputs(bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": "group", "dynamic": True, "group_size": 32}


LAYOUTS: tuple[Layout, ...] = (
    _compressed(
        "int4-w4a16", "pack-quantized", _INT4 | {"symmetric": (True, False)}, None, decoders.pack_quantized, *_PACKED4,
        Part("weight_zero_point", "zero-point", ("I32",), ("out/8", "groups"), when=(_SYM, False)),
        Part("weight_g_idx", "group-index", ("I32",), ("in",), when=(_ORDER, "group")),
    ),
    _compressed("int4-w4a8", "pack-quantized", _INT4, _TOKEN_FP8, decoders.pack_quantized, *_PACKED4),
    _compressed(
        "int8-w8a8", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _TOKEN_INT8,
        decoders.cast, _I8, _PER_ROW,
    ),
    _compressed(
        "int8-w8a16", "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, None, decoders.octets,
        Part("weight_packed", "packed", ("I32",), ("out", "in/4")), _PER_ROW, _SHAPE,
    ),
    _compressed(
        "fp8-channel-token", "float-quantized", _FLOAT8 | {"strategy": "channel"}, _TOKEN_FP8,
        decoders.cast, _F8, _PER_ROW,
    ),
    _compressed(
        "fp8-tensor", "float-quantized", _FLOAT8 | {"strategy": "tensor"},
        _FLOAT8 | {"strategy": "tensor", "dynamic": False}, decoders.cast, _F8,
        Part("weight_scale", "scale", FLOAT_SCALE, (1,)),
        Part("input_scale", "activation-scale", FLOAT_SCALE, (1,)),
    ),
    _compressed(
        "fp8-block", "float-quantized", _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
        _FLOAT8 | {"strategy": "group", "dynamic": True, "group_size": 128}, decoders.fp8_blocks, _F8,
        Part("weight_scale", "scale", FLOAT_SCALE, ("out/128", "in/128")),
    ),
    _compressed(
        "nvfp4", "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        decoders.nvfp4, _FP4,
        Part("weight_scale", "block-scale", ("F8_E4M3",), ("out", "in/16")),
        Part("weight_global_scale", "scale", ("F32",), (1,)),
        Part("input_global_scale", "activation-scale", ("F32",), (1,)),
    ),
    _compressed(
        "mxfp4", "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        _mx_inputs(4), decoders.mxfp4, _FP4, _E8M0,
    ),
    _compressed(
        "mxfp8", "mxfp8-quantized", _FLOAT8 | {"strategy": "group", "group_size": 32}, _mx_inputs(8), decoders.mxfp8,
        _F8, _E8M0,
    ),
    _modelopt("fp8-tensor", "FP8", decoders.cast, _F8, _ONE, _INPUT),
    _modelopt("fp8-channel-token", "FP8_PER_CHANNEL_PER_TOKEN", decoders.cast, _F8, _ROWS),
    _modelopt(
        "fp8-block", "fp8_pb_wo", decoders.fp8_blocks, _F8,
        Part("weight_scale", "scale", ("F32",), ("out/128", 1, "in/128", 1)),
    ),
    _modelopt("int8-w8a8", "W8A8_SQ_PER_CHANNEL", decoders.smoothed, _I8, _ROWS, _INPUT, _PRE),
    _modelopt("int8-w8a16", "W8A16", decoders.cast, _I8, _ROWS),
    # Round to nearest is written as W4A16_AWQ too.
    _modelopt("int4-w4a16", "W4A16_AWQ", decoders.row_pairs, *_PAIRS, _MAYBE_PRE, grouped=True),
    _modelopt(
        "int4-w4a8", "W4A8_AWQ", decoders.row_pairs, *_PAIRS, _MAYBE_PRE,
        Part("weight_scale_2", "scale", ("F32",), ()), _INPUT, grouped=True,
    ),
    _modelopt(
        "nvfp4", "NVFP4", decoders.nvfp4, _FP4_MO,
        Part("weight_scale", "block-scale", ("F8_E4M3",), ("out", "in/16")),
        Part("weight_scale_2", "scale", ("F32",), ()), _INPUT, block=16,
    ),
    _modelopt("mxfp4", "mxfp4", decoders.mxfp4, _FP4_MO, _E8M0, block=32),
    _modelopt("mxfp8", "MXFP8", decoders.mxfp8, _F8, _E8M0, block=32),
    Layout(
        "gptq",
        "int4-w4a16",
        (
            Part("qweight", "packed", ("I32",), ("in/8", "out")),
            Part("scales", "scale", ("F16", "BF16"), ("groups", "out")),
            Part("qzeros", "zero-point", ("I32",), ("groups", "out/8")),
            Part("g_idx", "group-index", ("I32",), ("in",)),
        ),
        {
            "bits": (4,),
            "group_size": (GROUP,),
            "pack_dtype": ("int32", None),
            "checkpoint_format": ("gptq", "gptq_v2", None),
        },
        decoders.gptq,
        ignore="dynamic",
        symmetric="sym",
        ordered=("desc_act", False),
        mirror=(
            "quantize_config.json",
            {key: key for key in ("bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format")},
        ),
    ),
    Layout(
        "awq",
        "int4-w4a16",
        (
            Part("qweight", "packed", ("I32",), ("in", "out/8")),
            Part("scales", "scale", ("F16", "BF16"), ("groups", "out")),
            Part("qzeros", "zero-point", ("I32",), ("groups", "out/8")),
        ),
        {"bits": (4,), "group_size": (GROUP,), "version": ("gemm",), "zero_point": (True,)},
        decoders.awq,
        ignore="modules_to_not_convert",
    ),
)  # fmt: skip
