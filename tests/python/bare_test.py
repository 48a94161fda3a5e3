# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed, in an environment that has nothing else: no numpy, no torch, no compiler's outputs beside it."""
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

from support import ROOT, UNEVEN, Case

ASK = """
import doctest, importlib.util, json, sys
assert not any(importlib.util.find_spec(name) for name in ("numpy", "torch", "pandas", "matplotlib"))
import dynmo
given = json.load(sys.stdin)
assert dynmo.__file__.startswith(sys.prefix), dynmo.__file__
cell = doctest.DocTestParser().get_doctest(given["cell"], {}, "README.md", "README.md", 0)
assert doctest.DocTestRunner(verbose=False).run(cell).failed == 0
compared = dynmo.compare(given["profile"], ranks=4, balancers=["uniform", "optimal"])
plan = dynmo.plan(given["profile"], ranks=4, micro_batches=8, balancer="optimal", schedule="1f1b")
runs = dynmo.simulate(given["scenario"], {"training.steps": 40}, compare=["uniform", "optimal"]).runs
try:
    import dynmo.torch
except ImportError as error:
    missing = str(error)
html = [compared._repr_html_(), plan._repr_html_()]
print(json.dumps({"plan": plan.document, "runs": sorted(runs), "html": html, "missing": missing, "version": dynmo.__version__}))
"""
SCENARIO = str(ROOT / "examples" / "scenarios" / "freezing.toml")


class Bare(Case):
    def setUp(self):
        super().setUp()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / "bare"], check=True)
        self.packages = next((self.folder / "bare" / "lib").glob("python3*")) / "site-packages"
        build = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
        subprocess.run(
            ["cmake", "--install", build, "--component", "python", "--prefix", self.packages], check=True, capture_output=True
        )

    def test_plans_and_simulates_without_torch_or_numpy(self):
        readme = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
        cell = next(block for block in readme if ">>>" in block)
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [self.folder / "bare" / "bin" / "python", "-I", "-c", ASK], capture_output=True, text=True, env=own, timeout=100, check=False,
            input=json.dumps({"cell": cell, "profile": UNEVEN, "scenario": SCENARIO}),
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        said = json.loads(done.stdout)
        self.assertEqual(sum(stage["layers"] for stage in said["plan"]["stages"]), 8)
        self.assertEqual(said["runs"], ["dense", "optimal", "uniform"])
        self.assertTrue(all("<table" in html for html in said["html"]) and "<svg" in said["html"][1])
        self.assertEqual(said["missing"], "dynmo.torch: PyTorch is missing, wanted 2.11 to 2.15: pip install torch==2.15.*")
        self.assertIn(said["version"], (ROOT / "pyproject.toml").read_text())

    def test_brings_its_types_and_nothing_else(self):
        self.assertEqual([path.name for path in self.packages.iterdir()], ["dynmo"])
        files = {str(path.relative_to(self.packages / "dynmo")) for path in (self.packages / "dynmo").rglob("*") if path.is_file()}
        sources = {str(path.relative_to(ROOT / "python" / "dynmo")) for path in (ROOT / "python" / "dynmo").rglob("*.py")}
        self.assertEqual({name for name in files - sources if not name.endswith(".so")}, {"_core.pyi", "py.typed"})
        self.assertEqual(sources - files, set())


if __name__ == "__main__":
    unittest.main()
