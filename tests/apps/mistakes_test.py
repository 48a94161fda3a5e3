# SPDX-License-Identifier: Apache-2.0
"""The mistakes of a first hour, over all commands, as a table: each ends with the documented exit code and one line on standard error that
names what was given and what was wanted, and changes no file that was there.

A row is the words of a command, its exit code, and what its line says. Rows of the commands that need libtorch are left out where this build has
no runtime.
"""
import concurrent.futures
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from program import DYNMO, ProgramCase

RUNTIME = pathlib.Path(DYNMO).with_name("dynmo-runtime")
TINY = ["--model.hidden=32", "--model.blocks=3", "--model.heads=4", "--model.kv_heads=2", "--model.intermediate=48", "--model.sequence=16",
        "--batch.micro_batches=4", "--batch.micro_batch_size=2", "--train.validation_every=0", "--pipeline.pin=false"]
LAUNCHED = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 257,
         "max_position_embeddings": 128}
PROFILE = {"format": "dynmo-profile-1", "layers": [{"name": f"layer {i}", "forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3,
                                                    "parameter_bytes": 1 << 20} for i in range(4)]}

DATA = [
    ("data", 2, "'data' wants a command: prepare, inspect"),
    ("data prepare", 2, "paths is required"),
    ("data prepare texts", 2, "--out is required"),
    ("data prepare nowhere --out d", 2, "'nowhere'"),
    ("data prepare texts --out", 2, "--out has no value"),
    ("data prepare texts --out d --held-out 2", 2, "--held-out is 2, wanted 0 or more and below 1"),
    ("data prepare texts --out d --held-out -0.1", 2, "--held-out is -0.1"),
    ("data prepare texts --out d --held-out 1", 2, "--held-out is 1"),
    ("data prepare texts --out d --held-out half", 2, "--held-out = half"),
    ("data prepare texts --out d --tokenizer gpt2", 2, "'gpt2' is not there, wanted bytes"),
    ("data prepare texts --out d --tokenizer texts/a.txt", 2, "texts/a.txt"),
    ("data prepare texts --out d --vocabulary 500", 2, "--vocabulary is 500, but --tokenizer bytes has a vocabulary of its own"),
    ("data prepare texts --out d --tokenizer sentencepiece --vocabulary 2", 2, "--vocabulary is 2"),
    ("data prepare texts --out d --algorithm bpe", 2, "--algorithm is bpe, but --tokenizer bytes is not trained"),
    ("data prepare texts --out d --tokenizer sentencepiece --algorithm wordpiece", 2, "--algorithm is "),
    ("data prepare texts --out d --jobs 0", 2, "--jobs is 0"),
    ("data prepare texts --out d --seed -1", 2, "--seed"),
    ("data prepare texts --out d --extensions .rst", 2, "no text found"),
    ("data prepare texts --out d --token bytes", 2, "'--token' is not known here"),
    ("data prepare empty --out d", 2, "empty"),
    ("data prepare broken.jsonl --out d", 2, "broken.jsonl", "1"),
    ("data prepare keyless.jsonl --out d", 2, "keyless.jsonl", "--text-key"),
    ("data prepare texts.bz2 --out d", 2, "texts.bz2", "decompress"),
    ("data prepare texts --out texts/a.txt", 2, "texts/a.txt"),
    ("data inspect", 2, "path is required"),
    ("data inspect nowhere", 2, "nowhere"),
    ("data inspect texts", 2, "texts"),
    ("data inspect data --document 999", 2, "999"),
    ("data inspect data --document -1", 2, "-1"),
    ("data prepare texts --out texts", 2, "'texts' holds 'texts', which is to be prepared"),
    ("data prepare texts --out data", 2, "'data' holds a data set of 2 documents", "--overwrite"),
    ("data prepare data --out d", 2, "no text found"),
    ("data prepare texts nowhere --out d", 2, "'nowhere'"),
    ("data prepare texts --out profile.json", 2, "profile.json"),
    ("data prepare texts --out d --format json", 2, "--format is 'json', wanted auto, text or jsonl"),
    ("data prepare texts --out d --extensions txt", 2, "extension 'txt' is none, wanted one such as '.txt'"),
    ("data prepare texts/a.txt --out d --extensions .md", 2, "--extensions does nothing here: wanted a folder as one of the paths with it"),
    ("data prepare texts --out d --text-key body", 2, "--text-key is body, but none of the 1 files is JSON lines"),
    ("data prepare texts --out d --format text --text-key body", 2, "--text-key does nothing here: wanted --format jsonl or auto with it"),
    ("data prepare texts --out d --held-out 0 --seed 3", 2, "--seed does nothing here: wanted a --held-out above 0 with it"),
    ("data prepare texts --out d --tokenizer profile.json", 2, "'profile.json' is JSON without a /model"),
    ("data inspect data --ids --json", 2, "--ids does nothing here: wanted no --json"),
    ("data inspect data --ids --tokenizer bytes", 2, "--tokenizer does nothing here: wanted no --ids"),
    ("data inspekt data", 2, "did you mean 'inspect'?"),
]
PLAN = [
    ("plan", 2, "no model was given, wanted PROFILE.json, --model CONFIG.json or --config RUN.toml"),
    ("plan profile.json", 2, "no ranks were given, wanted --ranks N or --cluster"),
    ("plan profile.json --ranks 0", 2, "--ranks is 0, wanted a whole number from 1"),
    ("plan profile.json --ranks two", 2, "--ranks: 'two' is not a whole number"),
    ("plan profile.json --ranks 2 --schedule zbv", 2, "zbv", "zb-v"),
    ("plan profile.json --ranks 2 --ranks 3", 2, "--ranks is given 2 times, wanted it once"),
    ("plan profile.json --gpus 4", 2, "'--gpus' is not known here, known are "),
    ("plan profile.json --rank 4", 2, "did you mean '--ranks'?"),
    ("plan nowhere.json --ranks 2", 2, "nowhere.json"),
    ("plan texts --ranks 2", 2, "texts"),
    ("plan texts/a.txt --ranks 2", 2, "texts/a.txt"),
    ("plan scenario.toml --ranks 2", 2, "scenario.toml"),
    ("plan config.json --ranks 2", 2, "config.json"),
    ("plan profile.json --model config.json --ranks 2", 2, "PROFILE.json, --model and --config exclude"),
    ("plan --model config.json --ranks 2", 2, "--model wants --device, such as h100, and --sequence"),
    ("plan --model config.json --device h100 --ranks 2", 2, "--sequence"),
    ("plan --model config.json --device rtx4090 --sequence 64 --ranks 2", 2, "device 'rtx4090' is not known, known are h200, h100, a100, cpu"),
    ("plan --model config.json --device h10 --sequence 64 --ranks 2", 2, "did you mean 'h100'?"),
    ("plan --model config.json --device h100 --sequence 4096 --ranks 2", 2, "4096"),
    ("plan --model nowhere --device h100 --sequence 64 --ranks 2", 2, "nowhere"),
    ("plan --model bert.json --device h100 --sequence 64 --ranks 2", 2, "bert.json", "bert"),
    ("plan profile.json --device h100 --ranks 2", 2, "--device goes with --model or --config, not with a profile"),
    ("plan profile.json --ranks 2 --memory lots", 2, "--memory"),
    ("plan profile.json --ranks 2 --memory 0", 2, "--memory is 0, wanted more than 0, such as 80GiB"),
    ("plan profile.json --ranks 2 --memory 1KiB", 3, "memory"),
    ("plan profile.json --ranks 9 --balancer uniform", 2, "9 ranks for 4 layers"),
    ("plan profile.json --ranks 2 --balancer greedy", 2, "balancer 'greedy' is not known"),
    ("plan profile.json --ranks 2 --balancer optimel", 2, "optimel", "optimal"),
    ("plan profile.json --ranks 2 --schedule 2f2b", 2, "'2f2b' is not a schedule"),
    ("plan profile.json --ranks 2 --recompute all", 2, "--recompute", "none, whole or auto"),
    ("plan profile.json --ranks 2 --micro-batches 0", 2, "--micro-batches is 0"),
    ("plan profile.json --ranks 2 --slack 0.1", 2, "--slack goes with --pack"),
    ("plan profile.json --ranks 2 --pack --slack -1", 2, "--slack is -1"),
    ("plan profile.json --ranks 2 --head-room 1", 2, "--head-room is 1"),
    ("plan profile.json --ranks 2 --head-room 0.2", 2, "--head-room does nothing here: wanted --memory, --device or a --cluster whose ranks have memory_bytes with it"),
    ("plan profile.json config.json --ranks 2", 2, "'config.json' is one word too many"),
    ("plan profile.json --ranks 2 --cluster cluster.json", 2, "both --ranks and --cluster"),
    ("plan profile.json --cluster nowhere.json", 2, "nowhere.json"),
    ("plan profile.json --cluster profile.json", 2, "profile.json"),
    ("plan profile.json --ranks 2 --from nowhere.json", 2, "nowhere.json"),
    ("plan profile.json --ranks 2 --from profile.json", 2, "profile.json"),
    ("plan profile.json --ranks 2 --out profile.json", 2, "PROFILE and --out are both 'profile.json'"),
    ("plan profile.json --ranks 2 --balancer optimal --evaluations 9", 2, "--evaluations does nothing here: wanted --balancer search with it"),
    ("plan profile.json --ranks 2 --place", 2, "--place does nothing here: wanted a --cluster of unlike ranks or links with it"),
    ("plan profile.json --ranks 1 --pack", 2, "--pack does nothing here: wanted more than one rank with it"),
    ("plan profile.json --ranks 2 --recompute auto", 2, "--recompute auto does nothing here: wanted --memory"),
    ("plan profile.json --cluster cluster.json --head-room 0.2", 2, "--head-room does nothing here"),
    ("plan profile.json --ranks 2 --out x.json --trace x.json", 2, "--out and --trace are both 'x.json'"),
    ("plan profile.json --ranks 3 --from plan.json --trace plan.json", 2, "--from and --trace are both 'plan.json'"),
    ("plan profile.json --ranks 2 --from plan.json", 2, "plan.json: the plan uses rank 2, but 2 ranks are offered"),
    ("plan profile.json --ranks 2 --out texts", 2, "cannot write 'texts': it is a folder"),
    ("plan plan.json --ranks 2", 2, "plan.json: /format is 'dynmo-plan-1', wanted 'dynmo-profile-1'"),
    ("plan --config scenario.toml --device h100 --ranks 2", 2, "scenario.toml:4: 'cluster.pipeline_ranks' is not a known key"),
    ("plan profile.json --ranks 2 --schedule interleaved --micro-batches 3", 2, "interleaved takes no 3 micro-batches"),
    ("plan profile.json --ranks 2 --out no/such/plan.json --balancer uniform", 2, "no/such"),
]
SIMULATE = [
    ("simulate", 2, "scenario is required"),
    ("simulate nowhere.toml", 2, "nowhere.toml"),
    ("simulate empty.toml", 2, "is empty, wanted a scenario"),
    ("simulate profile.json", 2, "profile.json"),
    ("simulate scenario.toml --set", 2, "--set has no value"),
    ("simulate scenario.toml --set training", 2, "wanted key=value"),
    ("simulate scenario.toml --set training.step=3", 2, "setting training.step=3", "did you mean 'training.steps'?"),
    ("simulate scenario.toml --set training.steps=many", 2, "training.steps is 'many', wanted a whole number"),
    ("simulate scenario.toml --set training.steps=0", 2, "training.steps is 0"),
    ("simulate scenario.toml --set dynamism.source=frezing", 2, "did you mean 'freezing'?"),
    ("simulate scenario.toml --set device.name=v100", 2, "device 'v100' is not known"),
    ("simulate scenario.toml --set cluster.pipeline_ranks=0", 2, "cluster.pipeline_ranks is 0"),
    ("simulate scenario.toml --set training.schedule=adaptive", 2, "training.schedule is adaptive"),
    ("simulate scenario.toml --set model.blocks=0", 2, "model.blocks is 0"),
    ("simulate scenario.toml --set freezing.fraction=0.5", 2, "freezing.fraction is 0.5 with dynamism.source = none"),
    ("simulate scenario.toml --set dynamism.source=moe --set pruning.start=4", 2, "pruning.start is 4 with dynamism.source = moe"),
    ("simulate scenario.toml --set policy.evaluations=9", 2, "policy.evaluations is 9 with no policy that searches"),
    ("simulate scenario.toml --set policy.pack_slack=0.1", 2, "policy.pack_slack is 0.1 with no policy that packs"),
    ("simulate scenario.toml --compare uniform --set policy.noise=0.1", 2, "policy.noise is 0.1 with no policy that re-plans"),
    ("simulate scenario.toml --set cluster.slow_speed=0.5", 2, "cluster.slow_speed is 0.5 with cluster.slow_ranks = []"),
    ("simulate scenario.toml --set cluster.nic_bandwidth=1e9", 2, "cluster.nic_bandwidth is ", "all 2 ranks on a node"),
    ("simulate scenario.toml --set training.checkpoint_every=2", 2, "training.checkpoint_every is 2 with no failure"),
    ("simulate scenario.toml --set model.experts_per_token=2", 2, "model.experts_per_token is 2 with model.family = gpt"),
    ("simulate scenario.toml --set dynamism.source=freezing --set freezing.tolerance=0.5", 2, "freezing.tolerance is 0.5 with freezing.rule = schedule"),
    ("simulate scenario.toml profile.json", 2, "'profile.json' is one word too many"),
    ("simulate scenario.toml --compare uniform,best", 2, "'best'"),
    ("simulate scenario.toml --compare optimul", 2, "optimul", "optimal"),
    ("simulate scenario.toml --jsn", 2, "--json"),
    ("simulate scenario.toml --compare", 2, "--compare has no value"),
    ("simulate scenario.toml --policy uniform", 2, "'--policy' is not known here"),
    ("simulate scenario.toml --trace scenario.toml", 2, "SCENARIO and --trace are both 'scenario.toml': name another file"),
    ("simulate scenario.toml --load-trace scenario.toml", 2, "SCENARIO and --load-trace are both 'scenario.toml'"),
    ("simulate scenario.toml --set model.profile=profile.json --trace profile.json", 2, "model.profile and --trace are both 'profile.json'"),
    ("simulate scenario.toml --compare uniform,uniform", 2, "policy.compare names 'uniform' twice"),
    ("simulate scenario.toml --set policy.compare=[]", 2, "policy.compare is a list of 0, wanted 1 to 32 names"),
    ("simulate scenario.toml --set model.heads=7", 2, "model.heads is 7, wanted a divisor of model.hidden (1024)"),
    ("simulate scenario.toml --set freezing.enabled=true", 2, "a scenario names its source in dynamism.source"),
    ("simulate scenario.toml --set cluster.memory=1MiB", 3, "rank"),
    ("simulate scenario.toml --set dynamism.trace=nowhere", 2, "'nowhere'"),
    ("simulate scenario.toml --set dynamism.source=early-exit --set early_exit.confidence=similarity", 2,
     "early_exit.confidence is 'similarity' with early_exit.exit_loss = 0.1"),
    ("simulate scenario.toml --set dynamism.source=early-exit --set early_exit.exit_loss=0.3", 2, "early_exit.exit_loss is 0.3 with a load"),
    ("simulate scenario.toml --compare uniform --decisions", 2, "--decisions does nothing here: wanted a policy that re-plans"),
    ("simulate scenario.toml --compare uniform --shares", 2, "--shares does nothing here: wanted a policy that re-plans"),
    ("simulate scenario.toml --json --decisions", 2, "--decisions does nothing here: wanted no --json"),
    ("simulate typo.toml", 2, "typo.toml:2: 'model.block' is not a known key", "did you mean 'model.blocks'?"),
    ("simulate half.toml", 2, "half.toml:1", "wanted TOML"),
]
REPORT_TRACE_CTL = [
    ("config nowhere.toml", 2, "nowhere.toml"),
    ("config typo.toml", 2, "typo.toml:2", "did you mean 'model.blocks'?"),
    ("config --set train.step=3", 2, "train.step", "did you mean 'train.steps'?"),
    ("config --set train.steps=0", 2, "train.steps"),
    ("config --set batch.micro_batch_size=16777216 --set model.sequence=1024", 2, "batch.micro_batch_size x model.sequence"),
    ("config --set pipeline.recompute=some", 2, "pipeline.recompute", "none, whole or auto"),
    ("config --set pipeline.recompute=auto", 2, "pipeline.memory", "2GiB"),
    ("config --set checkpoint.keep=5", 2, "checkpoint.keep is 5 with checkpoint.every = 0"),
    ("config --set elastic.enabled=true --set elastic.pack=auto --set balance.enabled=false", 2, "balance.enabled = true, or no elastic.pack"),
    ("config --set elastic.pack_ranks=2", 2, "elastic.pack_ranks is 2 with elastic.enabled = false"),
    ("config --set elastic.enabled=true --set elastic.pack=sometimes", 2, "never or auto"),
    ("config --set elastic.enabled=true --set elastic.pack_ranks=2 --set elastic.ranks_min=3", 2, "elastic.ranks_min = 3 or more"),
    ("config --set elastic.release_command=sh", 2, "elastic.release_command is 'sh' with elastic.enabled = false"),
    ("config --set elastic.enabled=true --set elastic.release_after=0", 2, "elastic.release_after is 0"),
    ("config --set elastic.listen=loopback", 2, "elastic.listen is 'loopback' with elastic.enabled = false"),
    ("config --set elastic.enabled=true --set elastic.listen=", 2, "auto, loopback or an address of this host"),
    ("config --defaults empty.toml", 2, "--defaults does nothing here: wanted neither FILE nor --set"),
    ("report", 2, "run is required"),
    ("report nowhere", 2, "nowhere"),
    ("report texts", 2, "'texts' has no summary.json"),
    ("report profile.json", 2, "profile.json"),
    ("report texts --traffic", 2, "'texts' has no traffic.jsonl: wanted the folder of a run of several ranks"),
    ("report texts data", 2, "2 runs, wanted one without --html"),
    ("trace import profile.json --out profile.json", 2, "TRACE and --out are both 'profile.json'"),
    ("trace gen --out profile.json --like profile.json", 2, "--like and --out are both 'profile.json'"),
    ("trace gen --out t.tns --sizes 10 10 --slice-density 0.5", 2, "--slice-density does nothing here: wanted three of --sizes or more"),
    ("trace gen --out t.tns --sizes 10 10 10 --scale steps=4", 2, "--scale does nothing here: wanted --counts or --costs with it"),
    ("trace", 2, "'trace' wants a command: import"),
    ("trace stats nowhere.tns", 2, "cannot read 'nowhere.tns'"),
    ("trace stats profile.json", 2, "profile.json:1"),
    ("trace stats texts", 2, "'texts' has neither a load trace nor counts of experts"),
    ("trace gen --out t.tns", 2, "--sizes has 0 numbers"),
    ("trace gen --out t.tns --sizes 10 10 10 --density 2", 2, "--density is 2, wanted above 0, at most 1"),
    ("trace gen --out t.tns --sizes 10 10 10 --density 0.01 --fiber-density 0.5", 2, "50 fibers and 10 entries contradict each other"),
    ("trace gen --out t.tns --sizes 10 10 10 --density 0.5 --fiber-density 0.9 --entries-imbalance 0.1 --entries-cv 2", 2, "contradicts a largest of"),
    ("trace gen --out t.tns --sizes 1000000 1000000 1000000 --density 0.1 --fiber-density 0.1", 2, "wanted at most 2^33"),
    ("trace gen --out t.tns --sizes 10 10 10 --entries-cv nan", 2, "--entries-cv is nan, wanted a number of at least 0"),
    ("trace gen --out t.tns --sizes 10 10 10 --fibers-imbalance inf", 2, "--fibers-imbalance is inf, wanted a number of at least 0"),
    ("trace gen --out t.tns --sizes 10 10 10 --tokens 5", 2, "--tokens does nothing here: wanted --counts and no --like with it"),
    ("trace gen --out t.tns --sizes 10 10 10 --cv 0.5", 2, "--cv does nothing here: wanted --counts or --costs"),
    ("trace gen --out t.jsonl --counts --sizes 10 2 4 --density 0.5", 2, "--density does nothing here: wanted no --counts, --costs or --like with it"),
    ("trace gen --out t.jsonl --counts --sizes 10 2 4 --step-s 2", 2, "--step-s does nothing here: wanted --costs"),
    ("trace gen --out t.tns --like profile.json", 2, "profile.json"),
    ("trace gen --out t.jsonl --counts --sizes 10 2", 2, "--sizes has 2 numbers, wanted those of steps, blocks and experts"),
    ("trace gen --out t.jsonl --counts --sizes 10 2 4 --scale heads=3", 2, "--scale has 'heads=3', wanted steps=N, blocks=N or experts=N"),
    ("trace import", 2, "trace is required"),
    ("trace import nowhere.json --out p.json", 2, "nowhere.json"),
    ("trace import profile.json --out p.json", 2, "profile.json"),
    ("trace import texts/a.txt --out p.json", 2, "texts/a.txt"),
    ("trace import profile.json", 2, "--out is required"),
    ("trace import profile.json --out p.json --boundary-bytes -1", 2, "--boundary-bytes is -1"),
    ("trace export profile.json", 2, "'export' is not known here"),
    ("ctl", 2, "run is required"),
    ("ctl nowhere status", 5, "no elastic run goes on in 'nowhere'", "elastic.enabled"),
    ("ctl texts stop", 5, "no elastic run goes on in 'texts'"),
    ("ctl texts dance", 2, "'dance' is not known here"),
    ("ctl texts pack", 2, "ranks is required"),
    ("ctl texts pack 0", 2, "ranks is '0', wanted 1 to 4096"),
    ("ctl texts drain first", 2, "rank"),
    ("ctl 127.0.0.1:1 status", 2, "wants the run's secret"),
    ("ctl 127.0.0.1:99999 status --secret secret", 2, "HOST:PORT"),
    ("ctl 127.0.0.1:1 status --secret nowhere", 2, "nowhere"),
    ("ctl 127.0.0.1:1 status --secret secret", 5, "no run listens at 127.0.0.1:1"),
    ("ctl texts --timeout 0 status", 2, "--timeout is '0', wanted 0.1 to 1000000"),
    ("ctl stale status", 5, "no run listens at 127.0.0.1:1", "job.json"),
    ("", 2, "'dynmo' wants a command: data, plan"),
    ("help", 2, "'help' is not known here"),
    ("trian", 2, "did you mean 'train'?"),
]
TRAIN = [
    ("train", 2, "data.path is not set: wanted a folder made by `dynmo data prepare`"),
    ("train --data nowhere", 2, "data.path is 'nowhere', which does not exist"),
    ("train --data texts", 2, "data.path is 'texts', which has no dataset.json"),
    ("train --data data --gpus 2", 2, "'--gpus' is not known here, known are "),
    ("train --data data --step 2", 2, "did you mean '--steps'?"),
    ("train --data data --train.stesp 2", 2, "did you mean '--train.steps'?"),
    ("train --data data --train.steps=10 --train.steps=20", 2, "--train.steps is given 2 times, wanted it once"),
    ("train --data data --train.steps", 2, "--train.steps has no value"),
    ("train --data data --train.steps ten", 2, "train.steps is 'ten', wanted a whole number"),
    ("train --data data --set train.steps", 2, "wanted key=value"),
    ("train --data data --set model.layers=4", 2, "'model.layers' is not a known key"),
    ("train --data data --config nowhere.toml", 2, "nowhere.toml"),
    ("train --data data --config typo.toml", 2, "typo.toml:2"),
    ("train --data data -n 0", 2, "-n is 0, wanted 1 rank or more"),
    ("train --data data -n 99 TINY", 2, "99 ranks", "8 layers"),
    ("train --data data -n 9 --dry-run TINY", 2, "9 ranks"),
    ("train --data data --set model.blocks=100000000", 2, "model.blocks is 100000000", "1 to 4096"),
    ("train --data data --set model.hidden=16777216 --dry-run", 2, "model.hidden is 16777216", "1 to 131072"),
    ("train --data data --set model.intermediate=99999999", 2, "model.intermediate is 99999999", "1 to 1048576"),
    ("train --data data --run.device gpu", 2, "run.device is 'gpu', wanted cpu, cuda or emulated"),
    ("train --data data --pipeline.schedule 2f2b", 2, "pipeline.schedule"),
    ("train --data data --model.heads 7", 2, "model.h"),
    ("train --data data --optimizer.learning_rate 0", 2, "optimizer.learning_rate is 0"),
    ("train --data data --resume=maybe", 2, "--resume is 'maybe', wanted always or auto"),
    ("train --data data --out none --resume TINY", 4, "no usable checkpoint", "none/checkpoints", "run.directory", "checkpoint.every"),
    ("train --out none --resume TINY", 2, "data.path", "none/config.toml"),
    ("train --out none --resume --data gone TINY", 2, "gone", "none/config.toml"),
    ("CUDA_VISIBLE_DEVICES= train --data data --out o --run.device cuda TINY", 2, "run.device = cuda: ", "set run.device = cpu"),
    ("train --data data --out run --resume TINY --train.steps=4 --checkpoint.every=2 --train.seed=9", 2, "train.seed is 9, the run's is "),
    ("train --data data --out run-2 TINY", 2, "'run-2' holds an earlier run", "--resume", "--overwrite"),
    ("train --data data --out run --resume --overwrite", 2, "--overwrite with --resume"),
    ("train --data data --compare static,dynamic", 2, "'dynamic'"),
    ("train --data data --compare static,static", 2, "'static' twice"),
    ("train --data data --compare static,dense", 2, "names dense behind static"),
    ("train --data data --out run-3 --compare static,balanced --resume", 2, "--resume with --compare"),
    ("train --data data --resume --dry-run", 2, "--resume with a dry run"),
    ("train --data data --pipeline.memory 1KiB --dry-run -n 2 TINY", 3, "memory"),
    ("train --join nowhere", 5, "no elastic run goes on in 'nowhere'"),
    ("train --join run", 5, "no elastic run goes on in 'run'"),
    ("train --join run --steps 3", 2, "--join takes the settings of the run"),
    ("train x.toml", 2, "'x.toml' is a word without a flag: a config is given by --config x.toml"),
    ("train data", 2, "'data' is not known here, did you mean '--data'?"),
    ("train --data data x y", 2, "'x' is one word too many"),
    ("train --data data --no.such.key 3", 2, "'--no.such.key' is not known here, known are --help, "),
    ("train --data data --restarts=-1", 2, "--restarts: -1 is below 0"),
    ("train --data data --steps 2 --train.steps 3", 2, "--train.steps is 3 and --steps is 2, which are one key"),
    ("train --data data --set train.steps=4 --steps 2", 2, "--set train.steps is 4 and --steps is 2, which are one key"),
    ("train --data data --out a --run.directory b", 2, "--run.directory is b and --out is a, which are one key"),
    ("train --data data -n 2 --pipeline.ranks 3", 2, "--pipeline.ranks is 3 and -n is 2, which are one key"),
    ("train --data data --secret secret", 2, "--secret does nothing here: wanted --join HOST:PORT with it, or no --secret"),
    ("train --data data --cluster cluster.json", 2, "--cluster does nothing here: wanted --dry-run with it"),
    ("train --data data --compare static,balanced --balance.enabled false", 2, "balance.enabled is false with --compare"),
    ("train --data data --elastic.pack auto", 2, "elastic.pack is 'auto' with elastic.enabled = false, which does not use it"),
    ("train --data data --elastic.enabled true --elastic.pack_slack 0.1", 2, "elastic.pack_slack is 0.1 with elastic.pack = never"),
    ("train --data data -n 2 TINY --elastic.enabled true --elastic.ranks_min 10", 2, "elastic.ranks_min is 10, wanted at most the 2 ranks"),
    ("train --data data -n 2 TINY --elastic.enabled true --elastic.pack_ranks 10", 2, "elastic.pack_ranks is 10, wanted at most the 2 ranks"),
    ("train --data data --emulated.profile nofile", 2, "emulated.profile is 'nofile' with run.device = cpu"),
    ("train --data data --run.device emulated --emulated.profile profile.json --model.hidden 64", 2, "model.hidden is 64 with run.device = emulated"),
    ("train --data data --moe.experts 4", 2, "moe.experts is 4 with moe.enabled = false, which does not use it: wanted moe.enabled = true"),
    ("train --data data --freezing.fraction 0.5", 2, "freezing.fraction is 0.5 with freezing.enabled = false"),
    ("train --data data --early_exit.survivors 0.5", 2, "early_exit.survivors is 0.5 with early_exit.enabled = false"),
    ("train --data data --early_exit.enabled true", 2, "early_exit.warm_up is 500: no token would leave in 200 steps"),
    ("train --data data --pipeline.stages_per_rank 4", 2, "pipeline.stages_per_rank is 4 with pipeline.schedule = 1f1b"),
    ("train --data data --checkpoint.keep 5", 2, "checkpoint.keep is 5 with checkpoint.every = 0"),
    ("train --data data --train.init nowhere TINY", 4, "nowhere"),
    ("train --data data --out . --overwrite TINY", 2, "which is of no run: wanted another --out"),
    ("train --data data --out data TINY", 2, "'data' holds 'data/dataset.json', which is of no run"),
    ("train --data data --out texts/a.txt TINY", 2, "cannot make folder 'texts/a.txt'"),
    ("train --data data --out texts/a.txt/below TINY", 2, "cannot make folder 'texts/a.txt/below'"),
    ("train --data data --set run.directory= TINY", 2, "run.directory is ''"),
    ("train --data data/train.bin TINY", 2, "data.vocabulary is not set"),
    ("train --config scenario.toml --data data", 2, "scenario.toml:4: 'cluster.pipeline_ranks' is not a known key"),
    ("train --data data --set train.validation_every=500", 2, "train.validation_every is 500 with train.steps = 200"),
    ("train --data data --pipeline.schedule auto --pipeline.cut [2,6] -n 2", 2, "pipeline.schedule is 'auto' with pipeline.cut = [2, 6]"),
    ("train --data data --model.sequence 100000 --out o", 2, "data/train.bin has ", "wanted at least 100001"),
    ("train --data data --model.precision fp16", 2, "model.precision: 'fp16' is no precision", "fp32 or bf16"),
    ("train --data data --data.vocabulary 300 --out o TINY", 2, "data.vocabulary is 300, but 'data' was prepared with 257"),
    ("train --data data --pipeline.cut [1,2] -n 2 --out o TINY", 2, "pipeline.cut is [1, 2], wanted 2 parts"),
    ("train --data data --pipeline.cut [9223372036854775807,1] -n 2 --out p TINY", 2, "pipeline.cut is [9223372036854775807, 1]"),
    ("train --data data --restarts 2 --compare static,balanced --out o TINY", 2, "--restarts with --compare"),
    (f"{LAUNCHED} train --data data -n 3 --out o TINY", 2, "-n (pipeline.ranks) is 3, but a launcher has started 2 ranks (RANK is set)"),
    (f"{LAUNCHED} train --data data --pipeline.ranks 3 --dry-run TINY", 2, "-n (pipeline.ranks) is 3"),
    (f"{LAUNCHED} train --data data --restarts 1 --out o TINY", 2, "--restarts for ranks that somebody else has started"),
    ("RANK=0 train --data data --out o TINY", 2, "RANK but not WORLD_SIZE"),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 train --data data --out o TINY", 2, "RANK='2'"),
    ("RANK=two WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 train --data data --out o TINY", 2, "RANK", "two"),
    (f"{LAUNCHED} train --data data --out o --elastic.enabled true --elastic.listen 127.0.0.1 TINY", 2, "elastic.listen is 127.0.0.1, wanted auto or loopback"),
    ("train --data data -n 2 --compare static,balanced --elastic.enabled true --out o TINY", 2, "elastic.enabled is true with --compare"),
    ("train --data data -n 2 --elastic.enabled true --elastic.listen 192.0.2.1 --out o TINY", 2, "'192.0.2.1' is no address of this host"),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999 train --data data --out o TINY", 2, "MASTER_PORT='99999'"),
]
MODELS = [
    ("generate", 2, "model is required"),
    ("generate nowhere --prompt a", 4, "'nowhere' does not exist"),
    ("generate run", 2, "wanted one of --prompt TEXT and --prompt-tokens"),
    ("generate run --prompt a --prompt-tokens 1", 2, "wanted one of --prompt TEXT and --prompt-tokens"),
    ("generate run --prompt-tokens 1;2", 2, "--prompt-tokens"),
    ("generate run --prompt-tokens 999", 2, "999"),
    ("generate run --prompt a --tokens -1", 2, "-1"),
    ("generate run --prompt a --temperature hot", 2, "--temperature = hot"),
    ("generate run --prompt a --tokenizer nowhere", 2, "nowhere", "--tokenizer"),
    ("generate run --prompt a --top-p 0.5", 2, "--top-p does nothing here: wanted a --temperature above 0 with it"),
    ("generate run --prompt a --seed 3", 2, "--seed does nothing here: wanted a --temperature above 0 with it"),
    ("generate run --prompt-tokens 1 --tokenizer data", 2, "--tokenizer does nothing here: wanted --prompt with it"),
    ("generate run --prompt a --scores s.safetensors", 2, "--scores does nothing here: wanted --prompt-tokens with it"),
    ("generate run hello", 2, "'hello' is one word too many"),
    ("generate run --promt a", 2, "did you mean '--prompt'?"),
    ("checkpoint", 2, "'checkpoint' wants a command: "),
    ("checkpoint verify", 2, "path is required"),
    ("checkpoint verify nowhere", 4, "nowhere"),
    ("checkpoint verify texts", 4, "texts"),
    ("checkpoint verify damaged", 4, "no usable checkpoint"),
    ("checkpoint inspekt run", 2, "did you mean 'inspect'?"),
    ("checkpoint export-hf run", 2, "--out is required"),
    ("checkpoint export-hf run --out texts", 2, "'texts' is there and holds a.txt", "--overwrite"),
    ("checkpoint export-hf nowhere --out e", 4, "nowhere"),
    ("checkpoint export-hf run --out e --dtype fp16", 2, "--dtype is 'fp16', wanted fp32 or bf16"),
    ("checkpoint export-hf run --out e --shard-size 0", 2, "--shard-size is 0, wanted more than 0, such as 5GB"),
    ("checkpoint import-hf texts i", 2, "'texts' has no config.json"),
    ("checkpoint import-hf texts", 2, "run is required"),
    ("checkpoint import-hf run i", 2, "'run' has no config.json"),
    ("checkpoint import-hf hf run", 2, "'run' has checkpoints already"),
    ("checkpoint import-hf hf other", 2, "'other' holds 'other/config.toml': wanted a new folder"),
    ("checkpoint export-hf run --out run-4", 2, "'run-4' is there and holds checkpoints", "--overwrite"),
    ("checkpoint export-hf run --out texts/a.txt", 2, "texts/a.txt"),
    ("checkpoint inspect hf", 4, "no usable checkpoint"),
    ("generate data --prompt a", 4, "no usable checkpoint: 'data' has neither"),
    ("generate run --prompt a --top-p 2 --temperature 1", 2, "top-p of 2, wanted above 0 and at most 1"),
    ("generate run --prompt a --temperature -1", 2, "temperature of -1, wanted 0 or more"),
    ("generate run --prompt-tokens 1 --scores s", 2, "--scores of 1 + 200 tokens, wanted at most the model's 16"),
    ("report run --html run/summary.json", 2, "a file of the run and --html are both 'run/summary.json'"),
    ("report run --traffic run/traffic.jsonl", 2, "a file of the run and --traffic are both 'run/traffic.jsonl'"),
    ("report run --html x.html --traffic", 2, "--html with --traffic: wanted one of them"),
    ("data prepare texts --out run", 2, "'run' holds checkpoints"),
    ("plan run --ranks 2", 2, "cannot read 'run': Is a directory"),
]
CORE = [*DATA, *PLAN, *SIMULATE, *REPORT_TRACE_CTL]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Mistakes(ProgramCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-mistakes-"))
        for folder in ("texts", "empty", "stale"):
            (cls.folder / folder).mkdir()
        files = {
            "texts/a.txt": "a line of text\n" * 200, "broken.jsonl": "{\n", "keyless.jsonl": '{"body": "a"}\n', "texts.bz2": "BZh", "empty.toml": "# nothing\n",
            "profile.json": json.dumps(PROFILE), "config.json": json.dumps(LLAMA), "bert.json": json.dumps({**LLAMA, "model_type": "bert"}),
            "cluster.json": json.dumps({"format": "dynmo-cluster-1", "ranks": [{}, {}]}), "secret": "0" * 32, "stale/secret": "0" * 32,
            "stale/job.json": json.dumps({"format": "dynmo-job-1", "address": "127.0.0.1", "port": 1, "host": "", "pid": 1}),
            "scenario.toml": "[model]\nblocks = 4\n[cluster]\npipeline_ranks = 2\n[training]\nsteps = 3\nmicro_batches = 4\n",
            "typo.toml": "[model]\nblock = 4\n", "half.toml": "[model\n"}
        for name, text in files.items():
            (cls.folder / name).write_text(text)
        cls.must("data", "prepare", "texts", "--out", "data")
        cls.must("plan", "profile.json", "--ranks", "3", "--balancer", "uniform", "--schedule", "1f1b", "--out", "plan.json")
        if RUNTIME.exists():
            cls.must("train", "--data", "data", "--out", "run", "-n", "1", *TINY, "--train.steps=4", "--checkpoint.every=2")
            cls.must("checkpoint", "export-hf", "run", "--out", "hf")
            (cls.folder / "other").mkdir()
            (cls.folder / "other/config.toml").write_text("# mine\n")
            for copy in ("run-2", "run-3", "run-4", "damaged"):  # one command at a time holds a run's lock
                shutil.copytree(cls.folder / "run", cls.folder / copy)
            for manifest in (cls.folder / "damaged").rglob("manifest.json"):
                manifest.write_text(manifest.read_text()[:-20])

    @classmethod
    def must(cls, *words):
        subprocess.run([DYNMO, *words], check=True, capture_output=True, cwd=cls.folder, timeout=100, stdin=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def run_words(self, words):
        """NAME=VALUE before the command is a variable of its environment, as a launcher sets it."""
        variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))
        command = [part for word in words[len(variables):] if word for part in (TINY if word == "TINY" else [word])]
        return self.run_program(*command, env=variables)

    def check(self, rows):
        before = content(self.folder)
        with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
            results = list(pool.map(lambda row: self.run_words(row[0].split(" ")), rows))
        for row, result in zip(rows, results):
            with self.subTest(command=row[0]):
                self.assert_error(result, row[1], *row[2:])
        after = content(self.folder)
        for path, bytes_before in before.items():
            self.assertEqual(after.get(path), bytes_before, f"{path} is lost or changed")

    def test_of_data(self):
        self.check(DATA)

    def test_of_plan(self):
        self.check(PLAN)

    def test_of_simulate(self):
        self.check(SIMULATE)

    def test_of_report_trace_and_ctl(self):
        self.check(REPORT_TRACE_CTL)

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_of_train(self):
        self.check(TRAIN)

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_of_generate_and_checkpoint(self):
        self.check(MODELS)

    def test_the_table_has_as_many_as_were_tried_and_none_twice(self):
        commands = [row[0] for row in (*CORE, *TRAIN, *MODELS)]
        self.assertEqual(len(commands), len(set(commands)))
        self.assertGreaterEqual(len(CORE), 150)


if __name__ == "__main__":
    unittest.main()
