#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains through dynmo.torch with the full PyTorch and transformers, of the version that we build for and of the newest.

The tests of bits, checkpoints and faults in tests/python, by the interpreter that runs this and by the one of `scripts/setup peers` that
has the newest versions. Both take the Python package from the build folder of --dynmo.
"""
import argparse
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1] / "python"
MODULES = ("torch_bits_test", "torch_out_test", "torch_peers_test", "torch_live_test")
VERSIONS = "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"


def newest():
    cache = os.environ.get("DYNMO_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dynmo"
    return pathlib.Path(cache) / "peers-newest" / "bin" / "python"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    package = arguments.dynmo.resolve().parents[2] / "python"
    if not list(package.glob("dynmo/_core*.so")):
        print(f"SKIP package: there is none in {package}: build the target dynmo_python_package")
        return 0
    environment = {**os.environ, "DYNMO": str(arguments.dynmo.resolve()), "PYTHONPATH": f"{package}:{TESTS.parent / 'support'}",
                   "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for python in (pathlib.Path(sys.executable), newest()):
        if not python.exists():
            print(f"SKIP newest PyTorch: no {python}, which scripts/setup peers makes")
            continue
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
        for module in MODULES:
            done = subprocess.run([python, "-m", "unittest", "-v", module], cwd=TESTS, env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
            name = f"{module} with {' '.join(versions)}"
            if done.returncode == 0:
                print(f"PASS {name}: {done.stdout.split('Ran ')[-1].splitlines()[0]}", flush=True)
            else:
                print(done.stdout[-6000:])
                print(f"FAIL {name}: exit code {done.returncode}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
