"""Run a script as `python` would, then print the threads of gloo that outlived it."""

import runpy
import sys
from contextlib import suppress
from pathlib import Path

sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
with suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
at_end = sorted(name for name in names if "gloo" in name)
sys.stdout.write(f"threads of gloo: {at_end}\n")
