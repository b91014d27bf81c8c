"""Run by a test on eight virtual devices: prints where each parameter of a model went."""

import hashlib
import json
import sys

from flax import nnx

from llmjax.checkpoint import load_model
from llmjax.config import ParallelConfig
from llmjax.parallel.mesh import make_places

((place,),) = make_places(ParallelConfig(tensor_parallel_size=8))
model = load_model(sys.argv[1], dtype=sys.argv[2], mesh=place.mesh, progress=False)
found = {}
for keys, leaf in nnx.to_flat_state(model.state):
    array = leaf[...]
    shards = {(s.index[0].start, s.index[-1].start) for s in array.addressable_shards}
    found[".".join(map(str, keys))] = {
        "shards": len(shards),
        "devices": len(array.sharding.device_set),
        "sha256": hashlib.sha256(array.__array__().tobytes()).hexdigest(),
    }
print(json.dumps(found))
