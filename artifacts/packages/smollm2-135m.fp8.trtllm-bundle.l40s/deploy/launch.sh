#!/bin/sh
# Serve smollm2-135m.fp8.trtllm-bundle.l40s with TensorRT-LLM 1.4.0rc4 (nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc4).
# Run from the root of the repository.
exec env HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 trtllm-serve artifacts/checkpoints/smollm2-135m.fp8 --config artifacts/packages/smollm2-135m.fp8.trtllm-bundle.l40s/deploy/serve.yaml --served_model_name smollm2-135m --host 127.0.0.1 --port 8000 "$@"
