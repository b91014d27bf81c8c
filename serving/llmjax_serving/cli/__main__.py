"""`python -m llmjax_serving.cli`, for where the `llmjax` script is not on the path."""

from . import entry

entry()
