#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates the evaluation: every figure of docs/reproduce.md, beside its bound and the paper's figure.

rows.json says what runs and what is read from it; recorded.json has the values of the rows that no clock decides. A command whose result is
in OUT already is not run again, so an interrupted call goes on; it is run again if programs, scenarios or machine differ. A measured one is
also run again if others used the processors while it ran.

    bench/reproduce/reproduce.py --dynmo build/release/apps/dynmo/dynmo [--part simulated] [--check]
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time

import page

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
QUIET = 0.25  # processors that others may use while a figure that is judged is measured
EXACT = 1e-9  # relative


def say(text):
    print(text, flush=True)


def expanded(entry):
    """The entry for every combination of the values that its "for" names: {name} in its texts is replaced."""
    names = entry.get("for", {})
    for values in itertools.product(*names.values()):
        chosen = dict(zip(names, values))
        def filled(value):
            if isinstance(value, str):
                for name, text in chosen.items():
                    value = value.replace("{" + name + "}", str(text))
            elif isinstance(value, list):
                value = [filled(item) for item in value]
            elif isinstance(value, dict):
                value = {key: filled(item) for key, item in value.items()}
            return value

        one = {key: filled(value) for key, value in entry.items() if key != "for"}
        if isinstance(one.get("goal"), dict):  # by the number of blocks
            one["goal"] = one["goal"].get(str(chosen["blocks"]))
        yield one


def with_seed(line, seeds):
    """The command with the first seed of its part, where it takes one."""
    for start, key in {"dynmo simulate ": "training.seed", "dynmo train ": "train.seed"}.items():
        if seeds and line.startswith(start):
            return f"{line} --set {key}={seeds[0]}"
    return line


def read_rows(path):
    """The parts with their commands and rows, one entry each."""
    parts = json.loads(path.read_text())["parts"]
    for part in parts.values():
        for kind in ("commands", "rows"):
            part[kind] = [one for entry in part[kind] for one in expanded(entry)]
        for command in part["commands"]:
            command["measured"] = part["kind"] == "measured"
            command |= {key: with_seed(command[key], part.get("seeds")) for key in ("before", "command") if key in command}
    return parts


def parts_of(dynmo):
    """Returns what `dynmo` becomes or loads: beside it in a build, in folders of its prefix once installed."""
    prefix = dynmo.parent.parent
    libraries = [*prefix.parent.glob("libdynmo*.so"), *prefix.glob("lib*/libdynmo*.so"), *prefix.glob("lib/*/libdynmo*.so")]
    return [dynmo.with_name("dynmo-runtime"), prefix / "libexec/dynmo/dynmo-runtime", *sorted(libraries)]


def machine():
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return {"processor": model.group(1) if model else platform.machine(), "cores": os.cpu_count(), "system": platform.platform()}


def commit():
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def processor_seconds():
    """Of the whole machine, and of the processes that this one has started and waited for."""
    ticks = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for a disk
    own = os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own.children_user + own.children_system


class Commands:
    """Runs commands, and keeps what they print in a folder. One with "repeat" runs so often."""

    def __init__(self, programs, folder):
        self.programs = programs
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        inputs = hashlib.sha256(json.dumps(machine()).encode())
        for path in [*programs.values(), *parts_of(programs["dynmo"]), *sorted((ROOT / "examples").rglob("*.toml"))]:
            if path.exists():
                inputs.update(path.read_bytes())
        self.inputs = inputs.hexdigest()

    def results(self, command):
        """Of each repetition what the command printed, its seconds, and the processors that others used meanwhile. ValueError or OSError if one
        failed."""
        return [self.result(command, number) for number in range(command.get("repeat", 1))]

    def result(self, command, number):
        lines = [*([command["before"]] if "before" in command else []), command["command"]]
        key = hashlib.sha256((self.inputs + "\n".join([*lines, str(number)])).encode()).hexdigest()[:16]
        path = self.folder / f"{key}.json"
        kept = json.loads(path.read_text()) if path.exists() else None
        if kept and not (command["measured"] and kept["others"] > QUIET):
            return kept
        run = self.folder / key
        before, began = processor_seconds(), time.monotonic()
        for line in lines:
            words = shlex.split(line)
            program = self.programs.get(words[0], pathlib.Path(words[0]))
            if not program.exists():
                raise ValueError(f"{words[0]} is not built: {program}")
            words = [word.replace("RUN", str(run)).replace("DYNMO", str(self.programs["dynmo"])) for word in words]
            words[0] = str(program)
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
                raise ValueError(f"exit code {done.returncode}: {last}")
        output = (run / command["file"]).read_text() if "file" in command else done.stdout
        seconds, after = time.monotonic() - began, processor_seconds()
        others = (after[0] - before[0] - (after[1] - before[1])) / seconds
        result = {"command": command["command"], "output": output, "seconds": seconds, "others": others}
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(path)  # whole, or not there
        return result


def field(value, path):
    for key in path.split("."):
        value = value[key]
    return value


def looked_up(output, place):
    """A run's field by its name ("end.step_time_s") in JSON, or the sum of several ("a.b+a.c"); "" is the document, no run. In text
    it is the group of a pattern."""
    if len(place) == 1:
        found = re.search(place[0], output, re.MULTILINE)
        if not found:
            raise ValueError(f"nothing printed matches {place[0]}")
        return float(found.group(1))
    value = json.loads(output)
    runs = {run["name"]: run for run in value["runs"]} | {"": value}
    if place[0] not in runs:
        raise ValueError(f"no run {place[0]} among {', '.join(runs)}")
    values = [field(runs[place[0]], path) for path in place[1].split("+")]
    if None in values:
        raise ValueError(f"{place[1]} is not known")
    return sum(values) if len(values) > 1 else values[0]


def combined(row, numbers):
    """The one value of a row's terms or the ratio of two; "same": 1 if all are equal; "share": of the second's gain, what the first has."""
    if row.get("is") == "same":
        return float(len(set(numbers)) == 1)
    if row.get("is") == "share":
        return (numbers[0] - 1) / (numbers[1] - 1)
    return float(numbers[0]) if len(numbers) == 1 else numbers[0] / numbers[1]


class Evaluation:
    def __init__(self, parts, commands):
        self.commands = commands
        self.known = {command["id"]: command for part in parts for command in part["commands"]}
        self.results = {}
        self.failures = {}

    def run(self, names, jobs):
        """Runs commands side by side, before their rows ask for them."""
        def one(name):
            try:
                return name, self.commands.results(self.known[name]), None
            except (OSError, ValueError) as error:
                return name, None, str(error)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for name, result, error in pool.map(one, names):
                if error is None:
                    self.results[name] = result
                else:
                    self.failures[name] = error

    def output(self, name):
        if name in self.failures:
            raise ValueError(self.failures[name])
        return self.results[name]

    def values(self, row, terms):
        """Of each repetition one number, from [command, place...] each."""
        outputs = [self.output(term[0]) for term in terms]
        return [combined(row, [looked_up(result["output"], term[1:]) for result, term in zip(results, terms)]) for results in zip(*outputs)]

    def row(self, row, seeds):
        done = {key: row[key] for key in ("id", "is", "paper", "goal", "goal_is", "floor", "at_most") if key in row}
        try:
            values = self.values(row, row["value"])
            if "bound" in row:
                done["bound"] = statistics.median(self.values({}, row["bound"]))
            done |= {"value": statistics.median(values), "spread": [min(values), max(values)], "runs": len(values)}
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            done["failed"] = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        names = dict.fromkeys(term[0] for term in row["value"])
        used = [result for name in names for result in self.results.get(name, [])]
        done["commands"] = sorted({result["command"] for result in used})
        done["seeds"] = seeds
        done["seconds"] = [result["seconds"] for result in used]
        done["others"] = max((result["others"] for result in used), default=0.0)
        return done


def complaints(part, rows, recorded):
    """A line for every figure that is not what it should be, and one for those that cannot be judged."""
    for row in rows:
        name = row["id"]
        if "failed" in row:
            yield f"{name}: failed: {row['failed']}"
            continue
        value = row["value"]
        if part["kind"] == "exact":
            if name not in recorded:
                yield f"{name}: {value:.12g}, nothing is recorded: run with --record"
            elif not math.isclose(value, recorded[name], rel_tol=EXACT):
                yield f"{name}: {value:.12g}, recorded is {recorded[name]:.12g}"
        elif row["others"] > QUIET and row.get("is") != "same":
            say(f"{name}: {value:.4g}, not judged: others used {row['others']:.1f} processors meanwhile")
            continue
        if "floor" in row and value < row["floor"]:
            yield f"{name}: {value:.4g}, below {row['floor']}"
        if "at_most" in row and value > row["at_most"]:
            yield f"{name}: {value:.4g}, above {row['at_most']}"


def table(rows):
    lines = ["| row | value | bound | paper | goal |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [row["id"], f"{row['value']:.3f}" if "value" in row else "failed", f"{row['bound']:.3f}" if "bound" in row else "",
                 row.get("paper", ""), str(row.get("goal") or "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynmo", type=pathlib.Path, required=True)
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/bench/bench", help="folder of the built benchmarks")
    parser.add_argument("--part", action="append", help="one of rows.json; default: all but those on demand")
    parser.add_argument("--only", default="", help="rows whose id matches this pattern")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/reproduce")
    parser.add_argument("--rows", type=pathlib.Path, default=HERE / "rows.json")
    parser.add_argument("--recorded", type=pathlib.Path, default=HERE / "recorded.json")
    parser.add_argument("--check", action="store_true", help="exit with 1 and a line for every figure below its floor")
    parser.add_argument("--record", action="store_true", help="make the exact values those to compare with")
    return parser.parse_args()


def main():
    options = arguments()
    parts = read_rows(options.rows)
    chosen = options.part or [name for name, part in parts.items() if not part.get("on_demand")]
    for name in chosen:
        if name not in parts:
            sys.exit(f"reproduce: part {name} is not known, wanted one of {', '.join(parts)}")
    programs = {"dynmo": options.dynmo.resolve(), "demo-text": ROOT / "scripts/demo-text",
                "controller_bench": options.bench / "controller_bench", "search_bench": options.bench / "search_bench"}
    evaluation = Evaluation(parts.values(), Commands(programs, options.out / "commands"))
    recorded = json.loads(options.recorded.read_text()) if options.recorded.exists() else {}
    document = {"format": "dynmo-reproduce-1", **commit(), "machine": machine(), "load": [os.getloadavg()[0]], "parts": {}}
    bad, tables = [], []
    for name in chosen:
        rows = []
        asked = [row for row in parts[name]["rows"] if re.search(options.only, row["id"])]
        used = dict.fromkeys(term[0] for row in asked for term in row["value"] + row.get("bound", []))
        evaluation.run(used, 1 if parts[name]["kind"] == "measured" else os.cpu_count())
        for row in asked:
            rows.append(evaluation.row(row, parts[name].get("seeds", [])))
            if "failed" in rows[-1]:
                say(f"{row['id']}: failed: {rows[-1]['failed']}")
        if options.record and parts[name]["kind"] == "exact":
            recorded.update({row["id"]: row["value"] for row in rows if "value" in row})
        document["parts"][name] = rows
        tables.append(f"## {name}\n{parts[name]['title']}\n\n{table(rows)}")
        bad += complaints(parts[name], rows, recorded)
    document["load"].append(os.getloadavg()[0])
    (options.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "tables.md").write_text("\n".join(tables))
    (options.out / "report.json").write_text(json.dumps(page.document(document, parts)))
    try:
        subprocess.run([programs["dynmo"], "report", options.out / "report.json", "--html", options.out / "report.html"],
                       capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"no page: {(getattr(error, 'stderr', '') or str(error)).strip()}")
    if options.record:
        options.recorded.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
    count = sum(len(rows) for rows in document["parts"].values())
    say(f"{count} rows of {', '.join(chosen)}: {options.out / 'tables.md'}, {options.out / 'results.json'}")
    if options.check:
        for line in bad:
            say(line)
        sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
