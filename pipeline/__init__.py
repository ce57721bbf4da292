"""quantpress: plan, prove, measure and report quantized language models. The core: light, no torch."""

__version__ = "0.1.0"
