"""TensorRT-LLM: engines compiled per GPU (up to 1.3.0rc20) and bundles that are served as they are (from 1.3.0rc21).

Facts that change with its releases are data in `data/`, each with its source; the modules here only read them.
"""
