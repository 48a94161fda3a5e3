# SPDX-License-Identifier: Apache-2.0
"""Tiny configs, models and batches for the kinds of transformers, by rules about the names of keys."""

BLOCKS, LENGTH, MICRO_BATCHES = 4, 8, 2
VOCABULARY = 96
LARGE = 100_000  # a vocabulary of whatever, such as bytes in a row or n-grams
MAX_PARAMETERS = 20_000_000
# Sizes under the names that configs have for them; what a config does not have is left out.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "embedding_size": 32, "dim": 32,
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
    "linear_num_heads": 4, "linear_head_dim": 8,
    "intermediate_size_mlp": 48, "attention_chunk_size": 4, "global_head_dim": 8, "mamba_expand": 2, "expand": 2,
    # Blocks in front of those that run in a loop, and behind them.
    "n_input_layers": 1, "n_output_layers": 1,
    # Special tokens lie in the vocabulary.
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
OFF = ("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop",
       "attn_pdrop", "attention_probs_dropout_prob", "residual_dropout", "embedding_dropout", "resid_dropout", "ffn_dropout_rate",
       "layerdrop", "decoder_layerdrop", "summary_first_dropout", "classifier_dropout", "emb_pdrop", "embed_dropout")


# What no rule about names gives, by the model type of a config or of a part.
OWN = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (BLOCKS // 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], BLOCKS // 2]]}, "mamba2": {"num_heads": 4, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64}, "zaya": {"num_experts_per_tok": 1}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (BLOCKS // 2)},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"}, "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},  # its blocks read what its default has not
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
                        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "shared_experts_intermediate_size": 16},
}


def sizes_of(default):
    """Small sizes for the keys that a config has; parts for pictures and sounds have two blocks."""
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    given = {key: value for key, value in SIZES.items() if key in known}
    given.update({key: 0 if type(getattr(default, key, None)) is int else 0.0 for key in OFF if key in known})
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "attn_layer_types"):
        value = getattr(default, key, None) if key in default.to_dict() and not isinstance(getattr(type(default), key, None), property) else None
        if isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(value))
            given[key] = [kinds[index % len(kinds)] for index in range(BLOCKS)]
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    for key in known:
        if "vocab" in key and "offset" not in key and isinstance(getattr(default, key, None), int) and getattr(default, key) > LARGE:
            given[key] = VOCABULARY
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


def class_and_config(kind):
    """The class behind a kind, and a tiny config: the config's own keys with small sizes. Of a model with parts, the part that the class takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    default = AutoConfig.for_model(kind)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(default)]
    parts = [getattr(default, name, None) for name in type(default).sub_configs]
    default = next((part for part in parts if type(part) is getattr(model_class, "config_class", None)), default)
    given = {**sizes_of(default), **OWN.get(default.model_type, {})}
    config = type(default)(**given, tie_word_embeddings=False, is_encoder_decoder=False)
    config.output_router_logits = True  # those of experts add a loss of all routers
    return model_class, config


def make(kind):
    import torch

    model_class, config = class_and_config(kind)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"its tiny config has {count} parameters")
    torch.manual_seed(0)
    return model_class._from_config(class_and_config(kind)[1]).train()


def batch_of(step):
    import torch

    ids = torch.randint(3, 90, (MICRO_BATCHES, LENGTH + step % 2), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}
