#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`dynmo trace stats` beside FeaTensor and `dynmo trace gen` beside GenTensor, the programs of the paper that both follow.

Stats: GenTensor makes nine inputs by its own settings, of which --cap bounds the entries. Every integer of our features is compared
with a brute force (tensor_truth.py) and with FeaTensor's, every float with the brute force (1e-12) and with FeaTensor's (as many
digits as it prints), with one thread and with two. All methods of FeaTensor and ours run once, the two fastest and ours then in
interleaved rounds. Time is the whole process's, memory its largest resident size.

Gen: each of GenTensor's settings of real tensors that has at most --gen-cap entries is asked of ours and of GenTensor in interleaved
rounds, and what ours wrote is read back (generated_check.c). GenTensor is stopped when it has taken as many times ours as the goal needs.

    bench/peers/tensor_compare.py --dynmo build/release/apps/dynmo/dynmo --featensor DIR --gentensor DIR

Needs a Python with numpy (--python), a C compiler, GNU time, and both programs (https://github.com/sparcityeu) built in their folders
by their own scripts.
"""
import argparse
import fractions
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
METHODS = ("map", "sort", "group", "hybrid")
THREADS = 2
# Names of GenTensor's settings, and what divides the sizes of their first modes. GenTensor passes over a whole mode for each fiber,
# so that some of its settings take days; means and spreads of a slice's fibers and of a fiber's entries stay.
INPUTS = (("nell2", (768,)), ("nell1", (100, 100, 100)), ("delicious-3d", (40, 40, 40)), ("nell2", (8,)), ("vast-2015-mc1-3d", ()),
          ("nips", ()), ("chicago-crime-comm", ()), ("lbnl-network", ()), ("chicago-crime-geo", ()))
MAX_BYTES = 40  # of memory an entry, below a million of them besides what the program takes for a single one
SLOWEST = {"1998darpa": 20}  # how many times as fast as GenTensor; others: 1
FLAGS = {"-d": "--density", "-f": "--fiber-density", "-s": "--slice-density", "-c": "--fibers-cv", "-v": "--entries-cv",
         "-i": "--fibers-imbalance", "-b": "--entries-imbalance"}


class Checks:
    def __init__(self):
        self.lines = []

    def take(self, passed, name, why):
        self.lines.append({"passed": bool(passed), "name": name, "why": why})
        print(f"{'PASS' if passed else 'FAIL'} {name}: {why}", flush=True)


def run(command, limit=None, environment=None):
    """Seconds, CPU seconds and peak bytes of a process that prints to nowhere; None where it took longer than `limit` seconds.

    It is started by GNU time, whose peak is its own: to a process that Python starts the system counts the memory of Python.
    """
    start = time.perf_counter()
    peak = tempfile.NamedTemporaryFile("r")
    words = ["time", "--quiet", "--format", "%M", "--output", peak.name, *(str(word) for word in command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, **(environment or {})}, start_new_session=True)
    timer = threading.Timer(limit, os.killpg, [process.pid, signal.SIGKILL]) if limit else None
    if timer:
        timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - start
    if timer:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if limit and process.returncode == -signal.SIGKILL:
        return None
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}")
    return {"s": took, "cpu_s": usage.ru_utime + usage.ru_stime, "bytes": int(peak.read()) * 1024}


def output(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def truth_of(options, what, path):
    return json.loads(output([options.python, HERE / "tensor_truth.py", what, path]))


def settings(gentensor):
    """GenTensor's settings of real tensors by name: sizes, and the values of its flags."""
    found = {}
    for line in (gentensor / "generate_real_tensor_siblings.sh").read_text().splitlines():
        match = re.match(r"\./genten (\d+) ([\d ]+?) (-.*) -o GENERATED_(\S+)\.tns", line)
        if match:
            words = match[3].split()
            found[match[4]] = {"sizes": [int(size) for size in match[2].split()], **dict(zip(words[::2], words[1::2]))}
    return found


def divided(setting, divisors):
    """The setting with smaller modes and the same means: fibers a slice and entries a fiber."""
    smaller = dict(setting, sizes=list(setting["sizes"]))
    factors = list(divisors) + [1] * (len(setting["sizes"]) - len(divisors))
    smaller["sizes"] = [max(round(size / by), 1) for size, by in zip(setting["sizes"], factors)]
    smaller["-f"] = f"{float(setting['-f']) * factors[-2]:.9g}"
    smaller["-d"] = f"{float(setting['-d']) * factors[-2] * factors[-1]:.9g}"
    return smaller


def entries_of(setting):
    return float(setting["-d"]) * math.prod(setting["sizes"])


def theirs_flags(setting, seed, out):
    flags = [word for flag in FLAGS for word in (flag, setting[flag])]
    return [len(setting["sizes"]), *setting["sizes"], *flags, "-r", seed, "-o", out]


def ours_flags(setting, seed, out):
    flags = [word for flag, name in FLAGS.items() for word in (name, setting[flag])]
    return ["trace", "gen", "--sizes", *setting["sizes"], *flags, "--seed", seed, "--out", out]


def spread(of, groups, smallest):
    """The features of `groups` numbers with the given sums, of which those that are not counted are 0."""
    mean = fractions.Fraction(of["sum"], groups)
    std = math.sqrt(fractions.Fraction(groups * of["squares"] - of["sum"] ** 2, groups ** 2))
    return {"min": smallest, "mean": float(mean), "std": std, "cv": std / float(mean), "imbalance": float(of["max"] / mean - 1)}


def near(got, wanted, tolerance):
    return abs(got - wanted) <= tolerance * max(abs(wanted), 1)


def differences_of_ours(features, truth):
    """(integers, floats, those that differ)"""
    wanted = {(of["number"], tuple(of["free"])): of for of in truth["groups"]}
    integers, floats, wrong = 0, 0, []
    seen = set()
    for group in features["fibers"] + features["slices"] + features.get("modes", []):
        for number in ("entries", "fibers"):
            if number not in group:
                continue
            key = (number, tuple(group["free"]))
            seen.add(key)
            got, of = group[number], wanted[key]
            for name in ("groups", "nonempty", "sum", "max"):
                integers += 1
                # A product of sizes above 2^53 is a float.
                if got[name] != (of[name] if of[name] < 1 << 53 else float(of[name])):
                    wrong.append(f"{key} {name}: {got[name]}, wanted {of[name]}")
            every = spread(of, of["groups"], 0 if of["groups"] > of["nonempty"] else of["min"])
            for which, expected in (("all", every), ("of_nonempty", spread(of, of["nonempty"], of["min"]))):
                for name, value in expected.items():
                    floats += 1
                    if not near(got[which][name], value, 1e-12):
                        wrong.append(f"{key} {which} {name}: {got[which][name]!r}, wanted {value!r}")
    wrong += [f"{key} is absent" for key in wanted if key not in seen]
    if (features["sizes"], features["entries"]) != (truth["sizes"], truth["entries"]):
        wrong.append(f"sizes {features['sizes']}, {features['entries']} entries")
    return integers, floats, wrong


def differences_of_theirs(text, truth):
    """FeaTensor takes a mode for as large as its largest index, and prints six digits."""
    order = len(truth["sizes"])
    wanted = {(of["number"], tuple(of["free"])): of for of in truth["groups"]}
    words = text.split()
    marks = [words.index(name) for name in ("SLICES", "FIBERS", "FIBPERSLICE")] + [len(words)]
    integers, floats, wrong = 0, 0, []
    for (begin, end), ids, number in zip(zip(marks, marks[1:]), (2, 1, 2), ("entries", "entries", "fibers")):
        row = ids + 15
        for at in range(begin + 1, end, row):
            free = tuple(sorted(int(mode) + 1 for mode in words[at:at + ids]))
            values = [float(word) for word in words[at + ids:at + row]]
            of = wanted[number, free]
            groups = math.prod(size for m, size in enumerate(truth["largest"], 1) if m not in free)
            every, nonempty = spread(of, groups, 0), spread(of, of["nonempty"], 0)
            expected = [groups, of["nonempty"], of["nonempty"] / groups, of["max"], of["min"], of["max"] - of["min"], of["sum"],
                        every["mean"], every["imbalance"], every["std"], every["cv"],
                        nonempty["mean"], nonempty["imbalance"], nonempty["std"], nonempty["cv"]]
            for i, (got, value) in enumerate(zip(values, expected)):
                exact = i in (0, 1, 3, 4, 5, 6)
                integers, floats = integers + exact, floats + (not exact)
                if got != float(value) if exact else not near(got, value, 1e-5):  # above 2^53 theirs are floats, too
                    wrong.append(f"{number} {free} column {i}: {got}, brute force {value}")
    return integers, floats, wrong


def spread_text(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def declare(path, sizes):
    """Puts the sizes into the header. Where all slices or most of them have entries, GenTensor writes indices beyond those of 5 modes."""
    with open(path, "rb") as file:
        file.readline()
        if [int(size) for size in file.readline().split()] == sizes:
            return
        with open(path.with_suffix(".new"), "wb") as other:
            other.write(f"{len(sizes)}\n{' '.join(map(str, sizes))}\n".encode())
            shutil.copyfileobj(file, other, 1 << 24)
    path.with_suffix(".new").rename(path)


def compare_stats(options, checks, folder):
    found = []
    (folder / "one.tns").write_text("1 1 1 1\n")
    own = run([options.dynmo, "trace", "stats", folder / "one.tns", "--json"])["bytes"]
    for number in options.inputs:
        name, divisors = INPUTS[number - 1]
        setting = divided(options.settings[name], divisors)
        over = entries_of(setting) / options.cap
        if over > 1:
            setting["sizes"][0] = max(round(setting["sizes"][0] / over), 1)
        path = folder / "input.tns"
        took = run([options.gentensor / "genten", *theirs_flags(setting, options.seed, path)])
        truth = truth_of(options, "features", path)
        declare(path, truth["sizes"])
        order, entries = len(truth["sizes"]), truth["entries"]
        title = f"stats {number}, {name} {'x'.join(map(str, truth['sizes']))}, {entries} entries"
        ours = {threads: [options.dynmo, "trace", "stats", path, "--threads", threads, "--json"] for threads in (1, THREADS)}
        texts = [output(command) for command in ours.values()]
        integers, floats, wrong = differences_of_ours(json.loads(texts[0]), truth)
        checks.take(not wrong and texts[0] == texts[1], f"{title}, equal to brute force",
                    "; ".join(wrong[:3]) or f"{integers} integers, {floats} floats within 1e-12, the same text with {THREADS} threads")
        out = {m: folder / f"{m}.txt" for m in METHODS}
        # Above three modes the other methods give the features of the three largest modes only.
        methods = options.methods if order == 3 or options.all_methods else METHODS[:1]
        theirs = {m: [options.featensor / "featen", "-i", path, "-o", out[m], "-m", m] for m in methods}
        rounds = []
        for turn in range(options.rounds):
            runs = {f"ours {threads}": (command, {}) for threads, command in ours.items()}
            # From the second round on only the two fastest of theirs.
            again = theirs if turn == 0 else sorted(theirs, key=lambda m: rounds[0][m]["s"])[:2]
            runs |= {m: (theirs[m], {"OMP_NUM_THREADS": str(THREADS)}) for m in again}
            rounds.append({who: run(command, environment=environment)
                           for who, (command, environment) in list(runs.items())[::1 if turn % 2 == 0 else -1]})
        integers, floats, wrong = differences_of_theirs(out["map"].read_text(), truth)
        checks.take(not wrong, f"{title}, FeaTensor's map has the same",
                    "; ".join(wrong[:3]) or f"{integers} integers, {floats} floats to the digits it prints")
        rivals = [m for m in methods if order == 3 or m == "map"]
        every = {who: [r[who] for r in rounds if who in r] for who in rounds[0]}
        best = min(rivals, key=lambda m: (-len(every[m]), statistics.median(one["s"] for one in every[m])))
        ratios = [r[f"ours {THREADS}"]["s"] / r[best]["s"] for r in rounds]
        times = ", ".join(f"{who} {statistics.median(one['s'] for one in all_of):.3g} s" for who, all_of in every.items())
        cpu = [r[f"ours {THREADS}"]["cpu_s"] / r[best]["cpu_s"] for r in rounds]
        times = f"CPU {spread_text(cpu)}; {times}"
        wanted = 0.1 if order > 3 else 0.5
        judged = order > 3 or entries >= 1e6
        if judged:
            checks.take(statistics.median(ratios) <= wanted, f"{title}, time", f"{spread_text(ratios)} of {best}'s, wanted {wanted}; {times}")
        else:
            print(f"     {title}, time: {spread_text(ratios)} of {best}'s, no goal below 1 M entries; {times}", flush=True)
        peak = {who: max(one["bytes"] for one in all_of) / entries for who, all_of in every.items()}
        whole = max(peak["ours 1"], peak[f"ours {THREADS}"])
        grown = whole - own / entries
        memory = ", ".join(f"{who} {value:.1f}" for who, value in peak.items())
        checks.take((whole if entries >= 1e6 else grown) <= MAX_BYTES, f"{title}, bytes an entry", f"{grown:.1f} besides the program's own {own / 1e6:.1f} MB; in all {memory}")
        found.append({"name": name, "sizes": truth["sizes"], "entries": entries, "genten_s": took["s"], "best": best, "rounds": rounds})
    return found


def asked_of(setting):
    """Counts and largest ones as the setting asks for them: a product of sizes and density, mean (1 + imbalance)."""
    slices = math.prod(setting["sizes"][:-2])
    rows, columns = setting["sizes"][-2:]
    counts = {"slices": slices * float(setting["-s"]), "fibers": slices * rows * float(setting["-f"]),
              "entries": slices * rows * columns * float(setting["-d"])}
    return {name: max(round(count), 1) for name, count in counts.items()}


def differences_of_generated(setting, said, got):
    """What was written beside what was said and asked. Densities of six digits do not fit together exactly: a hundredth of a percent
    is allowed between two of them, none between what is said and written."""
    wrong = [f"{name} is {got[name]}, said {said[name]}" for name in said if got[name] != said[name]]
    if got["sizes"] != setting["sizes"]:
        wrong.append(f"sizes {got['sizes']}")
    for name, count in asked_of(setting).items():
        if abs(got[name] - count) > 1e-4 * count:
            wrong.append(f"{name} is {got[name]}, asked {count}")
    rows, columns = setting["sizes"][-2:]
    for key, mean, imbalance, room in (("slice", got["fibers"] / got["slices"], "-i", rows),
                                       ("fiber", got["entries"] / got["fibers"], "-b", columns)):
        largest = min(round(mean * (1 + float(setting[imbalance]))), room)
        # The mean is that of the counts asked for, which may differ in the fourth digit, and with it a half is rounded.
        if abs(got[key]["max"] - largest) > (1 if abs(mean * (1 + float(setting[imbalance])) % 1 - 0.5) < 1e-3 * mean else 0):
            wrong.append(f"largest of a {key} is {got[key]['max']}, asked {largest}")
    for key, flag in (("slice", "-c"), ("fiber", "-v")):
        cv = spread(got[key], got[key]["nonempty"], 0)["cv"]
        if abs(cv - float(setting[flag])) > 0.02 * float(setting[flag]) + 1e-3:
            wrong.append(f"CV of a {key} is {cv:.6g}, asked {setting[flag]}")
    return wrong


def generated_and_said(options, setting, path):
    said = output([options.dynmo, *ours_flags(setting, options.seed, path)])
    numbers = re.match(r"(\d+) entries in (\d+) fibers of (\d+) slices", said)
    got = json.loads(output([options.check, path]))
    got |= {"fibers": got["fiber"]["nonempty"], "slices": got["slice"]["nonempty"]}
    return got, dict(zip(("entries", "fibers", "slices"), map(int, numbers.groups())))


def compare_gen(options, checks, folder):
    found = []
    for name, setting in options.settings.items():
        title = f"gen {name}"
        if options.names and name not in options.names:
            continue
        if entries_of(setting) > options.gen_cap:
            print(f"     {title}: {entries_of(setting):.3g} entries are above --gen-cap", flush=True)
            continue
        path, other = folder / "ours.tns", folder / "theirs.tns"
        got, said = generated_and_said(options, setting, path)
        wrong = differences_of_generated(setting, said, got)
        cvs = ", ".join(f"{key} {spread(got[key], got[key]['nonempty'], 0)['cv']:.5g} asked {setting[flag]}"
                        for key, flag in (("slice", "-c"), ("fiber", "-v")))
        checks.take(not wrong, f"{title}, as asked", "; ".join(wrong[:3]) or
                    f"{got['entries']} entries, {got['fibers']} fibers, {got['slices']} slices, largest {got['slice']['max']} and "
                    f"{got['fiber']['max']}; CV: {cvs}; every place once, in range")
        times_as_fast = SLOWEST.get(name, 1)
        rounds = []
        for _ in range(options.rounds):
            ours = run([options.dynmo, *ours_flags(setting, options.seed, path)])
            limit = 1.05 * times_as_fast * ours["s"]
            theirs = run([options.gentensor / "genten", *theirs_flags(setting, options.seed, other)], limit,
                         {"OMP_NUM_THREADS": str(THREADS)})
            rounds.append({"ours": ours, "theirs": theirs, "limit_s": limit})
            if theirs is None and times_as_fast * ours["s"] > 30:
                break
        ratios = [r["ours"]["s"] / (r["theirs"]["s"] if r["theirs"] else r["limit_s"]) for r in rounds]
        stopped = sum(r["theirs"] is None for r in rounds)
        checks.take(statistics.median(ratios) <= 1 / times_as_fast, f"{title}, time",
                    f"ours {spread_text([r['ours']['s'] for r in rounds])} s, {spread_text(ratios)} of theirs"
                    + (f" at most: stopped {stopped} of {len(rounds)} times" if stopped else ""))
        found.append({"name": name, "entries": got["entries"], "rounds": rounds})
        for each in (path, other):
            each.unlink(missing_ok=True)
    return found


def check_orders(options, checks, folder):
    for order in range(2, 9):
        sizes = [4] * (order - 2) + [300, 500]
        slices = 4 ** (order - 2)
        setting = {"sizes": sizes, "-s": "0.5" if slices > 1 else "1", "-f": "0.1", "-d": f"{20 / 500 * 0.1:.9g}", "-c": "0.4" if slices > 8
                   else "0", "-v": "0.8", "-i": "1" if slices > 8 else "0", "-b": "3"}
        got, said = generated_and_said(options, setting, folder / "ours.tns")
        wrong = differences_of_generated(setting, said, got)
        checks.take(not wrong, f"gen of {order} modes", "; ".join(wrong[:3]) or f"{got['entries']} entries as asked")


def check_autocorrelation(options, checks, folder):
    for wanted in (0, 0.5, 0.9, 0.95, 0.99):
        path = folder / "counts.jsonl"
        output([options.dynmo, "trace", "gen", "--counts", "--sizes", 2000, 8, 16, "--tokens", 4096, "--cv", 0.8, "--autocorrelation",
                wanted, "--out", path, "--seed", options.seed])
        got = truth_of(options, "autocorrelation", path)
        passed = abs(got["autocorrelation"] - wanted) <= 0.03 and abs(got["cv"] - 0.8) <= 0.016 and got["sums"] == [4096]
        checks.take(passed, f"gen of counts, autocorrelation {wanted}", f"{got['autocorrelation']:.4f}, CV {got['cv']:.4f} of 0.8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynmo", type=Path, required=True)
    parser.add_argument("--featensor", type=Path, required=True, help="folder with the program featen")
    parser.add_argument("--gentensor", type=Path, required=True, help="folder with the program genten")
    parser.add_argument("--python", default=sys.executable, help="one with numpy")
    parser.add_argument("--cap", type=float, default=1.2e6, help="entries of an input of stats")
    parser.add_argument("--gen-cap", type=float, default=4e6, help="entries of a setting of gen; larger ones are left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all-methods", action="store_true", help="with more than three modes too, where but map gives fewer features")
    parser.add_argument("--parts", nargs="+", choices=("stats", "gen", "orders", "autocorrelation"),
                        default=["stats", "gen", "orders", "autocorrelation"])
    parser.add_argument("--inputs", type=int, nargs="+", default=range(1, len(INPUTS) + 1), help="those of stats, from 1")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of FeaTensor, with three modes; map among them")
    parser.add_argument("--names", nargs="+", help="settings of gen; else all of them")
    parser.add_argument("--folder", type=Path, help="where files are written; else a temporary one")
    parser.add_argument("--out", type=Path, help="JSON of all measurements")
    options = parser.parse_args()
    options.settings = settings(options.gentensor)
    if len(options.settings) != 16:
        raise SystemExit(f"{options.gentensor} has {len(options.settings)} settings of real tensors, wanted 16")
    checks, found = Checks(), {}
    parts = {"stats": compare_stats, "gen": compare_gen, "orders": check_orders, "autocorrelation": check_autocorrelation}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.check = Path(folder) / "generated_check"
        output(["cc", "-O2", "-o", options.check, HERE / "generated_check.c"])
        for part in options.parts:
            found[part] = parts[part](options, checks, Path(folder))
            if options.out:
                options.out.write_text(json.dumps({"checks": checks.lines, **found}, indent=1))
    failed = sum(not line["passed"] for line in checks.lines)
    print(f"{len(checks.lines) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
