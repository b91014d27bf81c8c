"""Convert a model to an orbax checkpoint, which loads sharded and without conversion."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from .flags import set_up_logging
