#!/bin/sh
# Serve smollm2-135m.fp8.vllm.h200. Run from the root of the repository.
[ -x stages/vllm_cuda/.venv/bin/python ] || uv sync --project stages/vllm_cuda --locked --no-dev || exit 3
exec env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_USE_FLASHINFER_SAMPLER=0 stages/vllm_cuda/.venv/bin/python -m vllm.entrypoints.openai.api_server --model artifacts/checkpoints/smollm2-135m.fp8.h200 --config artifacts/packages/smollm2-135m.fp8.vllm.h200/deploy/serve.yaml --host 127.0.0.1 --port 8000 "$@"
