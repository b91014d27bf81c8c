"""llama.cpp's own server. Usage: llamacpp_server.py MODEL.gguf PORT NAME SLOTS TOKENS_A_SLOT"""

import os
import sys
import time

import xllamacpp

model, port, name, slots, tokens = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {name}
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_parallel = int(slots)
params.n_ctx = int(slots) * int(tokens)
params.use_jinja = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
server = xllamacpp.Server(params)
print(xllamacpp.get_system_info(), flush=True)
while True:
    time.sleep(3600)
