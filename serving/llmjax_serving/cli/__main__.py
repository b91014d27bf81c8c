"""`python -m llmjax_serving.cli`, for where the `llmjax` script is not on the path."""

import sys

from . import main

sys.exit(main())
