"""The real scheduler and memory manager before a model of a device, on a virtual clock.

`device.py` says how long a step takes, `traces.py` what arrives, `replica.py` runs an engine's
loop on that; `run.py` puts replicas together, `report.py` says what came of it. No jax.
"""

ROUTINGS = ("round-robin", "least-loaded")
BASELINES = ("static", "max", "pow2")
