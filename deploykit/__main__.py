"""``python -m deploykit``."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - in a checkout, where pip has not refused it
    sys.exit("deploykit requires Python 3.11 or later; this is {}.{}".format(*sys.version_info))

from deploykit.cli.main import main

sys.exit(main())
