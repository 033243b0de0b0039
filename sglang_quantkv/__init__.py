"""INT8 and MXFP4 paged KV caches for SGLang, computed on as they are stored."""

__version__ = "0.1.0"
