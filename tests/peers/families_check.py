#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""families_check.py: every class behind AutoModelForCausalLM of the installed transformers, with a tiny config.

Each trains 10 steps on 3 ranks with two moves to random cuts, and must have the losses and weights of its own loop, or be refused in
one line on every rank. `--only NAME...` runs some kinds, `--rest` those without a result. The results of all runs are kept in a file by
version of transformers. `--table FILE` writes them between the marks of that page, where the rows of other kinds stay.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import warnings

import gloo_ranks
from tiny_configs import MICRO_BATCHES, batch_of, make

RANKS, STEPS = 3, 10
LIMIT_S = 120  # of one family
GROUP = 20  # families that a group of ranks runs, before their results are kept
ROOT = pathlib.Path(__file__).resolve().parents[2]
MEANINGS = {"equal": "equal bit for bit", "differs": "another loss", "fails": "an error in the middle"}
# What the line of a kind that is refused, or has no loop, says.
REASONS = [
    (r"runs where block", "blocks run more than once"),
    (r"was not run", "blocks are passed over"),
    (r"has \d+ lists of", "no list of blocks"),
    (r"device meta", "weights are read past their module"),
    (r"inplace operation|live views", "blocks write into tensors of other blocks"),
    (r"make sure to use `model.train", "it does not run in eval mode"),
    (r"layers one by one|run layer by layer", "blocks are given what other blocks made"),
    (r"requires the \w+ library", "a package is not installed"),
    (r"shared_kv_states|hidden_size_per_layer_input must be 0|producing a cache is different", "it drafts tokens for another model and has no loss"),
    (r"shape '\[-1, 2, ", "it wants a row for each codebook"),
    (r"has no attribute 'num_hidden_layers'", "its cache wants a key that its config does not have"),
    (r"matC_old has wrong shape", "its states do not fit a tiny config"),
    (r"input batch_size \(0\)", "its loss wants pictures"),
    (r"its tiny config has", "too large with a tiny config"),
]
MARKS = ("<!-- families: written by tests/peers/families_check.py -->", "<!-- families end -->")


def optimizer_of(model):
    import torch

    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def loop(kind, seed=None):
    """Losses and weights of the model's own loop. With a seed, random numbers are those of dynmo.torch on any cut."""
    import torch

    from dynmo.torch.decoder import Decoder
    from dynmo.torch.step import seed_for

    model = make(kind)
    run = Decoder(model).whole if seed is not None else None
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            batch = {name: value[part : part + 1] for name, value in batch_of(step).items()}
            if run is not None:
                loss = run(batch, lambda layer, step=step, part=part: torch.manual_seed(seed_for(seed, layer, step, part)))
            else:
                loss = model(**batch).loss
            loss = loss / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def random_plan(draw, layers):
    ranks = draw.sample(range(RANKS), RANKS)
    cuts = [0, *sorted(draw.sample(range(1, layers), RANKS - 1)), layers]
    stages = [{"stage": index, "rank": rank, "first_layer": cuts[index], "layers": cuts[index + 1] - cuts[index]} for index, rank in enumerate(ranks)]
    return {"format": "dynmo-plan-1", "ranks": RANKS, "schedule": "1f1b", "stages": stages}


def pipeline(kind):
    import dynmo.torch as dt

    model = make(kind)
    optimizer, draw, losses = optimizer_of(model), random.Random(kind), []
    pipe = dt.Pipeline(model, optimizer, micro_batches=MICRO_BATCHES, balance=False, timeout_s=100)
    for step in range(STEPS):
        losses.append(pipe.step(**batch_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 6):
            pipe.move_to(random_plan(draw, len(pipe.layers)))
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.device.type != "meta"}
    return losses, weights, len(set(pipe._split.carried.values())), pipe._seed


def on_rank_0(run):
    """What rank 0's call gives, or None and why it failed; on all ranks."""
    import torch.distributed as dist

    found = [None]
    if dist.get_rank() == 0:
        try:
            found = [run()]
        except Exception as error:
            found = [(None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")]
    dist.broadcast_object_list(found)
    return found[0]


def one(kind, say):
    """What came of a family: equal, refused, differs, or no model."""
    import torch
    import torch.distributed as dist

    import dynmo

    say("?no loop", "it is too slow here")
    wanted_losses, wanted = on_rank_0(lambda: loop(kind))
    if wanted_losses is None:
        return "no loop", wanted
    say("?fails", "a rank ended or hung")
    try:
        losses, weights, carried, seed = pipeline(kind)
        if seed is not None:
            wanted_losses, wanted = on_rank_0(lambda: loop(kind, seed))
    except dynmo.BadInputError as error:
        return "refused", str(error)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    wrong = [name for name, weight in weights.items() if name in wanted and not torch.equal(weight, wanted[name])]
    if losses != wanted_losses:
        step = next(index for index, pair in enumerate(zip(losses, wanted_losses)) if pair[0] != pair[1])
        return "differs", f"loss of step {step}: {losses[step]}, wanted {wanted_losses[step]}"
    if wrong:
        return "differs", f"{len(wrong)} weights such as {wrong[0]}"
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, sorted(weights))
    missing = set(wanted) - {name for names in gathered for name in names}
    return ("differs", f"no rank has {min(missing)}") if missing else ("equal", ", ".join([*([f"{carried} carried"] if carried else []), *(["keyed random numbers"] if seed is not None else [])]))


def rank_main(kinds, folder):
    """One rank; families in turn. A file says what came, so that a group which hangs costs one family."""
    import torch
    import torch.distributed as dist
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in kinds:
        signal.alarm(LIMIT_S)
        path = pathlib.Path(folder) / f"{kind}.{dist.get_rank()}"

        def say(verdict, why, path=path):
            path.write_text(f"{verdict}\t{why}")

        say(*one(kind, say))
        try:
            dist.barrier()
        except RuntimeError:
            os._exit(1)
    signal.alarm(0)


def kinds_behind_auto():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def sweep(kinds, keep):
    """Gives what came of each family, on all ranks the same, to `keep`. A group that ended goes on behind the family that ended it."""
    rest = list(kinds)
    with tempfile.TemporaryDirectory() as folder:
        while rest:
            some = rest[:GROUP]
            gloo_ranks.run([sys.executable, __file__, "--rank", folder, "--only", *some], RANKS, LIMIT_S * (len(some) + 1))
            for kind in some:
                paths = [pathlib.Path(folder, f"{kind}.{rank}") for rank in range(RANKS)]
                said = [tuple(path.read_text().partition("\t")[::2]) if path.exists() else ("?fails", "a rank ended or hung") for path in paths]
                ended = any(verdict.startswith("?") for verdict, _ in said)  # the group has, in the middle
                said = [(verdict.lstrip("?"), why) for verdict, why in said]
                rest.remove(kind)
                verdicts = {verdict for verdict, _ in said}
                if len(set(said)) == 1 or len(verdicts) == 1 and verdicts != {"refused"}:
                    found = said[0]
                else:
                    worst = next((one for one in said if one[0] in ("differs", "fails")), said[0])
                    found = worst if worst[0] != "refused" else ("fails", "ranks say different lines")
                print(f"{kind}: {found[0]} {found[1]}", flush=True)
                keep(kind, found)
                if ended:
                    break


class Results:
    """What came of each kind with one version of transformers, in a file that runs of some kinds add to."""

    def __init__(self, path, version):
        self.path, self.version = path, version
        self._all = json.loads(path.read_text()) if path.exists() else {}
        self.found = {kind: tuple(came) for kind, came in self._all.get(version, {}).items()}

    def keep(self, kind, came):
        self.found[kind] = came
        self._all[self.version] = dict(sorted(self.found.items()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._all, indent=1) + "\n")


def meaning_of(came):
    """What a result means, in words that many kinds share."""
    verdict, why = came
    if verdict in MEANINGS:
        return MEANINGS[verdict]
    return f"{verdict}: {next((meaning for pattern, meaning in REASONS if re.search(pattern, why)), 'for a reason of its own')}"


def meanings_of(page, results):
    """What the results say of each kind; of others what the page's table says, if it is of the same version."""
    text = page.read_text().split(MARKS[0])[1].split(MARKS[1])[0] if page is not None else ""
    rows = re.findall(r"^\| ([^|]*) \| ([^|]+) \|$", text, re.MULTILINE) if f"kinds of transformers {results.version}," in text else []
    old = {kind: meaning for kinds, meaning in rows for kind in kinds.split()}
    return {**old, **{kind: meaning_of(came) for kind, came in results.found.items()}}


def table(meanings, version):
    told = collections.Counter(meaning.partition(":")[0] for meaning in meanings.values())
    lines = [f"Of {len(meanings)} kinds of transformers {version}, {len(meanings) - told['no loop']} have a loop with a tiny config here, and "
             f"{told[MEANINGS['equal']]} of them are equal bit for bit. The check prints the line of each refusal.", "", "| kinds | |", "| --- | --- |"]
    order = [*MEANINGS.values(), "refused", "no loop"]
    for meaning in sorted(set(meanings.values()), key=lambda meaning: (order.index(meaning.partition(":")[0]), meaning)):
        lines.append(f"| {' '.join(sorted(kind for kind, other in meanings.items() if other == meaning))} | {meaning} |")
    return "\n".join(lines)


def write_table(page, results, known):
    """Writes the page's table again; kinds without a result stay in their rows. Returns the line of a refusal, if there is one."""
    meanings = meanings_of(page, results)
    missing = [kind for kind in known if kind not in meanings]
    if missing:
        return (f"--table: neither {results.path} nor {page} has a result of {len(missing)} kinds of transformers {results.version} such as "
                f"{missing[0]}, wanted all; add --rest to run them")
    before, rest = page.read_text().split(MARKS[0])
    written = table({kind: meanings[kind] for kind in known}, results.version)
    page.write_text(f"{before}{MARKS[0]}\n{written}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", help="the program; its build folder has the package")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--rest", action="store_true", help="only kinds without a result in the file of --results and on the page of --table")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build" / "families.json", help="what has come so far, kept by all runs")
    parser.add_argument("--rank", help="folder of the results; this process is one rank")
    parser.add_argument("--table", type=pathlib.Path, help="a page, whose table is written again")
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.only, arguments.rank)
        return 0
    gloo_ranks.use_package(arguments.dynmo)
    import transformers

    known, results = kinds_behind_auto(), Results(arguments.results, transformers.__version__)
    unknown = [kind for kind in arguments.only or [] if kind not in known]
    if unknown:
        print(f"--only {unknown[0]}: transformers {transformers.__version__} has no such kind behind AutoModelForCausalLM, wanted one such as llama")
        return 2
    if arguments.table and (not arguments.table.exists() or any(mark not in arguments.table.read_text() for mark in MARKS)):
        print(f"--table {arguments.table}: it is no page with the lines {MARKS[0]} and {MARKS[1]}, wanted one")
        return 2
    told = meanings_of(arguments.table, results) if arguments.rest else {}
    run = [kind for kind in arguments.only or known if kind not in told]
    sweep(run, results.keep)
    if arguments.table and (refused := write_table(arguments.table, results, known)):
        print(refused)
        return 2
    bad = [kind for kind in run if results.found[kind][0] in ("differs", "fails")]
    for kind in run:
        verdict, why = results.found[kind]
        print(f"FAIL {kind}: {verdict}: {why}" if kind in bad else f"SKIP {kind}: {why}" if verdict == "no loop" else f"PASS {kind}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
