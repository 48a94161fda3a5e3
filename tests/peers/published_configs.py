#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plans every config.json of a folder, and compares it with the class of transformers: parameters, and products of a forward pass.

A line for each file: refused and why, or its parameters and how far the products are from those of transformers. Classes that
transformers has under another type are built as that type. Needs the package `dynmo`, PyTorch and transformers.
"""
import argparse
import copy
import json
import pathlib
import sys

import dynmo
from dynmo import _core, _meta

# Files' types whose class transformers has under another name.
SAME = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "deepseek_ref": "deepseek_v4", "minimax_m3": "minimax_m3_vl_text",
        "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
# Every token visits every expert in this class, whose results are zero but for one.
OTHER_PRODUCTS = ("llama4_text",)
TOKENS = 256


def text_config(config):
    """The text model's part, with the ties of the whole, and only what describes its shape."""
    text = copy.deepcopy(config.get("text_config") or config)
    text.setdefault("model_type", f"{config['model_type']}_text")
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", None))
    if text["tie_word_embeddings"] is None:
        del text["tie_word_embeddings"]
    for key in ("architectures", "quantization_config", "auto_map", "transformers_version"):
        text.pop(key, None)
    text["model_type"] = SAME.get(text["model_type"], text["model_type"])
    return text


def read(path):
    """As transformers reads it: Infinity and NaN are numbers."""
    return json.loads(path.read_text())


def plannable(config):
    """Without numbers that are not JSON."""
    return json.loads(json.dumps(config), parse_constant=str)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--no-products", action="store_true", help="compare parameters only")
    arguments = parser.parse_args()
    planned, differ, unknown, known = 0, 0, 0, {}
    paths = sorted(arguments.folder.rglob("*.json"))
    for path in paths:
        config = read(path)
        try:
            ours = _core.work_of({"config": plannable(config), "device": "h100", "sequence": TOKENS})
        except dynmo.BadInputError as error:
            print(f"refused {path.name}: {error}", flush=True)
            continue
        planned += 1
        parameters = sum(layer["parameters"] for layer in ours)
        text = text_config(config)
        key = json.dumps(text, sort_keys=True)
        try:
            if key not in known:
                known[key] = _meta.built_layers(text) if arguments.no_products else _meta.work_of(text, TOKENS)
        except Exception as error:
            unknown += 1
            print(f"planned {path.name}: {parameters:,.0f} parameters; transformers: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        theirs = sum(layer["parameters"] for layer in known[key])
        line = f"planned {path.name}: {parameters:,.0f} parameters, {parameters - theirs:+,.0f}"
        wrong = parameters != theirs
        if not arguments.no_products and text["model_type"] not in OTHER_PRODUCTS:
            mine, counted = (sum(layer["matrix_flops"] for layer in layers) for layers in (ours, known[key]))
            line += f"; products {100 * (mine / counted - 1):+.3f} %"
            wrong = wrong or abs(mine / counted - 1) > 0.02
        differ += wrong
        print(line + (" DIFFERS" if wrong else ""), flush=True)
    print(f"{planned} of {len(paths)} planned, {differ} differ from transformers, {unknown} of them have no class there")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
