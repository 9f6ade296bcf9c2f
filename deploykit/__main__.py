"""``python -m deploykit``."""

import sys

from deploykit.cli import main

sys.exit(main())
