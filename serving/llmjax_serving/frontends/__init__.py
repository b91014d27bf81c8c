"""Several processes before one engine: `supervisor.py` starts them, `worker.py` is one of them."""
