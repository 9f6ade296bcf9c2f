"""``python -m deploykit``."""

import sys

from deploykit.cli.main import main

sys.exit(main())
