"""Shape of the nano model: 8 layers (KDA KDA KDA MLA, twice), one dense, 32 experts top-8, and an MTP layer.

Dimensions are the smallest that exllamav3's kernels accept (128-multiples everywhere an EXL3 linear is), and are
chosen so that the 3.05 bpw checkpoint stays under 10 MB in a wheel: hidden 128 keeps the tensors that EXL3 leaves in
16 or 32 bits small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .corpus import VOCAB

LAYERS, HIDDEN, EXPERTS, TOP_K, EXPERT_DIM = 8, 128, 32, 8, 128
KDA_HEADS, KDA_DIM = 2, 128


def text_config() -> dict[str, Any]:
    kinds = ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)]
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "moe_intermediate_size": EXPERT_DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 0,
        "mla_use_nope": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * LAYERS,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "linear_attn_config": {
            "num_heads": KDA_HEADS,
            "head_dim": KDA_DIM,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, k in enumerate(kinds) if k == "linear_attention"],
            "full_attn_layers": [i for i, k in enumerate(kinds) if k != "linear_attention"],
        },
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "use_cache": True,
        "num_nextn_predict_layers": 1,
    }


def model_config(tok: Tokenizer) -> dict[str, Any]:
    """The whole config.json before quantisation; the vision tower is declared, as loaders demand, and never built."""
    token = {
        s: tok.token_to_id(s)
        for s in (
            "<|endoftext|>",
            "<|user|>",
            "<|observation|>",
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        )
    }
    stops = [token[s] for s in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 128,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "num_heads": 2,
        "in_channels": 3,
        "image_size": 56,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 256,
        "projection_intermediate_size": 256,
        "swiglu_limit": 10.0,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": token["<|image|>"],
        "video_token_id": token["<|video|>"],
        "image_start_token_id": token["<|begin_of_image|>"],
        "image_end_token_id": token["<|end_of_image|>"],
        "video_start_token_id": token["<|begin_of_video|>"],
        "video_end_token_id": token["<|end_of_video|>"],
        "text_config": {**text_config(), "pad_token_id": token["<|endoftext|>"], "eos_token_id": stops},
        "vision_config": vision,
    }


def write_side_files(out: Path, tok: Tokenizer, template: str) -> None:
    """config.json, generation_config.json, processor_config.json and the chat template beside the tokenizer."""
    config = model_config(tok)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    pad, stops = config["text_config"]["pad_token_id"], config["text_config"]["eos_token_id"]
    (out / "generation_config.json").write_text(
        json.dumps(
            {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": stops, "pad_token_id": pad}, indent=1
        )
    )
    image = {
        "image_processor_type": "Glm5NextImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_image_tokens": 4,
        "max_image_tokens": 1024,
        "do_rescale": True,
        "do_normalize": True,
        "do_resize": True,
        "rescale_factor": 1 / 255,
    }
    (out / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": "Glm5NextProcessor",
                "image_processor": image,
                "video_processor": {**image, "video_processor_type": "Glm5NextVideoProcessor"},
            },
            indent=1,
        )
    )
    (out / "chat_template.jinja").write_text(template)
