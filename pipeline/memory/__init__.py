"""What a model needs in memory and how fast a target could run it, from config.json and safetensors headers alone.

arch -> what the config says; tensors -> every weight's shape; stored -> how a format stores it; weights -> bytes per
GPU; kv -> bytes of cache; overhead -> the rest of an engine's memory; fit -> what holds where; serving_params -> the
options that follow; roofline -> the speed that bandwidth and peaks allow. Everything here is predicted, never measured.
"""
