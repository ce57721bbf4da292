#!/bin/sh
# Serve smollm2-135m.fp8.trtllm-engine.l40s with TensorRT-LLM 1.2.1 (nvcr.io/nvidia/tensorrt-llm/release:1.2.1).
# Run from the root of the repository.
python -m pipeline verify artifacts/packages/smollm2-135m.fp8.trtllm-engine.l40s || exit
exec env HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 trtllm-serve artifacts/packages/smollm2-135m.fp8.trtllm-engine.l40s/engine --tokenizer artifacts/models/smollm2-135m --backend tensorrt --max_batch_size 256 --max_seq_len 6400 --max_num_tokens 2048 --tp_size 1 --extra_llm_api_options artifacts/packages/smollm2-135m.fp8.trtllm-engine.l40s/deploy/serve.yaml --host 127.0.0.1 --port 8000 "$@"
