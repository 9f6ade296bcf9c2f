"""A headless Chromium that looks at a page: what it complains about, and what axe-core finds.

https://github.com/dequelabs/axe-core
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

AXE = Path(__file__).parents[1] / "build/axe/package/axe.min.js"
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
CHECK = """
addEventListener("load", () => axe.run(document).then(found => {
  const bad = found.violations.filter(one => ["serious", "critical"].includes(one.impact));
  const lines = bad.flatMap(one => one.nodes.map(node => `${one.id}: ${node.html.slice(0, 200)}`));
  const top = document.documentElement;
  const wider = top.scrollWidth - top.clientWidth;
  const page = document.createElement("pre");
  page.id = "axe";
  page.textContent = JSON.stringify({passed: found.passes.length, lines, wider});
  document.body.replaceChildren(page);
}));
"""


def opened(page, *options, width=1200, scheme="light", query=""):
    """The elements of a page after it was shown, and what the browser printed."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--window-size={width},800", f"--user-data-dir={page.parent / 'browser'}"]
    words += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    argv = [BROWSER, *words, "--dump-dom", *options, f"{page.absolute().as_uri()}{query}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def findings(page, **shape):
    """The serious findings of axe-core, in a copy of the page that may run scripts.

    With them the number of its checks that passed, and by how many pixels the page is wider than
    its window.
    """
    text = re.sub("<meta http-equiv=.Content-Security[^>]*>", "", page.read_text())
    axe = AXE.read_text().replace("</script", "<\\/script")
    copy = page.with_name(f"axe-{page.name}")
    copy.write_text(f"{text}<script>{axe}</script><script>{CHECK}</script>")
    dom, _ = opened(copy, "--virtual-time-budget=30000", **shape)
    return json.loads(html.unescape(re.search('<pre id="axe">(.*)</pre>', dom)[1]))
