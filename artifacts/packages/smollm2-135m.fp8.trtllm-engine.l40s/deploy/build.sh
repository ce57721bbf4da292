#!/bin/sh
# What `python -m pipeline trtllm build smollm2-135m.fp8.trtllm-engine.l40s` runs on l40s. Prefer it:
# it checks the environment too, keeps the log, and writes the sidecar without which `verify` says no.
exec trtllm-build --checkpoint_dir artifacts/checkpoints/smollm2-135m.fp8.modelopt-trtllm --output_dir artifacts/packages/smollm2-135m.fp8.trtllm-engine.l40s/engine --max_batch_size 256 --max_input_len 6144 --max_seq_len 6400 --max_num_tokens 2048 --tokens_per_block 32 --kv_cache_type paged --workers 1 --use_paged_context_fmha enable
