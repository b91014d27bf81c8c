"""A file of llama.cpp's own, without an importance matrix.

Usage: quantise_llamacpp.py SRC.gguf DST.gguf '{"type": "Q4_K_M"}'
"""

import ctypes
import json
import sys

import llama_cpp

src, dst, asked = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{json.loads(asked)['type']}")
params.nthread = 2
if llama_cpp.llama_model_quantize(src.encode(), dst.encode(), ctypes.byref(params)):
    sys.exit("llama.cpp did not write it")
