"""Owns the types of the values that model families read from config.json, where a wrong one would fail far from it."""

from collections.abc import Mapping
from typing import Any

from tei_grpc.loading.files import read_value
from tei_grpc.loading.model_config import CONFIG

_KEYS: Mapping[type, str] = {
    int: """
        vocab_size type_vocab_size max_position_embeddings original_max_position_embeddings hidden_size
        intermediate_size embedding_size pooler_hidden_size head_dim dim hidden_dim num_hidden_layers
        num_attention_heads num_key_value_heads n_layers n_heads n_embd n_inner n_layer n_head num_experts
        moe_top_k moe_every_n_layers num_labels sliding_window sliding_window_pattern max_window_layers
        local_attention pad_token_id global_attn_every_n_layers position_buckets max_relative_positions
        conv_kernel_size conv_groups
    """,
    float: """
        layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps query_pre_attn_scalar rope_theta
        rope_local_base_freq global_rope_theta local_rope_theta rotary_emb_base rotary_scaling_factor
    """,
    str: """
        hidden_act hidden_activation activation activation_function classifier_activation conv_act
        pooler_hidden_act classifier_pooling clf_pooling feed_forward_type
    """,
    list: "layer_types",
    dict: "rope_parameters rope_scaling id2label",
}


def check_keys(hf_config: Mapping[str, Any]) -> None:
    """Raise StartupError naming a key of config.json whose value is of another type than families read it as."""
    for kind, keys in _KEYS.items():
        for key in keys.split():
            read_value(hf_config, key, kind, CONFIG)
