# SPDX-License-Identifier: Apache-2.0
"""A page as Chromium shows it, where there is one. Nothing installs it for the tests."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import zlib

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CACHES = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
VEGA = pathlib.Path(os.environ.get("DYNMO_CACHE") or CACHES / "dynmo") / "report"
MISSING = ""  # why no page can be shown
if CHROMIUM is None:
    MISSING = "no chromium or google-chrome here"
elif not (VEGA / "complete").exists():
    MISSING = "Vega is not here: scripts/setup report"


def browse(page, *flags, width=1280, dark=False):
    """What Chromium writes on standard output, scripts left out, and the lines of the page's console."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                               f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--enable-logging=stderr", "--v=0",
                               f"--window-size={width},2000",
                               f"--blink-settings=preferredColorScheme={0 if dark else 1}", *flags, page.as_uri()],
                              capture_output=True, text=True, errors="replace", timeout=240, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise AssertionError(f"chromium ended with {done.returncode}: {done.stderr[-2000:]}")
    return re.sub("<script.*?</script>", "", done.stdout, flags=re.DOTALL), re.findall(r":CONSOLE:[0-9]+\] (.*)", done.stderr)


def inked(png):
    """The share of a picture's bytes that are not as their neighbours."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        size, kind = int.from_bytes(data[at:at + 4], "big"), data[at + 4:at + 8]
        packed += data[at + 8:at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    rows = zlib.decompress(packed)
    return 1 - rows.count(0) / len(rows)
