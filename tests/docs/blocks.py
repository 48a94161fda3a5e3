# SPDX-License-Identifier: Apache-2.0
"""Shell blocks of README.md and the pages of docs/, and how tests run them.

A block of ```sh is run by a test; what a program prints and what only shows the syntax stands in ```text.
tests/repository/pages_test.py holds the pages to that.
"""
import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]

# `make` in a folder with a built program: it has the target, and what the target does is done with that program. As far as pages name them.
MAKE = """#!/bin/sh
case $1 in
  demo) "$REAL_MAKE" -n demo > /dev/null && exec scripts/demo "$DYNMO" --emulated-steps 3 --set train.steps=12 --set freezing.every=1 ;;
  test) exec "$REAL_MAKE" -n test ;;
  install) exec cmake --install "$DYNMO_BUILD_DIR" --prefix "${2#PREFIX=}" ;;
  *) exec "$REAL_MAKE" "$@" ;;
esac
"""


def shell_blocks(page):
    """The ```sh blocks of a page, named by its path in the repository."""
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def ways_in():
    """The blocks of README.md that install a release: scripts/ways runs them in bare systems, not a test on this one."""
    section = re.search(r"^## Three ways in\n(.*?)(?=^## )", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r"^```sh\n(.*?)^```$", section.group(1), re.DOTALL | re.MULTILINE)


def shown_blocks(page):
    """The ```sh blocks of a page that have a ```text block behind them, each with the lines of that block."""
    found = re.findall(r"^```sh\n((?:(?!^```).)*)^```\n```text\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [(block, shown.splitlines()) for block, shown in found]


def missing_lines(shown, output):
    """Lines that a page shows, in order, and a program does not print. A line or an end of one that is left out is `...`."""
    missing, lines = [], iter(output.splitlines())
    for line in shown:
        start = line.removesuffix("...").rstrip()
        if start and not any(said == line or (line.endswith("...") and said.startswith(start)) for said in lines):
            missing.append(line)
            lines = iter(output.splitlines())
    return missing


def clone(folder):
    """Copies what is tracked, or would be, to `folder`: a clone of the tree as it is."""
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False)
    if done.returncode != 0:  # unpacked from an archive
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build", "data", "runs", "__pycache__"))
        return
    for name in filter(lambda name: (ROOT / name).is_file(), done.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def environment(tools, program=None, **more):
    """PATH with the program and, in the folder `tools`, a `make` that builds nothing. HOME is `tools`, too."""
    tools.mkdir(parents=True, exist_ok=True)
    (tools / "make").write_text(MAKE)
    (tools / "make").chmod(0o755)
    path = f"{tools}:{program.parent}:{os.environ['PATH']}" if program else f"{tools}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tools), "REAL_MAKE": shutil.which("make") or "make",
            "DYNMO": str(program or ""), **more}


def commented_commands(page):
    """The commands that stand as comments in the shell blocks of a page, as what needs a cluster: each as one line."""
    blocks = [re.sub(r"\\\n#", "", block) for block in shell_blocks(page)]
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("# ")]


def words_of(command, folder, tools):
    """The words that the first word of a command gets from the shell, in `folder`."""
    name = command.split()[0]
    (tools / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tools / name).chmod(0o755)
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}, check=True,
                          capture_output=True, text=True)
    return done.stdout.splitlines()


def run_block(block, folder, env, timeout, options="-eo"):
    """Runs a block as it stands there, up to its first command that fails: (exit code, output)."""
    process = subprocess.Popen(["bash", options, "pipefail", "-c", block], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, 9)
        raise AssertionError(f"not done after {timeout} s:\n{block}{process.communicate()[0]}") from error
    return process.returncode, output
