#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""families_check.py: every class behind AutoModelForCausalLM of the installed transformers, with a tiny config.

Each trains 10 steps on 3 ranks with two moves to random cuts, and must have the losses and weights of its own loop, or be refused in
one line on every rank. `--table FILE` writes what came between the marks of that page; `--only NAME...` runs some.
"""
import argparse
import collections
import os
import pathlib
import random
import signal
import sys
import tempfile
import warnings

import gloo_ranks

RANKS, STEPS, LENGTH, MICRO_BATCHES = 3, 10, 8, 2
LIMIT_S = 120  # of one family
MARKS = ("<!-- families: written by tests/peers/families_check.py -->", "<!-- families end -->")
BLOCKS = 4
# Sizes under the names that configs have for them; what a config does not have is left out.
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "embedding_size": 32, "dim": 32,
    "num_hidden_layers": BLOCKS, "n_layer": BLOCKS, "n_layers": BLOCKS, "num_layers": BLOCKS, "decoder_layers": BLOCKS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "sliding_window": 4, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "state_size": 8, "mamba_n_groups": 1, "mamba_dt_rank": 4, "time_step_rank": 4,
    "query_pre_attn_scalar": 8, "lru_width": 32, "attention_window_size": 8, "use_mamba_kernels": False, "mamba_ngroups": 1,
    "n_mamba_heads": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "rotary_dim": 4, "n_mlp": 48, "d_kv": 8,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_codebooks": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0,
    "intermediate_size_mlp": 48, "attention_chunk_size": 4, "global_head_dim": 8, "mamba_expand": 2, "expand": 2,
    # Special tokens lie in the vocabulary.
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
OFF = ("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop",
       "attn_pdrop", "attention_probs_dropout_prob", "residual_dropout", "embedding_dropout", "resid_dropout", "ffn_dropout_rate",
       "layerdrop", "decoder_layerdrop", "summary_first_dropout", "classifier_dropout", "emb_pdrop", "embed_dropout")


# What no rule about names gives.
OWN = {
    "gpt_neo": {"attention_types": [[["global", "local"], BLOCKS // 2]]}, "mamba2": {"num_heads": 4, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64}, "zaya": {"num_experts_per_tok": 1}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (BLOCKS // 2)},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"}, "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2},
}


def sizes_of(default):
    """Small sizes for the keys that a config has; parts for pictures and sounds have two blocks."""
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    given = {key: value for key, value in SIZES.items() if key in known}
    given.update({key: 0.0 for key in OFF if key in known})
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "attn_layer_types"):
        value = getattr(default, key, None) if key in default.to_dict() and not isinstance(getattr(type(default), key, None), property) else None
        if isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(value))
            given[key] = [kinds[index % len(kinds)] for index in range(BLOCKS)]
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    if "shared_intermediate_size" in known and "layer_types" in known:
        given["layer_types"] = ["mamba", "attention"] * (BLOCKS // 2)
    if "attn_layer_indices" in known:
        given["attn_layer_indices"] = [1, 3]
    if "is_decoder" in known:
        given.update(is_decoder=True)
    if "patch_size" in known or "num_mel_bins" in known:
        given.update({key: 2 for key, value in given.items() if value == BLOCKS and "layer" in key})
    for name in getattr(type(default), "sub_configs", {}):
        part = getattr(default, name, None)
        if hasattr(part, "to_dict"):
            given[name] = type(part)(**{**sizes_of(part), **OWN.get(part.model_type, {})})
    return given


def config_of(kind):
    """A tiny config: the class's own keys, with small sizes."""
    from transformers import AutoConfig

    given = {**sizes_of(AutoConfig.for_model(kind)), **OWN.get(kind, {})}
    return AutoConfig.for_model(kind, **given, tie_word_embeddings=False, is_encoder_decoder=False)


def make(kind):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config_of(kind)).parameters())
    if count > 20_000_000:
        raise ValueError(f"its tiny config has {count} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind)).train()


def batch_of(step):
    import torch

    ids = torch.randint(3, 90, (MICRO_BATCHES, LENGTH + step % 2), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


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


def sweep(kinds):
    """What came of each family, on all ranks the same; a group that ended goes on behind the family that ended it."""
    found, rest = {}, list(kinds)
    with tempfile.TemporaryDirectory() as folder:
        while rest:
            gloo_ranks.run([sys.executable, __file__, "--rank", folder, "--only", *rest], RANKS, LIMIT_S * (len(rest) + 1))
            for kind in list(rest):
                paths = [pathlib.Path(folder, f"{kind}.{rank}") for rank in range(RANKS)]
                said = [tuple(path.read_text().partition("\t")[::2]) if path.exists() else ("?fails", "a rank ended or hung") for path in paths]
                ended = any(verdict.startswith("?") for verdict, _ in said)  # the group has, in the middle
                said = [(verdict.lstrip("?"), why) for verdict, why in said]
                rest.remove(kind)
                verdicts = {verdict for verdict, _ in said}
                if len(set(said)) == 1:
                    found[kind] = said[0]
                elif len(verdicts) == 1 and verdicts != {"refused"}:
                    found[kind] = said[0]
                else:
                    worst = next((one for one in said if one[0] in ("differs", "fails")), said[0])
                    found[kind] = worst if worst[0] != "refused" else ("fails", "ranks say different lines")
                print(f"{kind}: {found[kind][0]} {found[kind][1]}", flush=True)
                if ended:
                    break
    return found


def table(found, version):
    counts = collections.Counter(verdict for verdict, _ in found.values())
    told = {"equal": "equal bit for bit", "refused": "refused", "differs": "another loss", "fails": "an error in the middle",
            "no loop": "the class has no loop with a tiny config here"}
    lines = [f"Of {len(found)} kinds of transformers {version}, {len(found) - counts['no loop']} have a loop with a tiny config here, and "
             f"{counts['equal']} of them are equal bit for bit. The check prints the line of each refusal.", "", "| kinds | |", "| --- | --- |"]
    for verdict, meaning in told.items():
        kinds = [kind for kind, (came, _) in found.items() if came == verdict]
        if kinds:
            lines.append(f"| {f'{len(kinds)} others' if verdict == 'no loop' else ' '.join(kinds)} | {meaning} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", help="the program; its build folder has the package")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rank", help="folder of the results; this process is one rank")
    parser.add_argument("--table", type=pathlib.Path, help="a page, whose table is written again")
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.only, arguments.rank)
        return 0
    gloo_ranks.use_package(arguments.dynmo)
    import transformers

    found = sweep(arguments.only or kinds_behind_auto())
    if arguments.table:
        page = arguments.table.read_text()
        before, rest = page.split(MARKS[0])
        arguments.table.write_text(f"{before}{MARKS[0]}\n{table(found, transformers.__version__)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    for kind, (verdict, why) in found.items():
        if verdict in ("differs", "fails"):
            print(f"FAIL {kind}: {verdict}: {why}")
        elif verdict == "no loop":
            print(f"SKIP {kind}: {why}")
        else:
            print(f"PASS {kind}")
    return 1 if any(verdict in ("differs", "fails") for verdict, _ in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
