# SPDX-License-Identifier: Apache-2.0
"""The planner's formulas against the classes of transformers: parameters of every block to the last one, and products.

Small configs are drawn for every family. transformers builds each on the device "meta", and its layers are counted.
"""
import random
import unittest

import dynmo
from dynmo import _core, _meta

SEEDS = 12
ABSENT = object()  # leaves out a key that most families have
HEADS = object()  # as many as heads


def sizes(draw):
    heads = draw.choice([2, 4, 8])
    return {"hidden_size": heads * draw.choice([16, 32]), "num_hidden_layers": draw.randint(2, 7), "num_attention_heads": heads,
            "num_key_value_heads": draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0]), "vocab_size": draw.randint(64, 300),
            "intermediate_size": draw.randint(20, 150), "max_position_embeddings": 256, "tie_word_embeddings": draw.random() < 0.5,
            # Special tokens lie in the vocabulary.
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def heads_of(draw):
    return {"head_dim": draw.choice([8, 16, 24])}


def biases(draw, *keys):
    return {key: draw.random() < 0.5 for key in keys}


def experts(draw, key="num_experts"):
    count = draw.choice([4, 6, 8])
    return {key: count, "num_experts_per_tok": draw.randint(1, 4), "moe_intermediate_size": draw.randint(10, 60)}


def latent(draw):
    ranks = {"kv_lora_rank": draw.randint(8, 40), "q_lora_rank": draw.choice([None, 24, 32]), "qk_nope_head_dim": draw.choice([8, 16]),
             "qk_rope_head_dim": 8, "v_head_dim": draw.choice([8, 12, 16])}
    groups = {"n_group": 1, "topk_group": 1, "n_shared_experts": draw.randint(1, 2), "first_k_dense_replace": draw.randint(0, 2)}
    return {**ranks, **groups, **experts(draw, "n_routed_experts"), "num_key_value_heads": HEADS}


def indexed(draw):
    return {**latent(draw), "q_lora_rank": 24, "index_n_heads": draw.choice([2, 4]), "index_head_dim": draw.choice([16, 32]), "index_topk": 16,
            "attention_bias": False}


def delta(draw):
    return {"linear_num_key_heads": 2, "linear_num_value_heads": draw.choice([2, 4]), "linear_key_head_dim": draw.choice([8, 16]),
            "linear_value_head_dim": draw.choice([8, 16]), "linear_conv_kernel_dim": draw.randint(2, 4), **heads_of(draw)}


def shared(draw):
    return {**experts(draw), "shared_expert_intermediate_size": draw.randint(10, 60)}


def pattern(draw):
    letters = ["M", "*", "-", "E"] + [draw.choice("M*-E") for _ in range(draw.randint(0, 4))]
    draw.shuffle(letters)
    return {"hybrid_override_pattern": "".join(letters), "num_hidden_layers": len(letters), "mamba_num_heads": draw.choice([4, 8]),
            "mamba_head_dim": 8, "ssm_state_size": draw.choice([8, 16]), "n_groups": 2, "conv_kernel": draw.randint(2, 4), "chunk_size": 16,
            "moe_shared_expert_intermediate_size": draw.randint(10, 60), "moe_latent_size": draw.choice([None, 12]), "n_group": 1,
            "topk_group": 1, "use_mamba_kernels": False, **heads_of(draw), **experts(draw, "n_routed_experts"), **biases(draw, "use_bias", "use_conv_bias", "mlp_bias")}


def gemma4(draw):
    both = {**heads_of(draw), "global_head_dim": 32, "attention_k_eq_v": draw.random() < 0.5, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0, "sliding_window": 16, "enable_moe_block": draw.random() < 0.7}
    return {**both, "num_experts": 4, "top_k_experts": draw.randint(1, 3), "moe_intermediate_size": draw.randint(10, 60)}


def compressed(draw):
    layers = draw.randint(2, 6)
    return {"num_hidden_layers": layers, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": draw.randint(4, 20), "o_groups": 2,
            "head_dim": 32, "qk_rope_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "sliding_window": 16,
            "hc_mult": draw.choice([2, 4]), "compress_ratios": [draw.choice([0, 4, 128]) for _ in range(layers)], "num_hash_layers": 1,
            **experts(draw, "n_routed_experts"), "n_shared_experts": 1, "intermediate_size": ABSENT}


def gpt(draw):
    heads = draw.choice([2, 4])
    return {"n_embd": heads * 16, "n_head": heads, "n_layer": draw.randint(1, 4), "n_inner": draw.choice([None, 100]), "n_positions": 256,
            "vocab_size": draw.randint(64, 300), "tie_word_embeddings": draw.random() < 0.5, "bos_token_id": 1, "eos_token_id": 2}


def neox(draw):
    return {**sizes(draw), "num_key_value_heads": ABSENT, **biases(draw, "attention_bias")}


def with_sizes(*parts):
    return lambda draw: {key: value for part in (sizes, *parts) for key, value in part(draw).items()}


def keys(*names):
    return lambda draw: biases(draw, *names)


FAMILIES = {
    "llama": with_sizes(heads_of, keys("attention_bias", "mlp_bias")),
    "mistral": with_sizes(heads_of),
    "qwen2": with_sizes(),
    "mixtral": with_sizes(lambda draw: {"num_local_experts": 4, "num_experts_per_tok": draw.randint(1, 4)}),
    "gpt2": gpt,
    "gpt_bigcode": lambda draw: {**gpt(draw), "multi_query": draw.random() < 0.5},
    "qwen3": with_sizes(heads_of, keys("attention_bias")),
    "qwen2_moe": with_sizes(shared, keys("qkv_bias"), lambda draw: {"decoder_sparse_step": draw.randint(1, 2), "mlp_only_layers": [0]}),
    "qwen3_moe": with_sizes(heads_of, experts, keys("attention_bias"), lambda draw: {"decoder_sparse_step": draw.randint(1, 2)}),
    "qwen3_next": with_sizes(delta, shared),
    "qwen3_5_text": with_sizes(delta),
    "qwen3_5_moe_text": with_sizes(delta, shared),
    "gemma": with_sizes(heads_of, keys("attention_bias")),
    "gemma2": with_sizes(heads_of),
    "gemma3_text": with_sizes(heads_of, keys("attention_bias")),
    "gemma4_text": with_sizes(gemma4),
    "phi3": with_sizes(),
    "olmo2": with_sizes(keys("attention_bias")),
    "olmo3": with_sizes(keys("attention_bias")),
    "granite": with_sizes(keys("attention_bias", "mlp_bias")),
    "granitemoe": with_sizes(lambda draw: {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": with_sizes(keys("attention_bias", "mlp_bias")),
    "seed_oss": with_sizes(heads_of, keys("attention_bias", "attention_out_bias", "mlp_bias")),
    "gpt_neox": neox,
    "starcoder2": with_sizes(keys("use_bias")),
    "gpt_oss": with_sizes(heads_of, lambda draw: {"num_local_experts": 4, "num_experts_per_tok": draw.randint(1, 4)}),
    "glm4_moe": with_sizes(heads_of, experts, keys("attention_bias", "use_qk_norm"), lambda draw: {"n_routed_experts": 4, "num_experts": ABSENT, "n_group": 1, "topk_group": 1,
                           "n_shared_experts": 1, "first_k_dense_replace": draw.randint(0, 2)}),
    "minimax_m2": with_sizes(heads_of, lambda draw: {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": with_sizes(heads_of, keys("attention_bias"), lambda draw: {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 90,
                              "interleave_moe_layer_step": draw.randint(1, 2), "attention_chunk_size": 64}),
    "mimo_v2_flash": lambda draw: {**sizes(draw), **experts(draw, "n_routed_experts"), "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
                                   "head_dim": 16, "v_head_dim": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v2": with_sizes(latent, keys("attention_bias")),
    "deepseek_v3": with_sizes(latent, keys("attention_bias")),
    "deepseek_v32": with_sizes(indexed),
    "glm_moe_dsa": with_sizes(indexed, lambda draw: {"index_topk_freq": draw.randint(1, 3), "index_skip_topk_offset": draw.randint(1, 3)}),
    "deepseek_v4": with_sizes(compressed),
    "nemotron_h": with_sizes(pattern),
}
# The reference code of these multiplies more than a token's experts and positions need.
OTHER_PRODUCTS = {"llama4_text": "every expert takes every token"}


def drawn(family, seed):
    draw = random.Random(f"{family} {seed}")
    config = {key: value for key, value in FAMILIES[family](draw).items() if value is not ABSENT}
    return {"model_type": family, **{key: config["num_attention_heads"] if value is HEADS else value for key, value in config.items()}}


def planned(config, sequence=256):
    return _core.work_of({"config": config, "device": "h100", "sequence": sequence})


def of_blocks(layers, field):
    """Sums by embedding, block and head."""
    sums = {}
    for layer in layers:
        place = ".".join(layer["name"].split(".")[:2]) if layer["name"].startswith("blocks.") else layer["name"]
        sums[place] = sums.get(place, 0) + layer[field]
    return sums


class Families(unittest.TestCase):
    maxDiff = None

    def test_have_the_parameters_of_the_classes_in_every_block(self):
        for family in FAMILIES:
            for seed in range(SEEDS):
                config = drawn(family, seed)
                with self.subTest(family=family, seed=seed, config=config):
                    self.assertEqual(of_blocks(planned(config), "parameters"), of_blocks(_meta.built_layers(config), "parameters"))

    def test_have_the_products_of_the_classes(self):
        for family in FAMILIES:
            if family in OTHER_PRODUCTS:
                continue
            config = drawn(family, 0)
            ours, theirs = of_blocks(planned(config), "matrix_flops"), of_blocks(_meta.work_of(config, 256), "matrix_flops")
            for place in theirs:
                with self.subTest(family=family, place=place, config=config):
                    self.assertAlmostEqual(ours[place], theirs[place], delta=0.02 * theirs[place])


class Transformers(unittest.TestCase):
    CONFIG = {"model_type": "stablelm", **sizes(random.Random(0)), "tie_word_embeddings": False}

    def test_plans_a_model_without_formulas(self):
        with self.assertRaisesRegex(dynmo.BadInputError, "stablelm"):
            planned(self.CONFIG)
        options = {"ranks": 2, "device": "h100", "sequence": 64, "evaluations": 50}
        plan = dynmo.plan(self.CONFIG, **options)
        layers = _meta.built_layers(self.CONFIG)
        self.assertEqual([layer["name"] for layer in plan.costs["layers"]], [layer["name"] for layer in layers])
        self.assertEqual([layer["parameter_bytes"] for layer in plan.costs["layers"]], [2 * layer["parameters"] for layer in layers])
        self.assertIn("layers as transformers builds them", plan.document["costs"])
        import transformers

        built = transformers.AutoConfig.for_model(**self.CONFIG)
        self.assertEqual(dynmo.plan(built, **options).document, plan.document)

    def test_counts_what_the_formulas_count(self):
        config = drawn("qwen3_moe", 1)
        ours, theirs = planned(config), _meta.work_of(config, 256)
        for field in ("parameters", "matrix_flops"):
            self.assertEqual(sum(layer[field] for layer in ours), sum(layer[field] for layer in theirs), field)

    def test_refuses_a_model_without_a_head_by_its_class(self):
        for classes in (["StableLmForSequenceClassification"], ["StableLmModel"]):
            with self.assertRaisesRegex(dynmo.BadInputError, classes[0]):
                dynmo.plan({**self.CONFIG, "architectures": classes}, ranks=2, device="h100", sequence=64)

    def test_counts_a_key_that_the_formulas_lack_if_the_class_has_it(self):
        config = {**drawn("gemma4_text", 0), "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
        plan = dynmo.plan(config, ranks=2, device="h100", sequence=64, evaluations=50)
        held = sum(layer["parameters"] + layer["copied_parameters"] for layer in _meta.built_layers(config))
        self.assertEqual(sum(layer["parameter_bytes"] for layer in plan.costs["layers"]), 2 * held)
        config = {**drawn("gpt2", 0), "attention_head_type": "multiquery"}
        with self.assertRaisesRegex(dynmo.BadInputError, "GPT2Config knows no attention_head_type"):
            dynmo.plan(config, ranks=2, device="h100", sequence=64)

    def test_does_not_hide_a_mistake_in_a_known_family(self):
        config = {**drawn("llama", 0), "max_position_embeddings": 32}
        with self.assertRaisesRegex(dynmo.BadInputError, "max_position_embeddings is 32, less than the sequence of 64"):
            dynmo.plan(config, ranks=2, device="h100", sequence=64)


if __name__ == "__main__":
    unittest.main()
