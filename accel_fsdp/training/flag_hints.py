"""Flags of TRL and of older Trainers, and their equivalents here."""

TRL = {
    "activation_offloading": "--gradient_checkpointing true, or fsdp_offload_params: true in the YAML",
    "config": "write the arguments on the command line; the YAML of --config_file is Accelerate's",
    "dataset_kwargs": "leave it out: chat templates and end tokens are handled by the kind of the rows",
    "dataset_streaming": "--streaming true --max_steps N",
    "eval_packing": "leave it out: the evaluation split is packed as the training split is",
    "evaluation_strategy": "--eval_strategy",
    "group_by_length": "--train_sampling_strategy group_by_length",
    "load_in_8bit": "--load_in_4bit true (QLoRA); FSDP1 can't shard an 8-bit base",
    "lora_target_parameters": "--lora_target_modules: linear layers alone; experts that are not modules stay frozen",
    "lora_task_type": "leave it out: this script trains causal language models alone",
    "loss_type": "leave it out: the loss is TRL's nll, the mean over all tokens of all processes",
    "max_seq_length": "--max_length",
    "model_init_kwargs": "--dtype, --attn_implementation, --model_revision or --trust_remote_code",
    "packing_strategy": "--packing true: best-fit decreasing, no row is cut (TRL's bfd; wrapped has no counterpart)",
    "padding_free": "--packing true, which knows no padding; or --train_sampling_strategy group_by_length",
    "pad_to_multiple_of": "leave it out: rows are padded to the longest of a batch; --packing true saves that",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "router_aux_loss_coef": "router_aux_loss_coef and output_router_logits: true in the model's config.json",
    "shuffle_dataset": "leave it out: rows are shuffled, unless --train_sampling_strategy sequential",
    "torch_dtype": "--dtype",
    "use_bnb_nested_quant": "leave it out: only --bnb_4bit_quant_type and --bnb_4bit_quant_storage are supported",
    "use_liger": "--use_liger_kernel true",
    "warmup_ratio": "--warmup_steps with the share, such as 0.1",
}
"""The name without dashes, and what to type."""
